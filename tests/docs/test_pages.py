"""Pages say what the code says: messages, options, commands."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from veloxquant import method_info
from veloxquant import methods
from veloxquant.config import describe_options
from veloxquant.config import parse_config
from veloxquant.discovery import CALIBRATIONS
from veloxquant.discovery import discover

ROOT = Path(__file__).parents[2]
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()


def _messages():
    spec = importlib.util.spec_from_file_location("docs_messages", ROOT / "docs/_extensions/messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MESSAGES = _messages()


@functools.cache
def sentences():
    texts = [found.text for found in MESSAGES.messages(ROOT)]
    return [*texts, *(" ".join(path.read_text().split()).replace('" "', "") for path in SOURCES)]


def quoted():
    """The messages of the tables: first cell of each row, a code span."""
    return re.findall(r"^\| `([^`]+)` \|", TROUBLE, re.M)


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_source(message):
    pieces = [re.escape(piece.strip()) for piece in message.split(MESSAGES.GAP) if piece.strip()]
    pattern = re.compile(r".*?".join(pieces))
    assert any(pattern.search(text) for text in sentences())


# Where sentences are put together elsewhere than where they are raised.
SOURCES = [ROOT / "core/src/veloxquant/registry.py", ROOT / "core/src/veloxquant/__init__.py"]


def test_enough_is_quoted():
    assert len(quoted()) > 40
    assert len(MESSAGES.messages(ROOT)) > 150


def test_every_method_has_a_page_with_its_options_and_all_sections():
    wanted = ("Options", "What is stored", "Query modes", "Trim, batches, files", "Calibration", "Limits")
    for name in methods_of_the_project():
        page = (ROOT / f"docs/methods/{name}.md").read_text()
        assert f"```{{method-options}} {name}\n" in page
        headings = re.findall(r"^## (.*)$", page, re.M)
        assert set(wanted) <= set(headings), name
        assert any(heading in ("Departures from the paper", "Differs from the paper in") for heading in headings), name


def methods_of_the_project():
    return sorted(path.name for path in ROOT.glob("plugins/*") if (path / "pyproject.toml").exists())


@pytest.mark.parametrize("name", methods_of_the_project())
def test_the_example_of_a_method_can_be_copied(name):
    assert name in methods()
    config = method_info(name).config
    shown = [option for option in describe_options(config) if option.example is not None]
    assert shown, "no option has an example"
    parse_config(config, [f"{option.name}={option.example}" for option in shown], method=name)
    assert all(name in discover(group=CALIBRATIONS) for option in shown if option.calibrated)


def test_links_between_pages_lead_somewhere():
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


COMING = (ROOT / "docs/guides/coming-from-veloxquant-mlx.md").read_text()
NEW_NAMES = set(re.findall(r"`(?:veloxquant|report)\.([a-z_]+)", COMING))


def test_names_beside_those_of_the_peer_are_there():
    import veloxquant
    from veloxquant.reports import Report

    assert len(NEW_NAMES) > 5
    for name in NEW_NAMES:
        assert hasattr(veloxquant, name) or hasattr(Report, name), name
