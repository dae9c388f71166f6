"""What is built has the same bytes wherever and whenever; what users must not get is refused."""

import ast
import hashlib
import os
import subprocess
import zipfile

import pytest

from tests.release.throwaway import NAMES, release_python
from tools.rails.environments import ROOT

BUILD = """
import sys
from pathlib import Path
from tools.release.building import build
from tools.release.members import load_members
root = Path.cwd()
for name in sys.argv[2:]:
    print(*build(root, load_members(root)[name], Path(sys.argv[1])))
"""


def build(repository, out, *names, **environment):
    done = subprocess.run(
        [release_python(), "-c", BUILD, str(out), *names],
        cwd=repository.folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split(), done.stderr


def test_all_packages_build_with_equal_hashes_everywhere(repository, released_once, tmp_path):
    # Another repository, another folder, another clock, another umask, another locale.
    elsewhere = released_once.clone(tmp_path / "a much longer name" / "for a folder")
    here, errors = build(repository, tmp_path / "one", *NAMES, TZ="UTC", SOURCE_DATE_EPOCH="1")
    assert errors == ""
    old = os.umask(0o077)
    try:
        there, errors = build(
            elsewhere, tmp_path / "two", *NAMES, TZ="Asia/Tokyo", LC_ALL="C.UTF-8"
        )
    finally:
        os.umask(old)
    assert errors == ""
    assert len(here) == len(there) == 2 * len(NAMES)
    for file, other in zip(here, there, strict=True):
        with open(file, "rb") as one, open(other, "rb") as two:
            assert hashlib.sha256(one.read()).digest() == hashlib.sha256(two.read()).digest()


HOOK = """
import os, time
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        with open("src/trl_redirect/stamp.py", "w") as file:
            file.write(f"STAMP = {%s!r}\\n")
        build_data["artifacts"].append("src/trl_redirect/stamp.py")
"""


@pytest.mark.parametrize(
    "what",
    ["time.time_ns()", "os.getcwd()", "os.environ.get('TZ')", "os.stat('README.md').st_mode"],
)
def test_a_build_that_depends_on_its_surroundings_is_refused(repository, tmp_path, what):
    folder = repository.member("trl-redirect")
    (folder / "hatch_build.py").write_text(HOOK % what)
    with (folder / "pyproject.toml").open("a") as manifest:
        manifest.write("\n[tool.hatch.build.hooks.custom]\n")
    repository.commit()
    files, errors = build(repository, tmp_path / "out", "trl-redirect")
    assert files == []
    assert "has other bytes when it is built" in errors
    assert list((tmp_path / "out").iterdir()) == []


def test_files_that_no_commit_has_are_not_built(repository, tmp_path):
    (repository.source("trl-redirect").parent / "secret.py").write_text("")
    (wheel, _), errors = build(repository, tmp_path / "out", "trl-redirect")
    assert errors == ""
    assert "trl_redirect/secret.py" not in zipfile.ZipFile(wheel).namelist()


def remove_types(repository):
    (repository.source("trl-redirect").parent / "py.typed").unlink()


def change_the_licence(repository):
    licence = repository.member("trl-redirect") / "LICENSE"
    licence.write_text(licence.read_text() + "\nOr else.\n")


def ship_tests(repository):
    (repository.source("trl-redirect").parent / "test_it.py").write_text("")


def ship_a_second_module(repository):
    (repository.member("trl-redirect") / "src" / "other").mkdir()
    (repository.member("trl-redirect") / "src" / "other" / "__init__.py").write_text("X = 1\n")
    manifest = repository.member("trl-redirect") / "pyproject.toml"
    repository.edit(manifest, '["src/trl_redirect"]', '["src/trl_redirect", "src/other"]')


def break_the_manifest(repository):
    manifest = repository.member("trl-redirect") / "pyproject.toml"
    repository.edit(manifest, "Typing :: Typed", "Typing :: Typewritten")


def break_the_readme(repository):
    manifest = repository.member("trl-redirect") / "pyproject.toml"
    repository.edit(
        manifest,
        'readme = "README.md"',
        'readme = {file = "README.md", content-type = "text/x-rst"}',
    )
    (repository.member("trl-redirect") / "README.md").write_text("# trl-redirect\n\n.. unknown::\n")


def raise_the_version_alone(repository):
    manifest = repository.member("trl-redirect") / "pyproject.toml"
    repository.edit(manifest, 'version = "0.1.0"', 'version = "0.1.1"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_types, "lacks ['trl_redirect/py.typed']"),
        (change_the_licence, "LICENSE differs from the repository's"),
        (ship_tests, "holds ['trl_redirect/test_it.py']"),
        (ship_a_second_module, "W009"),  # check-wheel-contents' number for a second top level
        (break_the_manifest, "-m validate_pyproject"),
        (break_the_readme, "-m twine check --strict"),
        (raise_the_version_alone, "its changelog's newest heading 0.1.0"),
    ],
)
def test_what_users_must_not_get_is_refused(repository, change, message):
    change(repository)
    repository.commit()
    assert message in repository.refuse("check", "trl-redirect")
    assert not list((repository.folder / "dist").glob("*.json"))


def test_the_tool_stays_small():
    lines = set()
    for file in (ROOT / "tools" / "release").glob("*.py"):
        tree = ast.parse(file.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        prose = {
            node.body[0]
            for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if hasattr(node, "lineno") and node not in prose:
                lines |= {(file, node.lineno), (file, node.end_lineno)}
    assert 500 < len(lines) < 800
