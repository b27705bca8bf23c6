"""The author's guide says what is there: every hook, and the very files that ``veloxquant new`` writes."""

import inspect
import re
from pathlib import Path

import pytest

from veloxquant import hookspecs
from veloxquant.cli.new import EXAMPLE
from veloxquant.cli.new import project_files
from veloxquant.registry import default_registry

AUTHORING = Path(__file__).parents[1] / "docs/authoring"
HOOKS = AUTHORING.joinpath("hooks.md").read_text()
TUTORIAL = AUTHORING.joinpath("tutorial.md").read_text()
FENCE = re.compile(
    r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)

# Not shown in the tutorial, which says what they are.
LEFT_OUT = {"LICENSE", f"src/veloxquant_{EXAMPLE}/py.typed"}


def shown_files():
    """Content by path, from the blocks of the tutorial that stand under a path."""
    found = {}
    for block in FENCE.finditer(TUTORIAL):
        path, text = block["path"], block["text"]
        if path is None:
            continue
        # A block goes on where the one before it ended: after two blank lines, inside a class after one.
        between = "" if path not in found else "\n" if text.startswith(" ") else "\n\n"
        found[path] = found.get(path, "") + between + text
    return found


def test_the_tutorial_shows_what_the_command_writes():
    written, shown = project_files(EXAMPLE), shown_files()
    assert set(shown) == set(written) - LEFT_OUT
    for path in shown:
        assert shown[path] == written[path], path
    for path in LEFT_OUT:
        assert f"`{path}`" in TUTORIAL


def test_every_block_of_python_belongs_to_a_file():
    assert all(block["path"] for block in FENCE.finditer(TUTORIAL) if block["language"] != "sh")


@pytest.mark.parametrize("name", hookspecs.__all__)
def test_a_hook_has_a_heading_with_its_arguments(name):
    arguments = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    assert f"\n### `{name}({arguments})`\n" in HOOKS


def test_the_reference_names_no_hook_that_is_not_there():
    assert sorted(re.findall(r"^### `(\w+)\(", HOOKS, re.M)) == sorted(hookspecs.__all__)
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", HOOKS, re.M)) == sorted(hookspecs.__all__)
    for text in (HOOKS, TUTORIAL):
        named = {word for word in re.findall(r"veloxquant_\w+", text) if not word.startswith(f"veloxquant_{EXAMPLE}")}
        assert named <= set(hookspecs.__all__)


def test_optional_hooks_are_those_of_the_specification():
    for name in hookspecs.__all__:
        optional = "Optional" in inspect.getdoc(getattr(hookspecs, name))
        (needed,) = re.findall(rf"^\| \[`{name}`\]\(\S+\) \| (\w+) \|", HOOKS, re.M)
        assert (needed == "optional") is optional
        body = HOOKS.partition(f"### `{name}(")[2].split("\n\n")[1]
        assert body.startswith("Optional") is optional


def test_links_lead_somewhere():
    for page in AUTHORING.glob("*.md"):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            assert not path or page.parent.joinpath(path).exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", page.parent.joinpath(path).read_text() if path else text, re.M)
                assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}, target


def test_the_observer_of_the_reference_runs(capsys):
    (code,) = [block["text"] for block in FENCE.finditer(HOOKS) if block["language"] == "python"]
    default_registry.cache_clear()
    try:
        exec(compile(code, "hooks.md", "exec"), {})
        import mlx.core as mx

        import veloxquant

        veloxquant.get_cache("snapkv").update_and_fetch(mx.zeros((1, 2, 40, 8)), mx.zeros((1, 2, 40, 8)))
    finally:
        default_registry.cache_clear()
    assert capsys.readouterr().out == "prompt rows: (1, 2, 40, 8)\n"
