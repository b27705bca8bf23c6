"""``veloxquant new``: what it writes, and what it refuses."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from packaging.requirements import Requirement

from veloxquant.attention import attention
from veloxquant.build import get_cache
from veloxquant.cli import main
from veloxquant.cli.new import LONGEST
from veloxquant.cli.new import project_files
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.types import LayerSpec

ROOT = Path(__file__).parents[2]
LONG = "m" * LONGEST
SPARE = 64


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The plugin of a project that was written under another name than that of the templates."""
    folder = tmp_path_factory.mktemp("projects")
    assert main(["new", "latest_rows", "--dir", str(folder)]) == 0
    source = str(folder / "veloxquant-latest-rows" / "src")
    sys.path.insert(0, source)
    try:
        yield importlib.import_module("veloxquant_latest_rows.plugin")
    finally:
        sys.path.remove(source)
        for name in [name for name in sys.modules if name.startswith("veloxquant_latest_rows")]:
            del sys.modules[name]


@pytest.fixture
def make(plugin):
    """Make a cache with 2 sinks and a window of 6: ``make(mode)``."""
    registry = Registry(entry_points=[], blocked=[])
    registry.register(plugin)

    def cache(mode="routed", **options):
        config = {"sinks": 2, "window": 6, **options}
        return get_cache("latest_rows", config, layer=LayerSpec(query_mode=mode), registry=registry)

    return cache


def numbered(start, stop):
    """Rows that say which token they belong to."""
    row = mx.arange(start, stop, dtype=mx.float32).reshape(1, 1, -1, 1)
    return mx.broadcast_to(row, (1, 2, stop - start, 8)), -mx.broadcast_to(row, (1, 2, stop - start, 8))


def feed(cache, start, stop):
    """Feed tokens to a cache; returns which tokens it gave back."""
    mask = cache.make_mask(stop - start, return_array=True)
    keys, values = cache.update_and_fetch(*numbered(start, stop))
    assert mask is None or mask.shape[-1] == keys.shape[2]
    assert mx.array_equal(keys, -values).item()
    assert mx.all(keys == keys[:, :1, :, :1]).item()
    if hasattr(cache, "attend"):
        queries = mx.random.normal((1, 4, stop - start, 8), key=mx.random.key(start))
        word = cache.make_mask(stop - start)
        got = cache.attend(queries, keys, values, 0.3, word)
        assert mx.array_equal(got, attention(queries, keys, values, 0.3, word)).item()
    return [int(token) for token in keys[0, 0, :, 0].tolist()]


# ------------------------------------------------------------------ the files


@pytest.mark.parametrize("name", ["x", "rows2", "latest_rows", LONG])
def test_the_project_is_complete_and_carries_the_name_everywhere(name, tmp_path, capsys):
    assert main(["new", name, "--dir", str(tmp_path)]) == 0
    dashed = name.replace("_", "-")
    assert f"veloxquant-{dashed}" in capsys.readouterr().out
    folder = tmp_path / f"veloxquant-{dashed}"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    package = f"src/veloxquant_{name}"
    modules = {f"{package}/{module}" for module in ("__init__.py", "config.py", "plugin.py", "state.py", "py.typed")}
    others = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/test_conformance.py"}
    assert files == modules | others == set(project_files(name))
    texts = {path: (folder / path).read_text() for path in files}
    assert texts == project_files(name)
    for text in texts.values():
        assert not re.search(r"sink[_-]window|SinkWindow", text)
    for path, text in texts.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["name"] == f"veloxquant-{dashed}"
    assert project["entry-points"]["veloxquant.methods"] == {name: f"veloxquant_{name}.plugin"}
    assert f'method = "{name}"' in texts["tests/test_conformance.py"]


def test_the_license_is_that_of_the_project():
    assert project_files("x")["LICENSE"] == (ROOT / "LICENSE").read_text()


def test_the_packaging_keeps_the_rules_of_the_project():
    written = tomllib.loads(project_files("x")["pyproject.toml"])
    core = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    requirements = {item.name: item.specifier for item in map(Requirement, written["project"]["dependencies"])}
    assert {clause.operator for clause in requirements["veloxquant"]} == {">=", "<"}
    assert requirements["veloxquant"].contains(version("veloxquant"))
    ranges = {item.name: item.specifier for item in map(Requirement, core["dependencies"])}
    assert {name: requirements[name] for name in ("attrs", "mlx")} == {name: ranges[name] for name in ("attrs", "mlx")}
    assert written["project"]["requires-python"] == core["requires-python"]
    assert written["tool"]["ruff"]["line-length"] == ours["line-length"]
    assert written["tool"]["ruff"]["lint"]["select"] == ours["lint"]["select"]


@pytest.mark.parametrize("name", ["x", LONG])
def test_the_code_is_clean(name, tmp_path, tool):
    assert main(["new", name, "--dir", str(tmp_path)]) == 0
    folder = tmp_path / f"veloxquant-{name.replace('_', '-')}"
    tool(folder, "ruff", "check", "--no-cache", ".")
    tool(folder, "ruff", "format", "--no-cache", "--check", ".")


def test_the_types_are_strict(tmp_path, tool):
    assert main(["new", "x", "--dir", str(tmp_path)]) == 0
    tool(tmp_path / "veloxquant-x", "mypy", "--ignore-missing-imports", "--cache-dir", os.devnull, "src")


@pytest.fixture
def tool():
    """Run a tool of development in a folder, where it is installed."""

    def run(folder, name, *words):
        pytest.importorskip(name)
        command = [sys.executable, "-m", name, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_json(tmp_path, capsys):
    assert main(["new", "x", "--dir", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == {
        "method": "x",
        "distribution": "veloxquant-x",
        "folder": str(tmp_path / "veloxquant-x"),
        "files": sorted(project_files("x")),
    }


def test_the_folder_of_the_moment_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "x"]) == 0
    assert (tmp_path / "veloxquant-x/pyproject.toml").is_file()


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "not ''"),
        ("Sink-Window", "did you mean 'sink_window'?"),
        ("my method", "did you mean 'my_method'?"),
        ("2bits", "did you mean 'bits'?"),
        ("a__b", "did you mean 'a_b'?"),
        ("_a", "did you mean 'a'?"),
        ("a_", "did you mean 'a'?"),
        ("é", "not 'é'"),
        ("../x", "did you mean 'x'?"),
        ("x\n", "did you mean 'x'?"),
        ("a" * (LONGEST + 1), f"{LONGEST} characters at most"),
        ("command", "module veloxquant_command is installed"),
    ],
)
def test_bad_names(name, said, tmp_path, capsys):
    assert_refused(["new", "--dir", str(tmp_path), "--", name], said, capsys)
    assert list(tmp_path.iterdir()) == []


def assert_refused(words, said, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize("blocked", ["", "toy"])
def test_the_name_of_an_installed_method(blocked, tmp_path, monkeypatch, capsys):
    info = tmp_path / "toy_dist-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-dist\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[veloxquant.methods]\ntoy = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VELOXQUANT_BLOCK", blocked)
    default_registry.cache_clear()
    try:
        assert_refused(["new", "toy", "--dir", str(tmp_path)], "is taken by the installed toy-dist 1.5", capsys)
    finally:
        default_registry.cache_clear()


def test_folders(tmp_path, capsys):
    assert_refused(["new", "x", "--dir", str(tmp_path / "none")], "there is no folder", capsys)
    (tmp_path / "veloxquant-x").mkdir()
    (tmp_path / "veloxquant-y").write_text("")
    (tmp_path / "veloxquant-z").symlink_to(tmp_path / "nowhere")
    assert_refused(["new", "x", "--dir", str(tmp_path / "veloxquant-y")], "there is no folder", capsys)
    for name in "xyz":
        assert_refused(["new", name, "--dir", str(tmp_path)], "exists already", capsys)
    assert list((tmp_path / "veloxquant-x").iterdir()) == []


def test_nothing_is_left_of_a_project_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    write = Path.write_text

    def full(path, text, **options):
        if path.name == "plugin.py":
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert_refused(["new", "x", "--dir", str(tmp_path)], "No space left on device", capsys)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the method


def prompt(cache, tokens=50):
    """Feed a prompt as mlx-lm does; returns what its last token was given."""
    feed(cache, 0, tokens - 1)
    return feed(cache, tokens - 1, tokens)


@pytest.mark.parametrize("mode", ["routed", "proxy"])
def test_the_first_and_the_latest_tokens_are_kept(make, mode):
    cache = make(mode)
    assert prompt(cache, 50) == list(range(50))
    assert (cache.offset, cache.rows) == (50, 8)
    for token in range(50, 50 + SPARE):
        assert feed(cache, token, token + 1) == [0, 1, *range(44, token + 1)]
    assert feed(cache, 114, 115) == [0, 1, *range(108, 115)]
    assert feed(cache, 115, 118) == [0, 1, *range(108, 118)]
    assert (cache.offset, cache.rows) == (118, 12)


@pytest.mark.parametrize("chunk", [3, 8, 31, 33, 100])
def test_a_prompt_is_attended_whole_in_any_chunks(make, chunk):
    cache = make()
    for start in range(0, 99, chunk):
        stop = min(99, start + chunk)
        assert feed(cache, start, stop) == list(range(stop))
    assert feed(cache, 99, 100) == list(range(100))
    assert feed(cache, 100, 101) == [0, 1, *range(94, 101)]


def test_a_later_turn_is_a_prompt_too(make):
    cache = make()
    prompt(cache, 50)
    assert feed(cache, 50, 200) == [0, 1, *range(44, 200)]
    assert feed(cache, 200, 300) == [0, 1, *range(44, 300)]
    assert feed(cache, 300, 301) == [0, 1, *range(44, 301)]
    assert feed(cache, 301, 302) == [0, 1, *range(295, 302)]


def test_a_later_turn_begins_with_an_eviction_that_is_due(make):
    cache = make()
    prompt(cache, 50)
    for token in range(50, 50 + SPARE):
        feed(cache, token, token + 1)
    assert cache.rows == 8
    assert feed(cache, 114, 200) == [0, 1, *range(108, 200)]


def test_memory_does_not_grow_after_the_prompt(make):
    cache = make()
    prompt(cache, 200)
    after = cache.nbytes
    held = []
    for token in range(200, 600):
        feed(cache, token, token + 1)
        held.append(cache.nbytes)
    assert after < cache.plain_nbytes / 20
    assert max(held) < cache.plain_nbytes / 5
    assert max(held[200:]) == max(held[:200])


def test_no_sinks(make):
    cache = make(sinks=0)
    prompt(cache, 50)
    assert feed(cache, 50, 51) == list(range(44, 51))


# Right after the prompt, and where an eviction is due.
@pytest.mark.parametrize("steps", [0, 1, SPARE - 3, SPARE - 1, SPARE, SPARE + 1])
@pytest.mark.parametrize("rejected", [1, 4])
def test_a_rejected_draft_leaves_no_trace(make, steps, rejected):
    cache, never = make(), make()
    seen = 50 + steps
    for one in (cache, never):
        prompt(one, 50)
        for token in range(50, seen):
            feed(one, token, token + 1)
    feed(cache, seen, seen + 1 + rejected)
    assert cache.trim(rejected) == rejected
    feed(never, seen, seen + 1)
    assert (cache.offset, cache.nbytes, cache.rows) == (never.offset, never.nbytes, never.rows)
    for one, other in zip(cache.state[1:], never.state[1:], strict=True):
        assert mx.array_equal(one, other).item()
    for token in range(seen + 1, seen + 100):
        assert feed(cache, token, token + 1) == feed(never, token, token + 1)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 30, 47, 48, 49])
def test_any_rewind_keeps_true_positions(make, left):
    cache = make()
    prompt(cache, 50)
    assert cache.trim(50 - left) == 50 - left
    held = [token for token in [0, 1, *range(44, 50)] if token < left]
    assert feed(cache, left, left + 1) == [*held, left]
    for token in range(left + 1, left + 200):
        got = feed(cache, token, token + 1)
    assert got[:2] == [0, 1]
    assert got[2:] == list(range(got[2], left + 200))
    assert 7 <= len(got[2:]) <= 7 + SPARE


def test_proxy_caches_are_not_trimmable(make):
    assert make().is_trimmable()
    assert not make("proxy").is_trimmable()


def test_it_can_be_batched(make):
    one, other = make(), make()
    prompt(one, 50)
    prompt(other, 3)
    batch = type(one).merge([one, other])
    assert batch.offset.tolist() == [50, 3]
    assert feed(batch.extract(0), 50, 51) == feed(one, 50, 51)
    assert feed(batch.extract(1), 3, 4) == feed(other, 3, 4)


@pytest.mark.parametrize("tokens", [20, 50, 80])
def test_a_state_goes_on_as_it_was(make, tokens):
    """In the middle of a prompt and after it."""
    cache = make()
    feed(cache, 0, min(tokens, 49))
    for token in range(49, tokens):
        feed(cache, token, token + 1)
    other = rebuild_with(cache)
    for token in range(tokens, tokens + 100):
        assert feed(other, token, token + 1) == feed(cache, token, token + 1)


def rebuild_with(cache):
    snapshot = cache.method.ops.serialize(cache.method_state)
    state = cache.method.ops.restore(cache.config, cache.layer, snapshot)
    other = type(cache)(cache.method, cache.config, cache.layer, state)
    other._resume(cache._session())
    return other
