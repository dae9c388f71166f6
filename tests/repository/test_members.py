"""Rules that every package of this repository keeps."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache

import pytest
from packaging.requirements import Requirement

from tools.rails.environments import ROOT, hatch_environment
from tools.rails.wheels import members, project_table

FRAGMENT_TYPES = {"breaking", "feature", "fix", "doc"}
# Whose import at the top of a module is refused, and where; DeepSpeed's disturbs other backends.
NEVER_ON_TOP = {
    name: {"deepspeed", "peft"} | ({"torch", "transformers"} if name == "trl-chatformat" else set())
    for name in members()
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
each_member = pytest.mark.parametrize("distribution", members())


def folder_of(distribution):
    return ROOT / "packages" / distribution


def module_of(distribution):
    return distribution.replace("-", "_")


def sources_of(distribution):
    return sorted((folder_of(distribution) / "src" / module_of(distribution)).rglob("*.py"))


def imports_of(file, *, on_top_only=False):
    """The full names that a file imports; on top, those that importing the file imports."""
    names = []
    nodes = [_tree(file)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        if on_top_only and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif not (on_top_only and isinstance(node, FUNCTIONS)):
            nodes += ast.iter_child_nodes(node)
    return names


@cache
def _tree(file):
    return ast.parse(file.read_text())


def test_the_scan_sees_imports_where_they_are(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import l\n"
        "class F:\n    import g\ndef f():\n    import h\n    from i.j import k\n"
    )
    assert sorted(imports_of(file, on_top_only=True)) == ["a.b", "c.d", "g", "l"]
    assert sorted(imports_of(file)) == ["a.b", "c.d", "e", "g", "h", "i.j.k", "l"]


@each_member
def test_a_member_has_its_files(distribution):
    folder = folder_of(distribution)
    licence = folder / "LICENSE"
    assert not licence.is_symlink()
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in licence.read_text()
    assert (folder / "src" / module_of(distribution) / "py.typed").is_file()
    assert (folder / "README.md").read_text().startswith(f"# {distribution}\n")
    assert (folder / "CHANGELOG.md").read_text().startswith("# ")


@each_member
def test_a_version_is_static_and_the_lower_bounds_are_stated(distribution):
    table = project_table(distribution)
    assert table["name"] == distribution
    assert re.fullmatch(r"\d+\.\d+\.\d+", table["version"])
    assert "dynamic" not in table
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    for text in _requirements(distribution):
        requirement = Requirement(text)
        operators = {clause.operator for clause in requirement.specifier}
        assert ">=" in operators, text


@each_member
def test_ranges_of_siblings_hold_their_minor_version(distribution):
    for text in _requirements(distribution):
        requirement = Requirement(text)
        if requirement.name in members():
            major, minor, _ = project_table(requirement.name)["version"].split(".")
            ranges = {str(clause) for clause in requirement.specifier}
            assert ranges == {f">={major}.{minor}", f"<{major}.{int(minor) + 1}"}, text


@each_member
def test_only_declared_siblings_are_imported_and_only_by_their_public_names(distribution):
    declared = {Requirement(text).name for text in _requirements(distribution)} | {distribution}
    siblings = {module_of(name): name for name in members()}
    for file in sources_of(distribution):
        for name in imports_of(file):
            top, *rest = name.split(".")
            if top in siblings:
                assert siblings[top] in declared, f"{file} imports {name}"
            if top in siblings and siblings[top] != distribution:
                private = [part for part in rest if part.startswith("_")]
                assert private in ([], ["_ForwardRedirection"]), f"{file} imports {name}"


@each_member
def test_heavy_libraries_are_imported_inside_functions(distribution):
    for file in sources_of(distribution):
        for name in imports_of(file, on_top_only=True):
            top = name.split(".")[0]
            assert top not in NEVER_ON_TOP[distribution], f"{file} imports {name} on top"


@cache
def loaded_by(module):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@each_member
def test_importing_a_member_loads_no_heavy_library(distribution):
    loaded = loaded_by(module_of(distribution))
    assert module_of(distribution) in loaded
    heavy = loaded & NEVER_ON_TOP[distribution]
    # Models of transformers 4 load DeepSpeed by themselves where it is installed.
    if heavy and "transformers.modeling_utils" in loaded:
        heavy -= loaded_by("transformers.modeling_utils")
    assert not heavy


def test_arrows_point_down_only():
    assert {name: _siblings(name) for name in members() if _siblings(name)} == {
        "trl-models": set(members()) - {"trl-models"},
        "trl-prepare": {"trl-zero3"},
    }


@each_member
def test_changelog_fragments_are_named_for_a_known_type(distribution):
    folder = folder_of(distribution)
    towncrier = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["towncrier"]
    assert {kind["directory"] for kind in towncrier["type"]} == FRAGMENT_TYPES
    fragments = [file for file in (folder / "changelog.d").iterdir() if file.name[0] != "."]
    for fragment in fragments:
        assert re.fullmatch(r"[a-z0-9-]+\.(\w+)\.md", fragment.name), fragment
        assert fragment.suffixes[0].removeprefix(".") in FRAGMENT_TYPES, fragment
        assert fragment.read_text().strip().endswith("."), f"{fragment} is no sentence"


@each_member
def test_towncrier_drafts_the_next_changelog_inside_a_member(distribution):
    python, _ = hatch_environment("default")
    folder = folder_of(distribution)
    done = subprocess.run(
        [python, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "## 9.9.9 (" in done.stdout
    drafted = " ".join(done.stdout.split())
    for fragment in (folder / "changelog.d").glob("*.md"):
        assert " ".join(fragment.read_text().split()) in drafted


def _requirements(distribution):
    table = project_table(distribution)
    extras = table.get("optional-dependencies", {}).values()
    return [*table.get("dependencies", []), *(text for extra in extras for text in extra)]


def _siblings(distribution):
    names = {Requirement(text).name for text in _requirements(distribution)}
    return names & set(members())
