"""What an import brings with it, and what the methods that happen to be installed change: in fresh processes."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from veloxquant.registry import Registry

HEAVY = "sorted({name.partition('.')[0] for name in sys.modules} & {'mlx_lm', 'transformers'}"
HEAVY += " | {name for name in sys.modules if name.startswith('veloxquant_')})"

CROWD = """
import attrs
from veloxquant import ByteCount, MethodInfo, Snapshot, hookimpl

@attrs.frozen(kw_only=True)
class Config:
    pass

class Crowd:
    def __init__(self, name):
        self.name = name

    @hookimpl
    def veloxquant_method(self):
        return MethodInfo(name=self.name, config=Config, summary="stores nothing", kind="test")

    @hookimpl
    def veloxquant_create(self, config, layer):
        return object()

    @hookimpl
    def veloxquant_prefill(self, state, keys, values):
        raise AssertionError("answered for another method")

    @hookimpl
    def veloxquant_decode(self, state, keys, values):
        raise AssertionError("answered for another method")

    @hookimpl
    def veloxquant_account(self, state):
        return ByteCount()

    @hookimpl
    def veloxquant_serialize(self, state):
        return Snapshot()

    @hookimpl
    def veloxquant_restore(self, config, layer, snapshot):
        return object()
"""


def python(code, *arguments, path=None):
    """Run code in a fresh interpreter, with a folder in front of its path."""
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def result(process):
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


def test_importing_and_listing_bring_neither_mlx_lm_nor_a_plugin():
    names = repr(Registry().names())
    code = f"import sys, veloxquant; assert veloxquant.methods() == {names}; print({HEAVY})"
    assert result(python(code)) == "[]"


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--help"]])
def test_the_list_command_brings_neither_mlx_lm_nor_a_plugin(arguments):
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print({HEAVY}))\n"
        "from veloxquant.cli import main\n"
        f"sys.argv = ['veloxquant', *{arguments!r}]\n"
        "sys.exit(main())\n"
    )
    assert result(python(code)) == "[]"


def test_asking_for_one_method_imports_that_one():
    code = (
        "import sys, veloxquant; veloxquant.method_info('snapkv')\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules if name.startswith('veloxquant_')}))"
    )
    assert result(python(code)) == "['veloxquant_snapkv']"


@pytest.fixture
def no_back_end(tmp_path):
    """A folder for the front of the path, with an mlx whose core cannot be loaded."""
    package = tmp_path / "mlx"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    return tmp_path


def test_a_missing_back_end_is_one_sentence_that_names_the_extra(no_back_end):
    code = (
        "try:\n    import veloxquant\nexcept ImportError as error:\n    print(error)\n    print(repr(error.__cause__))"
    )
    process = python(code, path=no_back_end)
    assert process.returncode == 0, process.stderr
    sentence, cause = process.stdout.splitlines()
    assert "pip install 'veloxquant[cpu]'" in sentence
    assert "libmlx.so" in cause


@pytest.mark.parametrize("arguments", [["list"], ["doctor"], ["--help"]])
def test_the_command_without_a_back_end_says_that_sentence_and_nothing_else(no_back_end, arguments):
    (script,) = [script for script in entry_points(group="console_scripts") if script.name == "veloxquant"]
    code = f"import sys; from {script.module} import {script.attr}; sys.exit({script.attr}())"
    process = python(code, *arguments, path=no_back_end)
    assert process.returncode == 2
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert "pip install 'veloxquant[cpu]'" in line


def test_installed_methods_do_not_change_what_is_bound():
    """Every installed method is loaded beside snapkv in one registry and alone in another: the hooks are the same."""
    together = Registry()
    for name in together.names():
        together.get(name)
    names = [name for name in together.names() if name != "snapkv"]
    alone = Registry(blocked=names)
    assert alone.names() == ["snapkv"]
    assert together.get("snapkv").ops is not alone.get("snapkv").ops
    for hook in ("method", "create", "prefill", "decode", "attend", "account", "serialize", "restore", "trim"):
        assert getattr(together.get("snapkv").ops, hook) is getattr(alone.get("snapkv").ops, hook)


def test_a_hundred_more_methods_do_not_change_what_is_bound(tmp_path):
    module = tmp_path / "crowd.py"
    module.write_text(CROWD)
    code = (
        "import attrs, crowd\n"
        "from veloxquant.registry import Registry\n"
        "alone, crowded = Registry(), Registry()\n"
        "first = crowded.get('snapkv')\n"
        "for index in range(100):\n"
        "    crowded.register(crowd.Crowd(f'crowd_{index}'))\n"
        "ops = attrs.asdict(alone.get('snapkv').ops, recurse=False)\n"
        "assert crowded.get('snapkv') is first\n"
        "assert attrs.asdict(crowded.get('snapkv').ops, recurse=False) == ops\n"
        "late = Registry()\n"
        "for index in range(100):\n"
        "    late.register(crowd.Crowd(f'crowd_{index}'))\n"
        "assert attrs.asdict(late.get('snapkv').ops, recurse=False) == ops\n"
        "print('same')\n"
    )
    assert result(python(code, path=tmp_path)) == "same"
