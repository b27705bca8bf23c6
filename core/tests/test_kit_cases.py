"""The table of cases names rules and tests that are there."""

import re
from pathlib import Path

import pytest

from veloxquant.testing import rule_names

ROOT = Path(__file__).parents[2]
CASES = ROOT / "docs" / "design" / "cases.md"

# Words in code that are neither a rule nor a test.
OTHERS = {"code", "check_<rule>", "veloxquant check NAME", "merge", "to_quantized", "expected_failures", "measure_step",
          'eviction="chunk"', "core/tests/test_kit_faults.py", "plugins/snapkv/tests/test_quality.py"}  # fmt: skip


@pytest.fixture(scope="module")
def words():
    return set(re.findall(r"`([^`]+)`", CASES.read_text()))


def test_every_rule_that_is_named_exists_and_most_are_named(words):
    named = {word for word in words if "::" not in word} - OTHERS
    assert named - set(rule_names()) == set()
    assert len(named) > len(rule_names()) / 2


def test_every_test_that_is_named_exists(words):
    named = [word.split("::") for word in sorted(words) if "::" in word]
    assert len(named) > 10
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    for path in (word for word in OTHERS if word.endswith(".py")):
        assert (ROOT / path).is_file()


def test_every_case_is_in_one_row():
    rows = re.findall(r"^\| (\d+b?) \|", CASES.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) >= 70
