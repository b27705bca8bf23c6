"""The tests of every distribution on a back end, from the JUnit files that pytest wrote there."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from results_page.markdown import code
from results_page.markdown import table
from veloxquant.errors import VeloxQuantError

__all__ = ["LEGEND", "Suites", "read", "suites", "take"]

PREFIX = "tests-"

LEGEND = """\
How many tests of each distribution passed on a back end other than the CPU's, for which they are run with every
change. What is *skipped* or *fails as expected* does so on every back end, but for what is named below a table."""

_COLUMNS = ("tests", "passed", "skipped", "failed as expected", "failed")
# What a reason to skip names that holds on this back end and not on all.
_OWN = ("CUDA", "MLX has no")


@attrs.frozen(kw_only=True)
class Suites:
    """The tests that ran on one machine.

    Args:
        source: The commit that was tested.
        time: When, UTC.
        environment: What ``veloxquant.bench.environment.environment()`` gave there.
        notes: What else is to be said, as sentences.
        suites: For each its ``name``, ``passed``, ``xfailed``, ``skipped`` (numbers by reason) and ``failed`` (why, by
            name).
    """

    source: str
    time: str
    environment: dict[str, Any]
    suites: list[dict[str, Any]]
    notes: list[str] = attrs.field(factory=list)


def read(folder: Path) -> list[Suites]:
    """The records of a folder, in the order of their names."""
    return [Suites(**json.loads(file.read_text("utf-8"))) for file in sorted(folder.glob(f"{PREFIX}*.json"))]


def take(
    files: Sequence[str],
    environment: str,
    source: str,
    target: Path,
    why: Mapping[str, str],
    notes: Sequence[str] = (),
) -> None:
    """Write what pytest told of some suites as one record.

    Args:
        files: ``name=file``, each a JUnit file; files of one name are counted together.
        environment: A file with what ``environment()`` gave there, as JSON.
        source: The commit that was tested.
        target: Where to.
        why: Why tests failed, by name; every one that did must be explained.
        notes: What else is to be said, as sentences.

    Raises:
        VeloxQuantError: A failure is not explained.
    """
    found: dict[str, dict[str, Any]] = {}
    times = []
    for word in files:
        name, _, file = word.partition("=")
        root = ElementTree.parse(file).getroot()
        times += [suite.get("timestamp", "") for suite in root.iter("testsuite")]
        one = found.setdefault(name, {"name": name, "passed": 0, "xfailed": 0, "skipped": Counter(), "failed": {}})
        for case in root.iter("testcase"):
            _count(one, case, why)
    record = Suites(
        source=source,
        time=min(times)[:16],
        environment=json.loads(Path(environment).read_text("utf-8")),
        suites=list(found.values()),
        notes=list(notes),
    )
    target.write_text(json.dumps(attrs.asdict(record), indent=1) + "\n", encoding="utf-8")


def _count(one: dict[str, Any], case: ElementTree.Element, why: Mapping[str, str]) -> None:
    name = str(case.get("name"))
    outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
    if outcome is None:
        one["passed"] += 1
    elif outcome.tag == "skipped" and outcome.get("type") == "pytest.xfail":
        one["xfailed"] += 1
    elif outcome.tag == "skipped":
        one["skipped"][outcome.get("message", "")] += 1
    elif name in why:
        one["failed"][name] = why[name]
    else:
        raise VeloxQuantError(f"{name} failed; say why with --why '{name}=SENTENCE'")


def suites(found: Sequence[Suites]) -> list[str]:
    """The part of the page, with its heading; nothing where there are no records."""
    lines = ["## Tests on other back ends\n", f"{LEGEND}\n"] if found else []
    for one in found:
        here = one.environment
        versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
        lines += [f"### {here['back_end'].upper()}, {here['machine'].get('gpu')}\n"]
        lines += [f"- Versions: {versions}", f"- Date: {one.time.replace('T', ' ')} UTC; commit {code(one.source)}", ""]
        lines += table(_COLUMNS, [_row(suite) for suite in one.suites])
        lines += [*_told(one), ""]
    return lines


def _row(suite: Mapping[str, Any]) -> list[str]:
    skipped = sum(suite["skipped"].values())
    return [suite["name"], *(f"{count:,}" for count in (suite["passed"], skipped, suite["xfailed"])), _failed(suite)]


def _failed(suite: Mapping[str, Any]) -> str:
    return str(len(suite["failed"]))


def _told(one: Suites) -> list[str]:
    """What was skipped on this back end, and why what failed did."""
    skipped: Counter[str] = Counter()
    for suite in one.suites:
        for reason, count in suite["skipped"].items():
            if any(word in reason for word in _OWN):
                skipped[reason] += count
    failed = [(suite["name"], *pair) for suite in one.suites for pair in suite["failed"].items()]
    lines = [f"- {note}" for note in one.notes]
    lines += [f"- Skipped there, {count} times: {reason}." for reason, count in skipped.items()]
    return lines + [f"- Failed, of {name}: {code(test)}: {reason}" for name, test, reason in failed]
