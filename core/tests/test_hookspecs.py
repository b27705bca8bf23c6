import inspect

import attrs
import pytest

from veloxquant import hookspecs
from veloxquant.binding import PREFIX
from veloxquant.binding import Ops
from veloxquant.binding import new_manager

HOOKS = sorted(name for name in vars(hookspecs) if name.startswith(PREFIX))


def test_every_hook_is_exported_and_known_to_ops():
    assert sorted(hookspecs.__all__) == HOOKS
    assert sorted(PREFIX + field.name for field in attrs.fields(Ops)) == HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_the_first_result_of_a_hook_counts(name):
    spec = getattr(new_manager().hook, name).spec
    assert spec.opts["firstresult"]
    assert not spec.opts["historic"]


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented_in_the_fixed_shape(name):
    function = getattr(hookspecs, name)
    document = inspect.getdoc(function)
    lines = document.splitlines()
    assert lines[0].endswith((".", "routed query mode."))
    assert lines[1] == ""
    positions = [next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("Called:", "Must not:")]
    assert positions == sorted(positions)
    parameters = list(inspect.signature(function).parameters)
    documented = [line.strip().partition(":")[0] for line in lines if line.startswith("    ") and ":" in line]
    assert [word for word in documented if word in parameters] == parameters
    assert (not parameters) or "Args:" in lines
    if inspect.signature(function).return_annotation != "None":
        assert "Returns:" in lines


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_types_and_no_defaults(name):
    signature = inspect.signature(getattr(hookspecs, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        # pluggy does not pass arguments that have defaults.
        assert parameter.default is inspect.Parameter.empty


@pytest.mark.parametrize("name", HOOKS)
def test_optional_hooks_say_so(name):
    optional = next(field.default is None for field in attrs.fields(Ops) if PREFIX + field.name == name)
    assert ("Optional" in inspect.getdoc(getattr(hookspecs, name))) is optional
