"""``veloxquant generate`` on a tiny model whose files lie in a folder like any other."""

import io
import json
import re
import subprocess
import sys

import attrs
import mlx.core as mx
import mlx_lm
import pytest
from core_test_helpers import save_byte_model

from veloxquant import ConfigError
from veloxquant import DenseRows
from veloxquant import MethodInfo
from veloxquant import Snapshot
from veloxquant import hookimpl
from veloxquant.cli import display
from veloxquant.cli import generate
from veloxquant.cli import main
from veloxquant.cli import model_files
from veloxquant.cli.generation import agreement
from veloxquant.cli.generation import default_step
from veloxquant.registry import default_registry
from veloxquant.testing.toys import tiny_llama

LAYERS = 2
CHAT = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@attrs.frozen(kw_only=True)
class RecentConfig:
    rows: int = attrs.field(default=8, validator=attrs.validators.ge(1), metadata={"help": "rows kept"})
    window: int = 2
    storage: str | None = None

    def __attrs_post_init__(self):
        if self.rows <= self.window:
            raise ConfigError(f"recent: rows must exceed window = {self.window}, not {self.rows}")


@attrs.define(eq=False)
class RecentState:
    config: RecentConfig
    rows: DenseRows = attrs.field(factory=DenseRows)


class Recent:
    """Keeps the last rows of a prompt."""

    needs = ()

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(
            name="recent", config=RecentConfig, summary="last rows", kind="toy", needs=self.needs, evicts=True
        )

    @hookimpl
    def veloxquant_create(self, config):
        return RecentState(config)

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        state.rows.append(keys, values)
        return state.rows.keys_values()

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        state.rows.append(keys, values)
        return state.rows.keys_values()

    @hookimpl
    def veloxquant_attend(self, state):
        return None

    @hookimpl
    def veloxquant_finish_prompt(self, state):
        count, keep = state.rows.count, min(state.rows.count, state.config.rows)
        heads = state.rows.keys_values()[0].shape[1]
        state.rows.keep(mx.broadcast_to(mx.arange(count - keep, count), (1, heads, keep)))

    @hookimpl
    def veloxquant_account(self, state):
        return attrs.evolve(state.rows.account(), rows=state.rows.count)

    @hookimpl
    def veloxquant_serialize(self, state):
        return Snapshot(state.rows.arrays())

    @hookimpl
    def veloxquant_restore(self, config, snapshot):
        state = RecentState(config)
        state.rows.load(snapshot.arrays)
        return state


@pytest.fixture(autouse=True)
def _plain_output(plain_output):
    pass


@pytest.fixture(autouse=True)
def _recent():
    default_registry.cache_clear()
    default_registry().register(Recent())
    yield
    default_registry.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder: a random llama over bytes, with a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_byte_model(path, tiny_llama(layers=LAYERS, vocab=260), chat_template=CHAT)
    return path


@pytest.fixture
def run(folder, capsys):
    """Returns a function that runs the command on the tiny model; it gives code, stdout and stderr."""

    def call(*words, model=folder):
        chosen = () if model is None else ("--model", str(model))
        code = main(["generate", "--method", "recent", *chosen, "--max-tokens", "6", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def ask(run):
    """The same for ``--json``: gives the record."""

    def call(*words, **options):
        code, out, err = run("--json", *words, **options)
        assert code == 0, err
        return json.loads(out)

    return call


# --------------------------------------------------------------- what it shows


def test_text_and_table(run):
    code, out, err = run("--prompt", "a" * 40, "--set", "rows=10")
    assert code == 0
    row = next(line for line in out.splitlines() if line.strip().startswith("recent ")).split()
    assert row[1:3] == ["48", "16"]  # the prompt in its template and six tokens
    assert row[6] == "routed"
    assert "plain" not in [line.split()[0] for line in out.splitlines() if line.strip() and line.startswith(" ")]
    assert "loading the model" in err


def test_json_alone_is_on_stdout(ask):
    record = ask("--prompt", "a" * 40, "--set", "rows=10")
    assert record["method"] == "recent"
    assert record["options"] == {"rows": 10, "window": 2, "storage": None}
    assert record["prompt_tokens"] == 42
    assert record["agreement"] is None
    [one] = record["runs"]
    assert one["cache"] == "recent"
    assert (one["tokens_seen"], one["tokens_kept"], one["query_mode"]) == (48, 16.0, "routed")
    assert len(one["tokens"]) == 6
    assert one["finish_reason"] == "length"
    assert one["ratio"] == pytest.approx(one["bytes_plain"] / one["bytes_held"])
    assert one["bytes_plain"] == 48 * LAYERS * 2 * 2 * 16 * 4
    assert one["step_bytes"] > 0
    assert one["prefill_tokens_per_second"] > 0
    assert one["decode_tokens_per_second"] > 0


def test_compare_with_a_budget_above_the_prompt_agrees_wholly(ask):
    record = ask("--prompt", "b" * 30, "--set", "rows=100", "--compare")
    ours, plain = record["runs"]
    assert (ours["cache"], plain["cache"]) == ("recent", "plain")
    assert ours["tokens"] == plain["tokens"]
    assert ours["text"] == plain["text"]
    assert record["agreement"] == {"leading_tokens": 6, "equal_tokens": 6, "equal_share": 1.0}
    assert plain["tokens_kept"] == plain["tokens_seen"] == ours["tokens_seen"]
    assert plain["query_mode"] is None


def test_compare_shows_both_texts_and_both_rows(run):
    code, out, _ = run("--prompt", "hello", "--compare")
    assert code == 0
    starts = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert starts.count("recent") == starts.count("plain") == 2
    assert "agreement with the plain cache" in out


def test_the_table_fits_80_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--prompt", "hello", "--compare")
    table = out[out.index("agreement with") :]
    assert all(len(line) <= 80 for line in table.splitlines()[1:])
    assert "…" not in table


@pytest.mark.parametrize("name", ["toy", "a_method_with_a_name_of_32_chars"])
def test_no_figure_is_cut_whatever_the_names_are(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("cache", *(f"heading{index}" for index in range(6)))
    display.show_rows(columns, [(name, *(f"{index}0123.45" for index in range(6)))], "")
    out = capsys.readouterr().out
    assert all(text in out for text in (name, *columns, *(f"{index}0123.45" for index in range(6))))
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_model_is_left_alone_in_proxy_mode(ask):
    [one] = ask("--prompt", "hello" * 5, "--proxy")["runs"]
    assert one["query_mode"] == "proxy"


def test_prefill_step_changes_nothing(ask):
    whole, parts = (ask("--prompt", "hello" * 9, "--prefill-step", step)["runs"][0] for step in ("500", "7"))
    assert whole["tokens"] == parts["tokens"]
    assert whole["bytes_held"] == parts["bytes_held"]


def test_one_token(ask):
    [one] = ask("--prompt", "hello", "--max-tokens", "1")["runs"]
    assert len(one["tokens"]) == 1
    assert one["decode_tokens_per_second"] is None


def test_a_prompt_of_one_token(ask):
    assert ask("--prompt", "x", "--no-chat")["prompt_tokens"] == 1


# --------------------------------------------------------------------- profile


def test_profile(ask):
    record = ask("--prompt", "a" * 40, "--prefill-step", "21", "--compare", "--profile")
    profile = record["profile"]
    # The prompt in blocks of 21, 20 and 1; then as many steps as there are tokens, the last one computed in advance.
    hooks = {row["hook"]: row for row in profile["hooks"]}
    assert {hook: row["calls"] for hook, row in hooks.items() if hook not in ("serialize", "account")} == {
        "create": LAYERS,
        "prefill": 3 * LAYERS,
        "decode": 6 * LAYERS,
        "attend": 9 * LAYERS,
        "finish_prompt": LAYERS,
    }
    assert "restore" not in hooks  # the report measures a step on a copy
    for hook, row in hooks.items():
        layers = [layer for layer in profile["layers"] if layer["hook"] == hook]
        assert {layer["layer"] for layer in layers} == set(range(LAYERS))
        assert row["calls"] == sum(layer["calls"] for layer in layers)
        assert row["total"] == pytest.approx(sum(layer["total"] for layer in layers))
        worst = max(layers, key=lambda layer: layer["worst"])
        assert (row["worst"], row["layer"]) == (worst["worst"], worst["layer"])
        assert row["mean"] == pytest.approx(row["total"] / row["calls"])


def test_a_profile_changes_no_token_and_ends_with_the_run(ask):
    words = ("--prompt", "hello" * 9, "--set", "rows=12")
    profiled, plain = ask(*words, "--profile"), ask(*words)
    assert profiled["runs"][0]["tokens"] == plain["runs"][0]["tokens"]
    assert profiled["runs"][0]["bytes_held"] == plain["runs"][0]["bytes_held"]
    assert plain["profile"] is None
    assert default_registry().get("recent").ops.prefill.__name__ == "veloxquant_prefill"


def test_the_table_of_a_profile(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("--prompt", "hello", "--profile")
    assert code == 0
    shown = out[out.index("worst in") :].splitlines()
    row = next(line.split() for line in shown if line.strip().startswith("decode"))
    assert len(row) == 6
    assert row[1] == str(6 * LAYERS)
    assert all(len(line) <= 80 for line in shown)


# --------------------------------------------------------------------- prompts


def test_the_chat_template_is_used_unless_told_otherwise(ask):
    assert ask("--prompt", "hello")["prompt_tokens"] == 7
    assert ask("--prompt", "hello", "--no-chat")["prompt_tokens"] == 5


def test_a_prompt_from_a_file(ask, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("\ufeffgrüße".encode())
    assert ask("--prompt-file", str(tmp_path / "prompt.txt"), "--no-chat")["prompt_tokens"] == 7


def test_a_prompt_from_standard_input(ask, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert ask("--prompt-file", "-", "--no-chat")["prompt_tokens"] == 5


def test_without_a_prompt_a_long_one_is_built_in(ask):
    question = len("\n\nSummarize the text above in one sentence.")
    assert ask("--no-chat", "--sample-tokens", "100")["prompt_tokens"] == 100 + question
    assert ask("--no-chat")["prompt_tokens"] == 900 + question


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "recnt"], "did you mean 'recent'"),
        (["--set", "rowz=3"], "did you mean 'rows'"),
        (["--set", "rows=2"], "rows must exceed window = 2, not 2"),
        (["--set", "rows=0"], "rows"),
        (["--set", "rows=many"], "must be int, not 'many'"),
        (["--set", "rows"], "key=value"),
        (["--set", "storage=nothing"], "there is no method 'nothing'"),
        (["--set", "storage=recent"], "offers no row store"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", " \n\t"], "the prompt is empty"),
        (["--prompt", "a\udcffb"], "not valid UTF-8"),
        (["--prompt", "a", "--prompt-file", "b"], "not both"),
        (["--prompt", "a", "--sample-tokens", "9"], "leave it out"),
        (["--prompt-file", "no-such-file"], "No such file"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--max-tokens", "-3"], "--max-tokens must be at least 1, not -3"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--sample-tokens", "0"], "--sample-tokens must be at least 1"),
        (["--prefill-step", "0"], "--prefill-step must be at least 1"),
        (["--model", "./no-such-folder"], "there is no model folder './no-such-folder'"),
        (["--model", "no-such-folder"], "there is no model folder"),
        (["--model", ""], "there is no model folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(words, said, run, monkeypatch):
    monkeypatch.setattr(generate, "load_model", lambda name: pytest.fail("loaded"))
    assert_refused(run(*words), said)


def assert_refused(result, said):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("loading")] == [err.splitlines()[-1]]
    assert err.splitlines()[-1].startswith("error: ")
    assert said in err


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "not UTF-8")])
def test_prompt_files_without_text(content, said, run, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(content)
    assert_refused(run("--prompt-file", str(tmp_path / "prompt.txt")), said)


def test_a_directory_is_no_prompt_file(run, tmp_path):
    assert_refused(run("--prompt-file", str(tmp_path)), "cannot be read")


def test_a_method_that_needs_true_queries_refuses_proxy_mode(run, monkeypatch):
    monkeypatch.setattr(Recent, "needs", ("queries",))
    default_registry.cache_clear()
    default_registry().register(Recent())
    assert_refused(run("--proxy", "--prompt", "hello"), "leave --proxy out")


def test_model_folders_that_cannot_be_loaded(run, tmp_path):
    assert_refused(run("--prompt", "a", model=tmp_path), "has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_refused(run("--prompt", "a", model=tmp_path), "cannot be loaded")
    assert_refused(run("--prompt", "a", model=tmp_path / "config.json"), "is a file")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LocalEntryNotFoundError", "hub cannot be reached"),
        ("RepositoryNotFoundError", "no such public repository"),
        ("GatedRepoError", "gated"),
    ],
)
def test_a_repository_that_cannot_be_had(name, said, run, monkeypatch):
    def load(repository):
        assert repository == "someone/something"
        raise type(name, (OSError,), {})("401\n\nRepository Not Found\nPlease make sure that you are logged in.")

    monkeypatch.setattr(mlx_lm, "load", load)
    assert_refused(run("--prompt", "a", model="someone/something"), said)


def test_a_failing_chat_template(run, folder, monkeypatch):
    model, tokenizer = mlx_lm.load(str(folder))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(generate, "load_model", lambda name: (model, tokenizer))
    assert_refused(run("--prompt", "hello"), "try --no-chat")


# -------------------------------------------------------------------- progress


def test_no_animation_where_stderr_is_no_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, _, err = run("--prompt", "hello")
    assert "\x1b" not in err
    assert "\r" not in err
    assert "recent: reading 7 prompt tokens" in err


def test_the_bar_stops_when_the_prompt_is_done(monkeypatch, capsys):
    monkeypatch.setattr(display, "animated", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with display.prefill_bar("recent") as update:
        update(0, 10)
        update(5, 10)
        update(10, 10)
        shown = capsys.readouterr().err
        assert "10/10" in re.sub(r"\x1b\[[\d;?]*\w", "", shown)
    assert capsys.readouterr().err == ""


# ----------------------------------------------------------------- small parts


@pytest.mark.parametrize(
    ("first", "second", "leading", "equal", "share"),
    [
        ([1, 2, 3], [1, 2, 3], 3, 3, 1.0),
        ([1, 2, 3, 4], [1, 9, 3], 1, 2, 0.5),
        ([1], [2], 0, 0, 0.0),
        ([1, 2], [1], 1, 1, 0.5),
    ],
)
def test_agreement(first, second, leading, equal, share):
    result = agreement(first, second)
    assert (result.leading, result.equal, result.share) == (leading, equal, share)


def test_the_default_step_leaves_no_last_step_of_one_token():
    for tokens in range(3, 5000):
        step = default_step(tokens)
        assert step > 100
        assert (tokens - 1) % step != 1


def test_units_follow_the_largest_figure():
    assert display._scaled([1024 * 1024, 512 * 1024, None]) == (["1.00", "0.50", "-"], "MiB")
    assert display._scaled([12]) == (["12"], "bytes")


# ---------------------------------------------------------------- sample model


def test_the_sample_model_is_the_default(ask):
    record = ask("--prompt", "What is the capital of France?", "--set", "rows=100", "--max-tokens", "10", model=None)
    assert record["model"] == model_files.SAMPLE
    assert "Paris" in record["runs"][0]["text"]


def test_help_needs_no_model():
    code = (
        "import sys; from veloxquant.cli import main; assert main(['generate', '--help']) == 0; "
        "sys.exit('mlx_lm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompt-file" in done.stdout
