import attrs
import pytest

from veloxquant import LayerSpec
from veloxquant import MethodInfo
from veloxquant import PluginError
from veloxquant import UnknownMethodError
from veloxquant import hookimpl
from veloxquant.build import get_cache
from veloxquant.registry import BLOCK_VARIABLE
from veloxquant.registry import Entry
from veloxquant.registry import Registry


def make_registry(*plugins, blocked=()):
    registry = Registry(entry_points=[], blocked=blocked)
    for plugin in plugins:
        registry.register(plugin)
    return registry


def with_info(toys, **changes):
    """A no-op plugin that says something else of itself."""

    class Changed(toys.NoOp):
        @hookimpl
        def veloxquant_method(self):
            return attrs.evolve(super().veloxquant_method(), **changes)

    return Changed()


# ---------------------------------------------------------------- names


def test_registered_methods_are_listed_in_order(registry, toys):
    assert registry.names() == sorted(kind.name for kind in toys.ALL)
    assert Entry("noop", "(registered)", "", "NoOp") in registry.entries()
    assert registry.problems() == []


def test_registries_know_nothing_of_each_other(registry):
    assert Registry(entry_points=[], blocked=[]).names() == []


def test_a_method_is_loaded_once(registry):
    method = registry.get("noop")
    assert registry.get("noop") is method
    assert (method.name, method.info.kind, method.distribution) == ("noop", "toy", "(registered)")


def test_a_plugin_can_be_registered_under_the_name_it_gives_itself_only(toys):
    registry = make_registry()
    assert registry.register(toys.NoOp(), "noop").name == "noop"
    with pytest.raises(PluginError, match="calls itself 'evictor'"):
        registry.register(toys.Evictor(), "other")
    assert registry.names() == ["noop"]


def test_a_name_that_is_taken_is_refused_and_the_first_stays(registry, plugins, toys):
    with pytest.raises(PluginError, match="'noop' is taken"):
        registry.register(toys.NoOp())
    registry.get("noop").ops.prefill(*_one_row(registry))
    assert plugins["noop"].log == [("prefill", 1)]


def _one_row(registry):
    import mlx.core as mx

    rows = mx.zeros((1, 1, 1, 8))
    return registry.get("noop").ops.create(None, LayerSpec()), rows, rows


# ---------------------------------------------------------------- unknown names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nop", ["'nop'", "did you mean 'noop'?", "installed: ", "evictor", "pip install"]),
        ("zzzzzz", ["'zzzzzz'", "installed: ", "pip install"]),
        ("rocketkv", ["'rocketkv'", "pip install veloxquant-rocketkv"]),
        ("turboquant_rvq", ["pip install veloxquant-turboquant-rvq"]),
        ("snapvk", ["did you mean 'snapkv'?"]),
        ("", ["''"]),
    ],
)
def test_an_unknown_name_gets_advice(registry, name, words):
    with pytest.raises(UnknownMethodError) as caught:
        registry.get(name)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "did you mean" not in message or "did you mean" in "".join(words)


def test_an_unknown_name_where_nothing_is_installed():
    with pytest.raises(UnknownMethodError, match="no method is installed"):
        make_registry().get("noop")


def test_an_unknown_method_is_a_lookup_error_and_no_key_error(registry):
    with pytest.raises(LookupError) as caught:
        registry.get("nothing")
    assert not isinstance(caught.value, KeyError)


# ---------------------------------------------------------------- blocked


def test_a_blocked_method_is_neither_listed_nor_loaded(toys):
    registry = make_registry(toys.NoOp(), toys.Evictor(), blocked=["noop"])
    assert registry.names() == ["evictor"]
    assert [entry.name for entry in registry.entries()] == ["evictor", "noop"]
    with pytest.raises(PluginError, match=f"'noop' is blocked by {BLOCK_VARIABLE}"):
        registry.get("noop")
    assert registry.get("evictor").name == "evictor"


def test_blocking_an_unknown_name_leaves_it_unknown():
    with pytest.raises(UnknownMethodError):
        make_registry(blocked=["noop"]).get("noop")


def test_the_environment_blocks_with_blanks_and_empty_parts(toys, monkeypatch):
    monkeypatch.setenv(BLOCK_VARIABLE, " noop , ,other")
    registry = Registry(entry_points=[])
    assert registry.blocked == {"noop", "other"}
    registry.register(toys.NoOp())
    assert registry.names() == []
    monkeypatch.delenv(BLOCK_VARIABLE)
    assert registry.names() == ["noop"]
    assert registry.get("noop").name == "noop"


# ---------------------------------------------------------------- plugins that cannot be used


def _broken(toys):
    class Unknown(toys.NoOp):
        @hookimpl
        def veloxquant_prefil(self, state):
            return state

    class WrongArgument(toys.NoOp):
        @hookimpl
        def veloxquant_prefill(self, state, keys, vals):
            return keys, vals

    class Raises(toys.NoOp):
        @hookimpl
        def veloxquant_method(self):
            raise RuntimeError("no luck")

    class WrongType(toys.NoOp):
        @hookimpl
        def veloxquant_method(self):
            return "noop"

    class Incomplete(toys.NoOp):
        veloxquant_serialize = None

    class Nosy(toys.NoOp):
        @hookimpl(wrapper=True)
        def veloxquant_trim(self, count):
            return (yield)

    return {
        "misspelt": (Unknown(), ["veloxquant_prefil"]),
        "argument": (WrongArgument(), ["vals"]),
        "raises": (Raises(), ["RuntimeError", "no luck"]),
        "type": (WrongType(), ["MethodInfo", "str"]),
        "incomplete": (Incomplete(), ["veloxquant_serialize"]),
        "wrapper": (Nosy(), ["veloxquant_trim", "wrapper"]),
        "future": (with_info(toys, protocol=99), ["protocol 99", "update veloxquant"]),
        "past": (with_info(toys, protocol=0), ["protocol 0", "update (registered)"]),
        "config": (with_info(toys, config=dict), ["attrs class", "dict"]),
        "window": (with_info(toys, prompt_window="windw"), ["prompt_window", "windw"]),
        "exact": (with_info(toys, exact_rows="recnt"), ["exact_rows", "recnt", "property"]),
        "misnamed": (with_info(toys, name="other"), ["other"]),
        "none": (None, ["None"]),
    }


BROKEN = ["misspelt", "argument", "raises", "type", "incomplete", "wrapper"]
BROKEN += ["future", "past", "config", "window", "exact", "misnamed", "none"]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_refused_with_its_origin_and_leaves_no_trace(toys, case):
    plugin, words = _broken(toys)[case]
    registry = make_registry(toys.Evictor())
    for _ in range(2):  # the second time as the first
        with pytest.raises(PluginError) as caught:
            registry.register(plugin, "noop")
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "noop" in str(caught.value)
    assert registry.names() == ["evictor"]
    good = toys.NoOp()
    registry.register(good)
    assert registry.get("noop").ops.create(None, LayerSpec()).count == 0
    assert registry.get("evictor").name == "evictor"


def test_a_plugin_that_cannot_be_hashed_is_refused(toys):
    class Unhashable(toys.NoOp):
        __hash__ = None

    with pytest.raises(PluginError, match="unhashable"):
        make_registry().register(Unhashable(), "noop")


def test_an_object_that_is_no_plugin_is_refused():
    with pytest.raises(PluginError, match="cannot be asked for its name"):
        make_registry().register(object())


# ---------------------------------------------------------------- what a method can do


@pytest.mark.parametrize(
    ("name", "modes", "in_proxy", "in_routed"),
    [
        ("noop", (), True, True),
        ("rigid", (), False, False),
        ("noop_attend", ("routed", "proxy"), True, True),
        ("picky", ("routed",), True, True),
        ("evictor", ("routed", "proxy"), False, True),
    ],
)
def test_query_modes_and_trimming_follow_from_the_hooks(registry, name, modes, in_proxy, in_routed):
    method = registry.get(name)
    assert method.query_modes == modes
    assert (method.trimmable("proxy"), method.trimmable("routed")) == (in_proxy, in_routed)


@pytest.mark.parametrize(
    "changes", [{"name": 3}, {"config": "x"}, {"needs": ("luck",)}, {"evicts": "yes"}, {"protocol": "1"}]
)
def test_a_method_info_checks_its_fields(toys, changes):
    info = toys.NoOp().veloxquant_method()
    with pytest.raises((TypeError, ValueError)):
        attrs.evolve(info, **changes)
    assert isinstance(info, MethodInfo)


# ---------------------------------------------------------------- observers


class Shapes:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def veloxquant_prefill(self, keys):
        self.seen.append(keys.shape[2])
        return (yield)


def test_an_observer_wraps_caches_made_from_then_on(registry, rows):
    observer = Shapes()
    before = get_cache("noop", registry=registry)
    registry.observe(observer)
    during = get_cache("noop", registry=registry)
    registry.unobserve(observer)
    after = get_cache("noop", registry=registry)
    for size, cache in ((5, before), (6, during), (7, after)):
        keys, values = rows(size)
        assert cache.update_and_fetch(keys, values)[0].shape == (1, 2, size, 8)
    assert observer.seen == [6]


def test_an_observer_sees_methods_that_are_registered_later(toys, rows):
    registry, observer = make_registry(toys.NoOp()), Shapes()
    registry.observe(observer)
    early = get_cache("noop", registry=registry)
    registry.register(toys.Evictor())
    late = get_cache("evictor", registry=registry)
    late.update_and_fetch(*rows(5))
    early.update_and_fetch(*rows(6))
    assert observer.seen == [5, 6]
    # The state is still the one of its own method.
    assert (type(early.method_state).__name__, type(late.method_state).__name__) == ("DenseRows", "EvictorState")


def test_an_observer_must_wrap(registry):
    class Answers:
        @hookimpl
        def veloxquant_prefill(self, state, keys, values):
            return None

    with pytest.raises(PluginError, match=r"veloxquant_prefill with hookimpl\(wrapper=True\)"):
        registry.observe(Answers())
    assert registry.get("noop").ops.prefill == registry._manager.get_plugin("noop").veloxquant_prefill


def test_an_observer_with_a_misspelt_hook_is_refused(registry):
    class Misspelt:
        @hookimpl(wrapper=True)
        def veloxquant_prefil(self, keys):
            return (yield)

    with pytest.raises(PluginError, match="veloxquant_prefil"):
        registry.observe(Misspelt())


def test_taking_out_an_observer_that_is_not_there_does_nothing(registry):
    method = registry.get("noop")
    registry.unobserve(Shapes())
    assert registry.get("noop") is method
