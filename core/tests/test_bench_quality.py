"""The quality benchmark on toy models and toy methods."""

import contextlib

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from core_test_helpers import save_byte_model

from veloxquant import VeloxQuantError
from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.bench.arms import method_arm
from veloxquant.bench.arms import plain_arm
from veloxquant.bench.evaluation import evaluate
from veloxquant.bench.evaluation import read_prompt
from veloxquant.bench.passkey import passkey_at
from veloxquant.bench.passkey import passkeys
from veloxquant.bench.quality import compare
from veloxquant.bench.quality import continuation_logprobs
from veloxquant.bench.quality import prefill_step
from veloxquant.bench.quality_run import QualityPlan
from veloxquant.bench.quality_run import measure_quality
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.bench.records import read_runs
from veloxquant.bench.spread import mean_difference
from veloxquant.bench.spread import mean_interval
from veloxquant.bench.verdicts import sentences
from veloxquant.bench.verdicts import verdicts
from veloxquant.testing.toys import tiny_llama
from veloxquant.testing.toys import tiny_unroutable

pytestmark = pytest.mark.usefixtures("packed_products")

TEXT = [(place * place + 3 * place) % 251 for place in range(600)]
PLAN = QualityPlan(prompt_tokens=60, tokens=12, needle_lengths=(160,), needle_depths=(0.2, 0.8))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_byte_model(path, tiny_llama(head_dim=32, vocab=260))
    return mlx_lm.load(str(path))[:2]


@pytest.fixture(autouse=True)
def _nothing_stays_routed(loaded):
    yield
    while is_routed(loaded[0]):
        unroute(loaded[0])


@contextlib.contextmanager
def unseen(label, total):
    yield lambda amount: None


def measured(loaded, arms, plan=PLAN, track=unseen, file=None, left_out=None):
    with Writer(new_run("quality"), file) as writer:
        measure_quality(*loaded, TEXT, arms, plan, writer, track, left_out)
    return writer.run


# -------------------------------------------------------------------- one arm


def test_figures_are_those_of_whole_rows_of_predictions(loaded, registry):
    model, _ = loaded
    arm = method_arm("coarse", {"levels": 12}, registry=registry)
    prompt, continuation = TEXT[:60], TEXT[60:80]
    plain = continuation_logprobs(model, plain_arm().make(model), prompt, continuation)
    expected = compare(plain, continuation_logprobs(model, arm.make(model), prompt, continuation), continuation)
    reference = []
    read = read_prompt(model, prompt, step=2048)
    first = evaluate(model, plain_arm(), read, continuation, reference, layers=[0, 1])
    assert len(reference) == 20
    assert max(map(abs, first.kl)) < 1e-5
    assert all(first.same)
    figures = evaluate(model, arm, read, continuation, reference, layers=[0, 1]).figures(first)
    assert figures["mean_kl"] == pytest.approx(expected.mean_kl, rel=1e-3)
    assert figures["mean_kl"] > 1e-4
    assert figures["top1_agreement"] == pytest.approx(expected.top1_agreement)
    assert figures["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert figures["after_prompt"]["share"] == 0.25
    assert figures["at_end"]["share"] == 0.25
    assert len(figures["kl"]) == 20


def test_predictions_that_are_no_numbers_are_refused(loaded):
    model, _ = loaded
    found = evaluate(model, plain_arm(), read_prompt(model, TEXT[:9], step=99), TEXT[9:12], [], layers=[0])
    broken = type(found)(**{**{name: getattr(found, name) for name in found.__slots__ if name != "__weakref__"},
                            "kl": (float("nan"),) * 3})  # fmt: skip
    with pytest.raises(VeloxQuantError, match="not numbers"):
        broken.figures(None)


def test_no_chunk_of_a_prompt_has_one_token():
    assert prefill_step(2048, 2048) == 2048
    assert prefill_step(2049, 2048) == 2047
    for tokens in range(2, 60):
        for step in range(16, 24):
            found = prefill_step(tokens, step)
            assert tokens <= found or tokens % found != 1
            assert 2 <= found <= step


# --------------------------------------------------------------------- spread


def test_an_interval_holds_the_mean_and_narrows_with_more_tokens():
    generator = np.random.default_rng(1)
    values = generator.exponential(size=400)
    low, high = mean_interval(values)
    assert low < values.mean() < high
    # About twice 1.96 standard errors.
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.25)
    few = mean_interval(values[:50])
    assert few[1] - few[0] > 1.5 * (high - low)
    assert mean_interval(values) == (low, high)


def test_neighbours_that_are_alike_count_less():
    generator = np.random.default_rng(2)
    values = generator.standard_normal(64)
    alike = mean_interval(np.repeat(values, 8))
    mixed = mean_interval(generator.permutation(np.repeat(values, 8)))
    assert alike[1] - alike[0] > 1.8 * (mixed[1] - mixed[0])


def test_a_difference_is_taken_token_by_token():
    generator = np.random.default_rng(3)
    values = 100 * generator.random(64)
    difference, low, high = mean_difference(values + 1, values)
    assert (difference, low, high) == pytest.approx((1, 1, 1))
    assert mean_interval([2.0])[0] == 2.0


# ------------------------------------------------------------------- passkeys


def test_a_passkey_stands_at_its_depth(loaded):
    _, tokenizer = loaded
    for depth in (0.0, 0.25, 1.0):
        made = passkey_at(tokenizer, TEXT, length=260, depth=depth, key="01234")
        assert len(made.prompt) == 260
        said = bytes(tokenizer.decode(list(made.prompt)), "utf8")
        assert said.count(b"01234") == 2
        hidden = len("\nThe pass key is 01234. Remember it. 01234 is the pass key.\n")
        question = len("\nWhat is the pass key? The pass key is")
        cut = int(depth * (260 - hidden - question))
        assert list(made.prompt[:cut]) == TEXT[:cut]
        assert list(made.prompt[cut + hidden : -question]) == TEXT[cut : 260 - hidden - question]


def test_many_passkeys_take_other_stretches_of_the_text(loaded):
    _, tokenizer = loaded
    made = passkeys(tokenizer, TEXT, length=200, count=3)
    assert [round(one.depth, 2) for one in made] == [0.1, 0.5, 0.9]
    assert [one.prompt[0] for one in made] == [TEXT[0], TEXT[100], TEXT[200]]
    with pytest.raises(VeloxQuantError, match="9 prompts of 200 tokens need more text than the 600"):
        passkeys(tokenizer, TEXT, length=200, count=9)
    with pytest.raises(VeloxQuantError, match="no room"):
        passkey_at(tokenizer, TEXT, length=20, depth=0.5, key="1")


# ------------------------------------------------------------------- whole run


def test_every_arm_stands_with_its_references(loaded, registry):
    arms = [
        method_arm("evictor", {"keep": 20}, registry=registry),
        method_arm("coarse", {"levels": 12}, registry=registry),
        method_arm("noop_attend", registry=registry),
    ]
    run = measured(loaded, arms)
    names = [result.arm for result in run.of_kind("quality")]
    assert names == [
        "plain",
        "QuantizedKVCache 8 bits",
        "QuantizedKVCache 4 bits",
        "evictor",
        "newest rows, bytes of evictor",
        "exact top rows, reads of evictor",
        "coarse",
        "newest rows, bytes of coarse",
        "noop_attend",
    ]
    by_name = {result.arm: result for result in run.of_kind("quality")}
    for name in ("evictor", "coarse"):
        beside = by_name[f"newest rows, bytes of {name}"]
        assert beside.figures["beside"] == name
        for when in ("after_prompt", "at_end"):
            ours, theirs = (one.figures[when]["bytes_total"] for one in (by_name[name], beside))
            spare = 16 * 1024 if when == "at_end" else 0  # buffers grow by 16 rows
            assert abs(ours - theirs) <= 1024 + spare, (name, when)
    # The evictor keeps 20 rows and the tokens that are fed after them.
    assert by_name["exact top rows, reads of evictor"].config["rows"] == 31
    assert by_name["noop_attend"].figures["mean_kl"] == pytest.approx(0, abs=1e-5)
    assert by_name["evictor"].config["keep"] == 20
    needles = run.of_kind("needle")
    assert len(needles) == 2 * len(names)
    assert {(one.figures["length"], one.figures["depth"]) for one in needles} == {(160, 0.2), (160, 0.8)}
    assert all(one.figures["found"] is False for one in needles)  # a random model knows no passkey
    assert not is_routed(loaded[0])


def test_plain_finds_what_a_model_finds(loaded, monkeypatch, registry):
    said = iter(["12345", "no"])
    monkeypatch.setattr("veloxquant.bench.quality_run.answer", lambda *_: next(said))
    monkeypatch.setattr("veloxquant.bench.quality_run.quantized_arms", lambda _: [])
    monkeypatch.setattr("random.Random.randrange", lambda *_: 12345)
    run = measured(loaded, [], QualityPlan(tokens=0, needle_lengths=(160,), needle_depths=(0.2, 0.8)))
    assert [one.figures["found"] for one in run.results] == [True, False]


def test_results_repeat(loaded, registry):
    arms = [method_arm("coarse", {"levels": 12}, registry=registry)]
    first, second = (measured(loaded, arms).results for _ in range(2))
    assert first == second


def test_what_was_measured_is_left_when_it_is_interrupted(loaded, registry, tmp_path):
    @contextlib.contextmanager
    def track(label, total):
        if label.startswith("exact top rows"):
            raise KeyboardInterrupt
        yield lambda amount: None

    arms = [method_arm("evictor", registry=registry)]
    with pytest.raises(KeyboardInterrupt):
        measured(loaded, arms, track=track, file=tmp_path / "run.jsonl")
    [run] = read_runs(tmp_path / "run.jsonl")
    assert [result.arm for result in run.results][-1] == "newest rows, bytes of evictor"
    assert not is_routed(loaded[0])


def test_progress_adds_up(loaded, registry):
    pieces = {}

    @contextlib.contextmanager
    def track(label, total):
        pieces[label] = [total, 0]

        def advance(amount):
            pieces[label][1] += amount

        yield advance

    measured(loaded, [method_arm("coarse", registry=registry)], track=track)
    assert len(pieces) > 8
    assert all(done == total for total, done in pieces.values()), pieces


def test_errors_name_the_arm(loaded, registry):
    with pytest.raises(VeloxQuantError, match="the text has 600 tokens and 1,152 are needed"):
        measured(loaded, [], QualityPlan())
    arm = method_arm("coarse", registry=registry)

    def fails(model):
        raise ZeroDivisionError("by zero")

    broken = type(arm)(name="mine", method="coarse", make=fails, make_layer=fails)
    with pytest.raises(VeloxQuantError, match="mine failed: ZeroDivisionError"):
        measured(loaded, [broken])


def test_an_arm_that_fails_leaves_the_others_alone(loaded, registry):
    arm = method_arm("coarse", registry=registry)

    def fails(model):
        raise ZeroDivisionError("by zero")

    broken = type(arm)(name="mine", method="coarse", make=fails, make_layer=fails)
    left_out = []
    run = measured(loaded, [broken, arm], left_out=left_out)
    assert [one.arm for one in left_out] == ["mine"]
    assert "mine failed: ZeroDivisionError" in left_out[0].reason
    assert {result.arm for result in run.results} >= {"plain", "coarse"}
    assert "mine" not in {result.arm for result in run.results}


def test_a_model_that_cannot_be_routed_has_no_top_rows(registry):
    model = tiny_unroutable()
    arm = method_arm("coarse", registry=registry)
    with Writer(new_run("quality")) as writer:
        measure_quality(model, None, [place % 60 for place in range(80)], [arm],
                        QualityPlan(prompt_tokens=40, tokens=8, needle_lengths=()), writer, unseen)  # fmt: skip
    assert [result.arm for result in writer.run.results] == ["plain", "coarse", "newest rows, bytes of coarse"]
    assert mx.default_device()


# -------------------------------------------------------------------- verdicts


def result(arm, kl, held, method="m", role="reference", **more):
    count = {"bytes_total": held, "bytes_plain": 100, "share": held / 100, "bytes_auxiliary": 0}
    noise = np.random.default_rng(len(arm)).normal(0, 0.01, 64)
    figures = {"kl": [kl + one for one in noise], "mean_kl": kl, "after_prompt": count, "at_end": count, **more}
    return Result(kind="quality", arm=arm, method=method, role=role, figures=figures)


def judged(kl, held):
    results = [
        result("plain", 0.0, 100, "plain"),
        result("Q8", 0.01, 28, "QuantizedKVCache"),
        result("Q4", 0.3, 16, "QuantizedKVCache"),
        result("mine", kl, held, role="method"),
        result("recent", 0.5, held, "recent rows", beside="mine"),
        result("top", 0.02, 100, "top rows", beside="mine"),
    ]
    return {verdict.reference: verdict for verdict in verdicts(results)}


@pytest.mark.parametrize(
    ("kl", "held", "outcomes"),
    [
        (0.1, 20, {"Q8": "loses", "Q4": "smaller", "recent": "beats", "top": "loses"}),
        (0.1, 10, {"Q8": "loses", "Q4": "beats", "recent": "beats", "top": "loses"}),
        (0.5, 20, {"Q8": "loses", "Q4": "loses", "recent": "level", "top": "loses"}),
        (0.9, 16, {"Q8": "loses", "Q4": "loses", "recent": "loses", "top": "loses"}),
        (0.001, 16, {"Q8": "beats", "Q4": "beats", "recent": "beats", "top": "beats"}),
    ],
)
def test_verdicts(kl, held, outcomes):
    found = judged(kl, held)
    assert {name: verdict.outcome for name, verdict in found.items()} == outcomes
    for name, verdict in found.items():
        assert verdict.told == (verdict.outcome in ("level", "loses") and name != "top")


def test_an_arm_that_does_not_beat_the_simplest_evictor_says_so():
    [said] = sentences(judged(0.9, 16).values())
    assert said.startswith("mine does not beat the newest rows at 1.00 x its bytes (mean KL 0.9000 against 0.5000)")
    assert "; does not beat Q8 at 1.75 x its bytes" in said
    assert sentences(judged(0.001, 16).values()) == []
