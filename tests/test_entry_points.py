"""The registry against distributions as installers leave them: dist-info folders on the path, read by the stdlib."""

import importlib
import sys
from importlib.metadata import entry_points

import pytest

from veloxquant.cli import main
from veloxquant.errors import PluginError
from veloxquant.errors import UnknownMethodError
from veloxquant.registry import Registry
from veloxquant.registry import default_registry

# What installers and users write, so spelled out here.
GROUP = "veloxquant.methods"
BLOCK_VARIABLE = "VELOXQUANT_BLOCK"

PLUGIN = """
import attrs
from veloxquant import ByteCount, MethodInfo, Snapshot, hookimpl

@attrs.frozen(kw_only=True)
class Config:
    pass

@hookimpl
def veloxquant_method():
    return MethodInfo(name="{name}", config=Config, summary="stores nothing", kind="test")

@hookimpl
def veloxquant_create(config, layer):
    return object()

@hookimpl
def veloxquant_prefill(state, keys, values):
    return keys, values

@hookimpl
def veloxquant_decode(state, keys, values):
    return keys, values

@hookimpl
def veloxquant_account(state):
    return ByteCount()

@hookimpl
def veloxquant_serialize(state):
    return Snapshot()

@hookimpl
def veloxquant_restore(config, layer, snapshot):
    return object()
"""


class Site:
    """A directory on the path into which distributions are put."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, source=PLUGIN, *, distribution=None, module=None, target=None, version="1.0", metadata=True):
        """Install a distribution of one method; the source None leaves the module out."""
        distribution = distribution or f"fake-{name.replace('_', '-')}"
        module = module or f"fake_{name}"
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("entry_points.txt").write_text(f"[{GROUP}]\n{name} = {target or module}\n")
        if metadata:
            info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if source is not None:
            self.folder.joinpath(f"{module}.py").write_text(source.replace("{name}", name))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.delenv(BLOCK_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield Site(tmp_path)
    for module in [module for module in sys.modules if module.startswith("fake_")]:
        del sys.modules[module]
    importlib.invalidate_caches()


def problem(registry, name):
    """The one problem of a method, which must be the same as what its own users are told."""
    (found,) = [problem for problem in registry.problems() if problem.name == name]
    with pytest.raises(PluginError) as caught:
        registry.get(name)
    assert found.reason.startswith(str(caught.value))
    return found, caught.value


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__


def without(*lines):
    source = PLUGIN
    for line in lines:
        assert line in source
        source = source.replace(line, "")
    return source


BROKEN = {
    "missing_module": (None, {}, ModuleNotFoundError, "No module named 'fake_missing_module'"),
    "import_error": ("import no_such_module_anywhere", {}, ModuleNotFoundError, "no_such_module_anywhere"),
    "syntax": ("def broken(:", {}, SyntaxError, "SyntaxError"),
    "error_at_import": ("raise RuntimeError('no device')", {}, RuntimeError, "no device"),
    "exit_at_import": ("import sys; sys.exit(3)", {}, SystemExit, "SystemExit: 3"),
    "stale_attribute": (PLUGIN, {"target": "fake_stale_attribute:gone"}, AttributeError, "gone"),
    "none": ("plugin = None", {"target": "fake_none:plugin"}, None, "is None"),
    "unhashable": ("plugin = []", {"target": "fake_unhashable:plugin"}, TypeError, "unhashable"),
    "number": ("plugin = 7", {"target": "fake_number:plugin"}, None, "lacks veloxquant_method"),
    "misspelt_hook": (
        PLUGIN + "\n@hookimpl\ndef veloxquant_atend(state, queries):\n    return None\n",
        {},
        Exception,
        "veloxquant_atend",
    ),
    "misspelt_argument": (PLUGIN.replace("(state, keys, values)", "(state, kyes, values)"), {}, Exception, "kyes"),
    "missing_hook": (
        without("@hookimpl\ndef veloxquant_account(state):\n    return ByteCount()\n"),
        {},
        None,
        "lacks veloxquant_account",
    ),
    "unmarked_hook": (PLUGIN.replace("@hookimpl\n", ""), {}, None, "marked with veloxquant.hookimpl"),
    "wrong_type": (
        PLUGIN.replace("return MethodInfo(", "return dict("),
        {},
        None,
        "must return a MethodInfo, not dict",
    ),
    "no_info": (
        PLUGIN.replace("return MethodInfo(", "raise OSError(") + "#",
        {},
        Exception,
        "veloxquant_method failed",
    ),
    "newer_protocol": (PLUGIN.replace('kind="test"', 'kind="test", protocol=99'), {}, None, "hook protocol 99"),
    "plain_config": (PLUGIN.replace("@attrs.frozen(kw_only=True)", ""), {}, None, "must be an attrs class"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_named_with_its_reason_and_disturbs_nobody(site, name):
    source, where, cause, sentence = BROKEN[name]
    site.add(name, source, version="2.5", **where)
    site.add("sound")
    registry = Registry()
    assert {name, "sound"} <= set(registry.names())

    found, error = problem(registry, name)
    assert (found.kind, found.distribution, found.version) == ("broken", f"fake-{name.replace('_', '-')}", "2.5")
    assert found.target == where.get("target", f"fake_{name}")
    assert sentence in found.reason
    for part in (found.distribution, found.version, found.target):
        assert part in str(error)
    if cause is not None:
        assert any(isinstance(link, cause) for link in chain(error.__cause__))

    assert registry.get("sound").name == "sound"
    assert "sound" not in {problem.name for problem in registry.problems()}


def test_a_plugin_that_is_mended_is_found_by_the_same_registry(site):
    site.add("mended", "raise ValueError('not yet')")
    registry = Registry()
    problem(registry, "mended")
    site.folder.joinpath("fake_mended.py").write_text(PLUGIN.replace("{name}", "mended") + "\n# longer than before\n")
    importlib.invalidate_caches()
    assert registry.get("mended").name == "mended"


def test_an_interrupt_during_an_import_is_not_taken_for_a_broken_plugin(site):
    site.add("interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry().get("interrupted")


def test_a_misnamed_plugin_is_refused_under_either_name(site):
    site.add("misnamed", PLUGIN.replace("{name}", "another"))
    found, _ = problem(Registry(), "misnamed")
    assert (found.kind, found.distribution) == ("misnamed", "fake-misnamed")
    assert "calls itself 'another'" in found.reason
    with pytest.raises(UnknownMethodError):
        Registry().get("another")


def test_two_distributions_with_one_name_are_both_named_and_neither_is_loaded(site):
    site.add("twin", distribution="fake-first", module="fake_first")
    site.add("twin", distribution="fake-second", module="fake_second", version="3.1")
    site.add("sound")
    registry = Registry()
    found = [problem for problem in registry.problems() if problem.name == "twin"]
    assert [(problem.kind, problem.distribution) for problem in found] == [
        ("duplicate", "fake-first"),
        ("duplicate", "fake-second"),
    ]
    with pytest.raises(PluginError, match=r"fake-first 1\.0 .*fake-second 3\.1 ") as caught:
        registry.get("twin")
    assert "uninstall one" in str(caught.value)
    assert not {"fake_first", "fake_second"} & set(sys.modules)
    assert registry.names().count("twin") == 1
    assert registry.get("sound").name == "sound"


def test_two_distributions_with_one_name_and_one_target_are_a_duplicate_too(site):
    site.add("twin", distribution="fake-first", module="fake_shared")
    site.add("twin", distribution="fake-second", module="fake_shared")
    assert [problem.kind for problem in Registry().problems() if problem.name == "twin"] == ["duplicate"] * 2


@pytest.mark.parametrize("spelling", ["fake-editable", "Fake_Editable", "fake.editable"])
def test_a_distribution_that_is_listed_twice_counts_once(site, monkeypatch, spelling):
    site.add("editable", distribution="fake-editable")
    checkout = Site(site.folder / "checkout")
    checkout.add("editable", distribution=spelling)
    monkeypatch.setattr(sys, "path", [str(checkout.folder), *sys.path])
    (entry,) = [entry for entry in Registry().entries() if entry.name == "editable"]
    assert entry.target == "fake_editable"
    assert Registry().get("editable").name == "editable"

    points = [point for point in entry_points(group=GROUP) if point.name == "editable"]
    assert Registry(points * 2).get("editable").name == "editable"
    assert Registry(points * 2).problems() == []


@pytest.mark.parametrize("value", ["unwanted", " unwanted ", "other,unwanted", ",, unwanted ,", "\tunwanted,unwanted"])
def test_a_blocked_method_is_not_imported_and_the_reason_is_told(site, monkeypatch, value):
    site.add("unwanted", "raise SystemError('imported all the same')")
    site.add("sound")
    monkeypatch.setenv(BLOCK_VARIABLE, value)
    registry = Registry()
    assert "unwanted" not in registry.names()
    assert "unwanted" in {entry.name for entry in registry.entries()}
    found, _ = problem(registry, "unwanted")
    assert (found.kind, found.distribution) == ("blocked", "fake-unwanted")
    assert BLOCK_VARIABLE in found.reason
    assert "fake_unwanted" not in sys.modules
    assert registry.get("sound").name == "sound"


@pytest.mark.parametrize("value", ["", " ", ",", " , ,"])
def test_empty_parts_block_nothing(site, monkeypatch, value):
    site.add("sound")
    monkeypatch.setenv(BLOCK_VARIABLE, value)
    registry = Registry()
    assert registry.blocked == frozenset()
    assert registry.get("sound").name == "sound"


def test_the_argument_wins_over_the_environment(site, monkeypatch):
    site.add("sound")
    monkeypatch.setenv(BLOCK_VARIABLE, "sound")
    assert Registry(blocked=()).get("sound").name == "sound"
    monkeypatch.delenv(BLOCK_VARIABLE)
    with pytest.raises(PluginError, match="blocked"):
        Registry(blocked=["sound"]).get("sound")


def test_a_blocked_duplicate_leaves_the_way_free_for_no_one(site, monkeypatch):
    site.add("twin", distribution="fake-first", module="fake_first")
    site.add("twin", distribution="fake-second", module="fake_second")
    monkeypatch.setenv(BLOCK_VARIABLE, "twin")
    assert "twin" not in Registry().names()
    assert {problem.kind for problem in Registry().problems() if problem.name == "twin"} == {"blocked"}


def test_what_a_failed_uninstall_left_behind_is_one_broken_method(site):
    site.add("leftover", None, metadata=False)
    site.add("sound")
    registry = Registry()
    assert "leftover" in registry.names()
    found, error = problem(registry, "leftover")
    assert found.kind == "broken"
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert registry.get("sound").name == "sound"


def test_an_entry_point_that_points_at_nothing_sensible_is_broken(site):
    site.add("nonsense", None, target="not a module at all!")
    site.add("sound")
    registry = Registry()
    found, _ = problem(registry, "nonsense")
    assert found.kind == "broken"
    assert registry.get("sound").name == "sound"


def test_a_plugin_may_be_an_object(site):
    site.add("object", PLUGIN + "\nimport sys\nplugin = sys.modules[__name__]\n", target="fake_object:plugin")
    assert Registry().get("object").distribution == "fake-object"


def test_the_order_of_the_path_and_of_the_file_system_changes_nothing(site, monkeypatch):
    folders = [site.folder / "one", site.folder / "two"]
    names = ["beta", "alpha", "gamma", "delta"]
    for index, name in enumerate(names):
        Site(folders[index % 2]).add(name)
    Site(folders[0]).add("twin", distribution="fake-first", module="fake_first")
    Site(folders[1]).add("twin", distribution="fake-second", module="fake_second")
    Site(folders[1]).add("failing", "raise ValueError('always')")

    def seen(path):
        monkeypatch.setattr(sys, "path", [*map(str, path), *before])
        registry = Registry()
        return registry.names(), registry.entries(), registry.problems()

    before = list(sys.path)
    first = seen(folders)
    assert first == seen(folders[::-1])
    ours = [name for name in first[0] if name in {*names, "twin", "failing"}]
    assert ours == sorted([*names, "twin", "failing"])

    points = list(entry_points(group=GROUP))
    backwards = Registry(points[::-1])
    assert (backwards.names(), backwards.entries(), backwards.problems()) == first


def test_nothing_is_imported_for_names_and_one_plugin_for_one_method(site):
    site.add("first")
    site.add("second")
    registry = Registry()
    assert {"first", "second"} <= set(registry.names())
    assert len(registry.entries()) >= 2
    assert not {"fake_first", "fake_second"} & set(sys.modules)
    assert registry.get("first") is registry.get("first")
    assert "fake_first" in sys.modules
    assert "fake_second" not in sys.modules


def test_an_unknown_name_is_answered_with_the_nearest_and_with_what_is_installed(site):
    site.add("sound")
    with pytest.raises(UnknownMethodError, match=r"no method 'soudn'.*'sound'") as caught:
        Registry().get("soudn")
    assert "installed: " in str(caught.value)
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownMethodError, match="no method is installed"):
        Registry(entry_points=[]).get("sound")


@pytest.mark.parametrize("content", [b"[console_scripts]\nthis line has no equals\n", b"\xff\xfe\x00", None])
def test_a_distribution_that_cannot_be_read_hides_no_other(site, content, capfd, request):
    """Its damaged file need not even be about methods."""
    default_registry.cache_clear()
    request.addfinalizer(default_registry.cache_clear)
    site.add("sound")
    damaged = site.folder / "damaged-1.0.dist-info"
    damaged.mkdir()
    damaged.joinpath("METADATA").write_bytes(b"Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    if content is not None:
        damaged.joinpath("entry_points.txt").write_bytes(content)
    registry = Registry()
    assert "sound" in registry.names()
    assert registry.get("sound").name == "sound"
    unreadable = [problem for problem in registry.problems() if problem.kind == "unreadable"]
    if content is None:
        assert unreadable == []
    else:
        assert ["damaged" in problem.reason for problem in unreadable] == [True]
        assert main(["doctor"]) == 1
        assert "damaged" in capfd.readouterr().out
    assert main(["list"]) == 0
    assert "sound" in capfd.readouterr().out
