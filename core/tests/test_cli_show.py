"""``veloxquant show``: what a file holds, and what is no such file."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

import veloxquant
from veloxquant import cli
from veloxquant.build import make_prompt_cache
from veloxquant.registry import default_registry
from veloxquant.safefile import write_file
from veloxquant.testing.toys import tiny_llama


@pytest.fixture(autouse=True)
def _plain_output(plain_output):
    pass


@pytest.fixture
def save(registry, tmp_path):
    """Save the caches of a model: ``save(tokens, name, config, layers=, metadata=)`` gives the file."""
    model = tiny_llama(layers=4)

    def make(tokens, name="evictor", config=None, *, true_queries=True, layers=None, metadata=None):
        options = {"true_queries": true_queries, "layers": layers, "registry": registry}
        with veloxquant.use(model, name, config, true_queries=true_queries, layers=layers, registry=registry):
            caches = make_prompt_cache(model, name, config, **options)
            if tokens:
                model(mx.arange(tokens)[None] % 60, cache=caches)
        path = tmp_path / "caches.safetensors"
        veloxquant.save_prompt_cache(path, caches, metadata)
        veloxquant.unroute(model)
        return path

    return make


@pytest.fixture
def show(capsys):
    """Run the command; gives code, stdout and stderr."""

    def run(*words):
        code = cli.main(["show", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that announces an installed method, of which there is nothing to import."""

    def write(name, version):
        info = tmp_path / f"toy_dist-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-dist\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[veloxquant.methods]\n{name} = no_such_module\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        default_registry.cache_clear()

    yield write
    default_registry.cache_clear()


def a_file(path, *, version="1.2.0", metadata=None):
    """A file as ``save_prompt_cache`` writes it, of a method that is not there."""
    state = {
        "format": 1,
        "method": "toy",
        "distribution": "toy-dist",
        "version": version,
        "config": {"bits": 2, "storage": None, "mode": "fast [x]"},
        "layer": {"index": 0},
        "query_mode": "routed",
        "session": {"offset": 12345},
    }
    layer = {"state": [{"value": json.dumps(state)}, {"array": "layer0.0"}]}
    write_file(path, {"metadata": metadata or {}, "layers": [layer, {"native": []}]}, {"layer0.0": mx.zeros((4,))})
    return path


def test_json(save, show):
    path = save(40, config={"keep": 9}, metadata={"title": "a [long] text"})
    code, out, err = show(path, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["file"] == str(path)
    assert record["bytes"] == path.stat().st_size
    assert record["format"] == 1
    assert record["metadata"] == {"title": "a [long] text"}
    assert record["methods"] == [
        {"method": "evictor", "distribution": "(registered)", "version": "", "installed": None}
    ]
    assert [layer["index"] for layer in record["layers"]] == [0, 1, 2, 3]
    for layer in record["layers"]:
        assert (layer["method"], layer["query_mode"], layer["tokens_seen"]) == ("evictor", "routed", 40)
        assert layer["config"] == {"keep": 9, "window": 4, "storage": None, "storage_config": None}


def test_layers_that_are_alike_share_a_row(save, show):
    _, out, _ = show(save(40, layers=[1, 2], true_queries=False))
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert ["0", "the", "model's", "own"] in rows
    assert next(row for row in rows if row[0] == "1-2")[1:4] == ["evictor", "40", "no"]
    assert ["3", "the", "model's", "own"] in rows


def test_an_empty_cache(save, show):
    code, out, _ = show(save(0))
    assert code == 0
    assert next(line for line in out.splitlines() if line.strip().startswith("0-3")).split()[1:4] == [
        "evictor",
        "0",
        "yes",
    ]


def test_texts_are_shown_as_they_are(tmp_path, show):
    path = a_file(tmp_path / "a [b].safetensors", metadata={"note": "[red]x[/red]"})
    code, out, _ = show(path)
    assert code == 0
    assert f"{path.stat().st_size:,} bytes" in out
    assert "metadata note" in out
    assert "[red]x[/red]" in out
    assert "12,345" in out
    assert "bits=2, storage=null, mode=fast [x]" in out


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (None, "toy of toy-dist 1.2.0: not installed here; to load the file run: pip install toy-dist==1.2.0"),
        ("1.2.0", "toy of toy-dist 1.2.0: installed here\n"),
        ("1.2.7", "toy of toy-dist 1.2.0: installed here (1.2.7)"),
        ("1.3.0", "toy of toy-dist 1.2.0: 1.3.0 is installed here; to load the file run: pip install toy-dist==1.2.0"),
    ],
)
def test_whether_the_method_is_here(installed, said, tmp_path, show, install):
    if installed is not None:
        install("toy", installed)
    path = a_file(tmp_path / "x.safetensors")
    assert said in show(path)[1]
    assert json.loads(show(path, "--json")[1])["methods"][0]["installed"] == installed


def assert_refused(result, said):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_damaged_files(save, show, tmp_path):
    whole = save(40).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = bytearray(whole)
    header[8 + length // 2] ^= 1
    body = bytearray(whole)
    body[-1] ^= 1
    damages = {
        "nothing": b"",
        "half": whole[: len(whole) // 2],
        "only-the-header": whole[: 8 + length],
        "a-byte-in-the-header": bytes(header),
        "a-byte-in-the-arrays": bytes(body),
        "more-at-the-end": whole + b"x",
        "text": b"Call me Ishmael.\n" * 20,
        "a-huge-header": (2**60).to_bytes(8, "little") + b"{}",
        "a-header-that-is-a-list": (2).to_bytes(8, "little") + b"[]",
    }
    for name, content in damages.items():
        path = tmp_path / name
        path.write_bytes(content)
        for words in ([path], [path, "--json"]):
            assert_refused(show(*words), "cut off or altered")


def test_files_of_others(show, tmp_path):
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros((2,))}, {"format": "mlx"})
    assert_refused(show(tmp_path / "model.safetensors"), "not a veloxquant cache file")


def test_a_newer_format(show, tmp_path):
    write_file(tmp_path / "new", {"format": 99, "layers": "elsewhere"}, {})
    assert_refused(show(tmp_path / "new"), "format 99")


def test_a_newer_format_of_a_layer(show, tmp_path):
    layer = {"state": [{"value": json.dumps({"format": 99})}]}
    write_file(tmp_path / "new", {"metadata": {}, "layers": [layer]}, {})
    assert_refused(show(tmp_path / "new"), "format 99")


def test_paths_that_lead_nowhere(show, tmp_path):
    assert_refused(show(tmp_path / "none"), "No such file")
    assert_refused(show(tmp_path), "is not a file")


def test_neither_mlx_lm_nor_a_plugin_is_imported(tmp_path):
    path = a_file(tmp_path / "x.safetensors")
    code = (
        "import sys; from veloxquant.cli import main; assert main(['show', sys.argv[1]]) == 0; "
        "sys.exit(' '.join(name for name in sys.modules if name == 'mlx_lm' or name.startswith('veloxquant_')) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
