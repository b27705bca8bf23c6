import copy

import attrs
import pluggy
import pytest

from veloxquant import LayerSpec
from veloxquant import PluginError
from veloxquant import hookimpl
from veloxquant import hookspecs
from veloxquant.binding import OPTIONAL
from veloxquant.binding import PREFIX
from veloxquant.binding import Ops
from veloxquant.binding import bind
from veloxquant.binding import new_manager

HOOKS = [field.name for field in attrs.fields(Ops)]


class Complete:
    """All hooks, each answering with its own name and the arguments it was given."""

    def __init__(self, tag="complete"):
        self.tag = tag


def _hook(name, arguments):
    scope = {"name": name}
    exec(f"def {PREFIX}{name}(self, {', '.join(arguments)}): return (self.tag, name, {', '.join(arguments)})", scope)
    return hookimpl(scope[PREFIX + name])


def _arguments(name):
    return list(getattr(new_manager().hook, PREFIX + name).spec.argnames)


for _name in HOOKS:
    setattr(Complete, PREFIX + _name, _hook(_name, _arguments(_name)))


class Observer:
    """Wraps one hook and notes what went through it."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def veloxquant_create(self, layer):
        result = yield
        self.seen.append((layer, result))
        return result


def given(name):
    return [f"{name}-{argument}" for argument in _arguments(name)]


def with_plugins(**plugins):
    manager = new_manager()
    for name, plugin in plugins.items():
        manager.register(plugin, name)
    return manager


def test_the_fields_of_ops_are_the_hooks_and_the_optional_ones_have_no_need_to_be_there():
    assert sorted(PREFIX + name for name in HOOKS) == sorted(hookspecs.__all__)
    assert {field.name for field in attrs.fields(Ops) if field.default is None} == OPTIONAL


@pytest.mark.parametrize("name", HOOKS)
def test_a_bound_hook_equals_the_call_through_pluggy_with_all_other_methods_removed(name):
    mine, before, after = Complete("mine"), Complete("before"), Complete("after")
    manager = with_plugins(before=before, mine=mine, after=after)
    through_pluggy = manager.subset_hook_caller(PREFIX + name, [before, after])
    arguments = dict(zip(_arguments(name), given(name), strict=True))
    expected = through_pluggy(**arguments)
    assert expected[0] == "mine"
    assert getattr(bind(manager, "mine"), name)(*given(name)) == expected


def test_a_hook_with_all_its_arguments_is_called_directly():
    plugin = Complete()
    ops = bind(with_plugins(mine=plugin), "mine")
    assert ops.prefill == plugin.veloxquant_prefill


def test_arguments_may_be_left_out_and_stand_in_any_order():
    class Short(Complete):
        @hookimpl
        def veloxquant_prefill(self, values, state):
            return ("short", state, values)

        @hookimpl
        def veloxquant_create(self):
            return "nothing needed"

    ops = bind(with_plugins(mine=Short()), "mine")
    assert ops.prefill("s", "k", "v") == ("short", "s", "v")
    assert ops.create("config", "layer") == "nothing needed"


def test_a_module_can_be_a_plugin():
    import types

    module = types.ModuleType("toy_module")
    for name in HOOKS:
        scope = {}
        exec(f"def {PREFIX}{name}({', '.join(_arguments(name))}): return '{name}'", scope)
        setattr(module, PREFIX + name, hookimpl(scope[PREFIX + name]))
    ops = bind(with_plugins(mine=module), "mine")
    assert [getattr(ops, name)(*given(name)) for name in HOOKS] == HOOKS


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_an_optional_hook_that_is_missing_is_none(name):
    plugin = type("Partial", (Complete,), {PREFIX + name: None})()
    ops = bind(with_plugins(mine=plugin, other=Complete("other")), "mine")
    assert getattr(ops, name) is None


@pytest.mark.parametrize("name", sorted(set(HOOKS) - OPTIONAL))
def test_a_hook_that_every_method_needs_must_be_there(name):
    plugin = type("Partial", (Complete,), {PREFIX + name: None})()
    with pytest.raises(PluginError, match=f"{PREFIX}{name}.*hookimpl"):
        bind(with_plugins(mine=plugin, other=Complete("other")), "mine")


def test_a_hook_that_is_not_marked_is_missing():
    class Unmarked(Complete):
        def veloxquant_decode(self, state, keys, values):
            return keys, values

    with pytest.raises(PluginError, match="veloxquant_decode"):
        bind(with_plugins(mine=Unmarked()), "mine")


def test_a_method_cannot_run_around_the_hooks_of_others():
    class Nosy(Complete):
        @hookimpl(wrapper=True)
        def veloxquant_trim(self, count):
            return (yield)

    with pytest.raises(PluginError, match=r"veloxquant_trim.*wrapper"):
        bind(with_plugins(nosy=Nosy()), "nosy")


# ---------------------------------------------------------------- observers


def observed():
    manager = with_plugins(before=Complete("before"), mine=Complete("mine"), after=Complete("after"))
    observer = Observer()
    manager.register(observer, "observer")
    return manager, observer


def test_an_observer_sees_the_call_and_the_result_and_no_other_method_answers():
    manager, observer = observed()
    ops = bind(manager, "mine")
    result = ops.create("config", "layer")
    assert result == ("mine", "create", "config", "layer")
    assert observer.seen == [("layer", result)]
    assert ops.prefill("s", "k", "v") == ("mine", "prefill", "s", "k", "v")


def test_a_method_that_is_loaded_later_does_not_answer_for_an_observed_one():
    manager, _ = observed()
    ops = bind(manager, "mine")
    manager.register(Complete("latest"), "latest")
    assert ops.create("config", "layer")[0] == "mine"


def test_what_was_bound_keeps_the_observers_it_was_bound_with():
    manager, observer = observed()
    ops = bind(manager, "mine")
    manager.unregister(observer)
    later = Observer()
    manager.register(later, "later")
    ops.create("config", "layer")
    assert (len(observer.seen), len(later.seen)) == (1, 0)
    bind(manager, "mine").create("config", "layer")
    assert (len(observer.seen), len(later.seen)) == (1, 1)


def test_an_observer_can_change_nothing_that_it_does_not_return():
    class Replacer:
        @hookimpl(wrapper=True)
        def veloxquant_attend(self, queries):
            yield
            return f"replaced {queries}"

    manager = with_plugins(mine=Complete("mine"))
    manager.register(Replacer())
    ops = bind(manager, "mine")
    assert ops.attend(*given("attend")) == "replaced attend-queries"


def test_none_passes_through_an_observer():
    class Silent(Complete):
        @hookimpl
        def veloxquant_create(self):
            return None

    manager = with_plugins(other=Complete("other"), mine=Silent(), last=Complete("last"))
    manager.register(Observer())
    assert bind(manager, "mine").create("config", LayerSpec()) is None


def test_copies_share_the_bound_hooks():
    ops = bind(with_plugins(mine=Complete()), "mine")
    assert copy.deepcopy([ops])[0] is ops


def test_a_manager_refuses_arguments_that_no_specification_has():
    class Wrong(Complete):
        @hookimpl
        def veloxquant_prefill(self, state, keys, colour):
            return keys

    with pytest.raises(pluggy.PluginValidationError, match="colour"):
        with_plugins(mine=Wrong())
