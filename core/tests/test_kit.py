"""Running the conformance kit: results, choices, errors, pytest and the command."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from veloxquant import ConfigError
from veloxquant import UnknownMethodError
from veloxquant import VeloxQuantError
from veloxquant import hookimpl
from veloxquant import testing
from veloxquant.cli import main
from veloxquant.registry import Registry
from veloxquant.registry import default_registry
from veloxquant.testing import RuleFailure
from veloxquant.testing import check_method
from veloxquant.testing import make_subject
from veloxquant.testing import rule_names
from veloxquant.testing import rules
from veloxquant.testing.driver import blocks
from veloxquant.testing.driver import require_equal
from veloxquant.testing.driver import require_like
from veloxquant.testing.driver import same
from veloxquant.testing.rules import applies
from veloxquant.testing.rules.account import reachable
from veloxquant.testing.rules.returns import check_own_rows_exact

QUICK = ["name", "own_rows_exact", "trim_limits", "store_bytes"]


def _toys():
    # Test folders are no packages, so a plain import would not find a sibling.
    spec = importlib.util.spec_from_file_location("core_test_kit_toys", Path(__file__).with_name("kit_toys.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toys = _toys()


class Forgetful(toys.Keeper):
    """Stores nothing that is decoded."""

    def later_rows(self, state, keys, values):
        state.seen += keys.shape[2]
        return toys.joined(state.keys, keys), toys.joined(state.values, values)


class Broken(toys.Keeper):
    """Trips over every row."""

    def store(self, state, keys, values):
        raise ZeroDivisionError("no rows today")


@pytest.fixture
def empty():
    return Registry(entry_points=[], blocked=[])


# ------------------------------------------------------------------ rules


def test_every_rule_is_a_function_with_its_contract_in_one_sentence():
    assert len(rules.RULES) == len(set(rules.RULES.values())) >= 60
    for name, rule in rules.RULES.items():
        assert rule.__name__ == f"check_{name}"
        assert rule.__doc__.endswith("."), name
        assert "\n" not in rule.__doc__, name


def test_a_rule_can_be_called_by_itself(empty):
    subject = make_subject(toys.Keeper(), registry=empty)
    assert check_own_rows_exact(subject) is None
    assert (subject.mode, subject.modes, subject.window) == ("routed", ("routed", "proxy"), 8)


def test_options_that_need_queries_are_examined_in_routed_mode_alone(request, empty):
    choosy = request.getfixturevalue("toys").Choosy()
    assert make_subject(choosy, registry=empty).modes == ("routed", "proxy")
    assert make_subject("choosy", registry=empty, config={"choose": True}).modes == ("routed",)


def test_a_prompt_is_made_longer_until_the_method_evicts(empty):
    assert make_subject(toys.Keeper(), registry=empty, config={"budget": 250}).tokens == 300
    assert make_subject(toys.Rounder(), registry=empty).tokens == 200
    assert make_subject("keeper", registry=empty, tokens=77).tokens == 77


def test_a_budget_that_evicts_nothing_is_told(empty):
    (result,) = check_method(toys.Keeper(), config={"budget": 10**5}, registry=empty, rules=["eviction_declared"])
    assert result.outcome == "failed"
    assert "smaller budget" in result.message


# ------------------------------------------------------------------ check_method


def test_results_come_in_order_with_the_reason_why_a_rule_does_not_apply(empty):
    results = check_method(toys.Keeper(), registry=empty, rules=QUICK[::-1])
    assert [(one.rule, one.outcome) for one in results] == [
        ("name", "passed"),
        ("own_rows_exact", "passed"),
        ("trim_limits", "passed"),
        ("store_bytes", "not applicable"),
    ]
    assert [one.message for one in results] == ["", "", "", "the method has no rows hook"]


def test_a_failure_names_the_mode_and_the_figures(empty):
    (result,) = check_method(Forgetful(), registry=empty, rules=["newest_row_held"])
    assert result.outcome == "failed"
    assert result.message.startswith("in routed mode: the row of token 200 is not the last one held")
    assert isinstance(result.error, RuleFailure)


def test_a_method_that_breaks_down_fails_and_the_cause_is_kept(empty):
    (result,) = check_method(Broken(), registry=empty, rules=["own_rows_exact"])
    assert result.message == "in routed mode: ZeroDivisionError: no rows today"
    assert isinstance(result.error, ZeroDivisionError)


def test_methods_are_given_by_name_as_method_or_as_plugin(empty):
    method = empty.register(toys.Rounder())
    for given in ("rounder", method):
        assert check_method(given, registry=empty, rules=["name"])[0].outcome == "passed"
    assert check_method(toys.Rounder(), rules=["name"])[0].outcome == "passed"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"method": "nobody"}, UnknownMethodError),
        ({"method": "rounder", "config": {"level": 3}}, ConfigError),
        ({"method": "rounder", "dense_config": "levels=many"}, ConfigError),
        ({"method": "rounder", "rules": ["own_row_exact"]}, VeloxQuantError),
    ],
)
def test_wrong_words_are_refused(empty, arguments, error):
    empty.register(toys.Rounder())
    with pytest.raises(error, match=r"own_rows_exact|level|nobody"):
        check_method(**arguments, registry=empty)


def test_the_kit_needs_no_pytest_and_the_package_loads_nothing_by_itself():
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import veloxquant.testing\n"
        "assert not [name for name in sys.modules if name.startswith('veloxquant.testing.')]\n"
        "from veloxquant.testing import check_method, rule_names\n"
        "import veloxquant.cli.check\n"
        "print(len(rule_names()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == len(rule_names())
    assert dir(testing) == sorted(testing.__all__)


# ------------------------------------------------------------------ helpers that could hide faults


def test_equal_means_bit_for_bit():
    one = mx.array([1.0, mx.nan, -0.5])
    assert same(one, mx.array([1.0, mx.nan, -0.5]))
    for other in (mx.array([1.0, mx.nan, 0.5]), mx.array([[1.0, mx.nan, -0.5]]), one.astype(mx.float16), 3):
        assert not same(one, other)
    assert not same(1, True)
    with pytest.raises(RuleFailure, match=r"here: 1 of 3 numbers differ, the first at \(2,\): 0.5 instead of -0.5"):
        require_equal(mx.array([1.0, mx.nan, 0.5]), one, "here")
    with pytest.raises(RuleFailure, match="the dtype is"):
        require_equal(one.astype(mx.float16), one, "here")
    with pytest.raises(RuleFailure, match=r"^here: b is missing$"):
        require_equal({"a": 1}, {"a": 1, "b": 2}, "here")
    with pytest.raises(RuleFailure, match=r"^here: b, d is missing; c is there and should not be$"):
        require_equal({"a": 1, "c": 3}, {"a": 1, "b": 2, "d": 2}, "here")


def test_nearly_equal_does_not_let_nan_through():
    require_like(mx.array([1.0]), mx.array([1.01]), "here", 0.1)
    for found in ([mx.nan], [2.0], [mx.inf]):
        with pytest.raises(RuleFailure):
            require_like(mx.array(found), mx.array([1.0]), "here", 0.1)


@pytest.mark.parametrize(
    ("tokens", "size", "cuts"),
    [(1, 8, [1]), (2, 8, [1, 1]), (10, 4, [4, 5, 1]), (9, 4, [4, 4, 1]), (10, 10, [9, 1]), (6, 2, [2, 3, 1])],
)
def test_prompts_are_cut_without_a_single_token_before_the_last(tokens, size, cuts):
    assert blocks(tokens, size) == cuts


def test_arrays_are_found_wherever_they_are():
    class Slotted:
        __slots__ = ("array", "missing")

    class Plain:
        pass

    arrays = [mx.zeros((n,)) for n in range(1, 6)]
    slotted, plain = Slotted(), Plain()
    slotted.array, plain.array, plain.me = arrays[0], arrays[1], plain
    found = reachable({"a": [slotted, (plain,)], "b": {"c": arrays[2]}, "d": toys.RounderRows(3, parts=(arrays[3],))})
    assert set(found) == {id(array) for array in arrays[:4]}


# ------------------------------------------------------------------ pytest

CASES = """
import importlib.util
from veloxquant.registry import Registry
from veloxquant.testing import MethodTests

spec = importlib.util.spec_from_file_location("toys", {path!r})
toys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)

class Forgetful(toys.Keeper):
    def later_rows(self, state, keys, values):
        state.seen += keys.shape[2]
        return toys.joined(state.keys, keys), toys.joined(state.values, values)

class TestOne(MethodTests):
    method = Forgetful()
    registry = Registry(entry_points=[], blocked=[])
    expected_failures = {{
        "newest_row_held": "it forgets", "name": "it does not", "store_bytes": "it has none", "x": "y"
    }}
"""


def test_the_class_has_a_test_a_rule_and_expected_failures_are_strict(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(CASES.format(path=str(Path(__file__).with_name("kit_toys.py"))))
    wanted = ("newest_row_held", "name", "store_bytes", "block_rows_held", "own_rows_exact", "store_reads")
    tests = [f"{file}::TestOne::test_rule[{rule}]" for rule in wanted]
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--color=no", *tests]
    run = subprocess.run(
        [*words, f"{file}::TestOne::test_expected_failures_name_rules"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    found = {}
    for line in run.stdout.splitlines():
        if "::TestOne::" in line and not line.startswith(("FAILED", "XFAIL", "SKIPPED", "ERROR")):
            name, _, outcome = line.partition("::TestOne::")[2].partition(" ")
            found[name] = outcome.split()[0]
    assert found == {
        "test_rule[newest_row_held]": "XFAIL",
        "test_rule[name]": "FAILED",
        "test_rule[store_bytes]": "FAILED",
        "test_rule[block_rows_held]": "FAILED",
        "test_rule[own_rows_exact]": "PASSED",
        "test_rule[store_reads]": "SKIPPED",
        "test_expected_failures_name_rules": "FAILED",
    }
    assert "name was expected to fail (it does not) and has passed" in run.stdout
    assert "no such rules: x" in run.stdout


# ------------------------------------------------------------------ the command


@pytest.fixture
def offered(monkeypatch):
    """Lets the command find toy methods, and cuts the rules down to a few."""
    registry = Registry(entry_points=[], blocked=[])
    monkeypatch.setattr("veloxquant.testing.subject.default_registry", lambda: registry)
    monkeypatch.setattr("veloxquant.testing.kit.rule_names", lambda: [*QUICK, "newest_row_held", "dense_equality"])
    return registry


def test_check_prints_a_line_a_rule(offered, capsys):
    offered.register(toys.Keeper())
    assert main(["check", "keeper", "--set", "budget=30", "--dense-set", "budget=100000"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "passed          name",
        "passed          own_rows_exact",
        "passed          trim_limits",
        "not applicable  store_bytes: the method has no rows hook",
        "passed          newest_row_held",
        "passed          dense_equality",
        "keeper: 5 passed, 0 failed, 1 not applicable",
    ]


def test_check_exits_1_on_a_failure_and_writes_json(offered, capsys):
    offered.register(Forgetful())
    assert main(["check", "keeper", "--json"]) == 1
    found = {one["rule"]: (one["outcome"], one["message"]) for one in json.loads(capsys.readouterr().out)}
    assert found["name"] == ("passed", "")
    assert found["newest_row_held"][0] == "failed"
    assert found["dense_equality"] == ("not applicable", "no dense_config was given")


@pytest.mark.parametrize(
    "words",
    [["check", "nobody"], ["check", "keeper", "--set", "budgett=3"], ["check", "keeper", "--dense-set", "budget"]],
)
def test_check_exits_2_on_bad_input(offered, capsys, words):
    offered.register(toys.Keeper())
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


class Uncalibrated(toys.Keeper):
    @hookimpl
    def veloxquant_create(self, config, layer):
        raise ConfigError("keeper needs a codebook: make one")


def test_a_method_that_makes_no_cache_with_its_options_is_refused_once(offered, capsys):
    offered.register(Uncalibrated())
    assert main(["check", "keeper"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: keeper needs a codebook: make one")


def test_no_threads_are_started_where_mlx_does_not_bear_them(monkeypatch):
    """As on CUDA, where it ends the process."""
    monkeypatch.setattr(applies, "threads_compute", lambda: False)
    monkeypatch.setattr("threading.Thread.start", lambda _: pytest.fail("a thread was started"))
    (result,) = check_method(toys.Rounder(), rules=["threads"])
    assert result.outcome == "not applicable"
    assert "CUDA" in result.message


def test_rules_for_installed_methods_say_why_they_do_not_apply_here(empty):
    assert empty is not default_registry()
    (result,) = check_method(toys.Rounder(), registry=empty, rules=["file_in_new_process"])
    assert "not installed" in result.message
