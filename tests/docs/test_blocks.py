"""Every Python and shell block of README files and documentation runs, page by page, in the order of the page.

The Python blocks of a page share their names; its shell blocks run in one folder. What a page may say about a block, in
a comment right before it that readers do not see:

- ``<!-- not run: REASON -->``: it cannot run here; counted below.
- ``<!-- in the checkout -->``: it runs in a folder that looks like a clone.
- ``<!-- setup ... -->``: Python to run first, for a block that shows a part of a program; ``<!-- setup sh ... -->``.

A block under a line like `` `share.py`: `` is that file, or goes on with it.
"""

import contextlib
import io
import os
import re
import shutil
import site
import stat
import subprocess
import sys
import venv
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "core/README.md", "plugins/*/README.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
    if "_build" not in path.parts
]
NOT_RUN = 11
"""Blocks that cannot run here; whoever adds one says why, and counts it."""

FENCE = re.compile(
    r"(?:^<!-- (?P<mark>(?:(?!-->).)*?)\s*-->\n+)?(?:^`(?P<path>[^`\n]+)`:\n\n)?"
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$",
    re.M | re.S,
)
SETUP = re.compile(r"^<!-- setup(?P<shell> sh)?\n(?P<text>.*?)-->$", re.M | re.S)
SHELLS = ("sh", "bash")


def steps(page):
    """What runs of a page, in order: a kind and a text."""
    text = page.read_text()
    found = [(match.start(), "sh" if match["shell"] else "python", match["text"]) for match in SETUP.finditer(text)]
    for match in FENCE.finditer(text):
        mark, language = match["mark"] or "", match["language"].strip()
        if match["path"]:
            found.append((match.start("path"), f"file {match['path']}", match["text"]))
        elif language in SHELLS or language == "python":
            kind = "sh" if language in SHELLS else "python"
            if mark.startswith("not run:"):
                kind = "not run"
            elif mark == "in the checkout":
                kind = "checkout"
            found.append((match.start("fence"), kind, mark if kind == "not run" else match["text"]))
    return [(kind, text) for _, kind, text in sorted(found)]


RUN = [page for page in PAGES if any(kind != "not run" for kind, _ in steps(page))]


def test_what_is_not_run_has_a_reason_and_is_counted():
    reasons = [(page.relative_to(ROOT).as_posix(), t) for page in PAGES for kind, t in steps(page) if kind == "not run"]
    assert all(len(reason) > len("not run: ") + 10 for _, reason in reasons)
    assert len(reasons) == NOT_RUN, reasons


def test_there_is_something_to_run():
    kinds = [kind for page in RUN for kind, _ in steps(page)]
    assert kinds.count("python") > 10
    assert kinds.count("sh") > 10


# ------------------------------------------------------------------ running


def overlay(folder, with_pip):
    """An environment on top of this one, so that what a page installs stays its own."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    below = [path for path in sys.path if path.endswith("site-packages") or path in site.getsitepackages()]
    # As a site directory and not as a path, so that editable installs of it count.
    (packages / "below.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in below))
    programs = {entry.name: entry.value for entry in entry_points(group="console_scripts")}
    for name, target in programs.items():
        module, _, function = target.partition(":")
        program = folder / "bin" / name
        if program.exists():
            continue
        code = f"import sys\nfrom {module} import {function.split('[')[0].strip()} as main\nsys.exit(main())\n"
        program.write_text(f"#!{folder}/bin/python\n{code}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def run_shell(text, cwd, environment):
    # Standard input stays open, as on a terminal.
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output = process.stdout.read()
        code = process.wait()
    assert code == 0, f"{text}\n{output[-4000:]}"


def run_python(text, names):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(text, "block", "exec"), names)


def checkout(folder):
    """A folder with what a clone has."""
    for name in ("core", "plugins"):
        if not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return folder


def write(path, text):
    """A new file, or what follows in one: after two blank lines, inside a class after one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else None
    between = "" if before is None else "\n" if text.startswith(" ") else "\n\n"
    path.write_text((before or "") + between + text)


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    todo = steps(page)
    installs = any("pip install" in text for kind, text in todo if kind in ("sh", "checkout"))
    environment = overlay(tmp_path / "environment", with_pip=installs)
    monkeypatch.setenv("PATH", f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    monkeypatch.setenv("CHECKOUT", str(ROOT))
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    for kind, text in todo:
        if kind == "python":
            run_python(text, names)
        elif kind in ("sh", "checkout"):
            run_shell(text, checkout(folder) if kind == "checkout" else folder, dict(os.environ))
        elif kind.startswith("file "):
            write(folder / kind.removeprefix("file "), text)
