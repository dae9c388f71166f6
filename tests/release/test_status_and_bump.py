"""The tool on a real repository: what it sees, what it refuses, and the commit that it makes."""

import json
import stat

import pytest

from tests.release.throwaway import NAMES

SIGNATURE = "def redirect("


def first_line_of(text):
    return text.splitlines()[0]


def test_after_a_release_nothing_has_changed_and_nothing_moves(repository):
    assert {one["state"] for one in repository.status().values()} == {"unchanged"}
    assert set(repository.status()) == set(NAMES)
    assert repository.release("plan") == "Nothing moves.\n"
    assert "Nothing moves" in repository.refuse("bump")


def test_before_the_first_release_all_are_first(repository):
    for name in NAMES:
        repository.git("tag", "--delete", f"{name}-v0.1.0")
        repository.edit(repository.member(name) / "CHANGELOG.md", "\n## 0.1.0 (2026-01-01)\n", "")
        repository.add_fragment(name, "feature")
    repository.commit()
    assert {one["state"] for one in repository.status().values()} == {"first"}
    repository.release("bump")
    assert {one["state"] for one in repository.status().values()} == {"bumped"}
    assert {one["version"] for one in repository.status().values()} == {"0.1.0"}
    for name in NAMES:
        assert "## 0.1.0 (" in (repository.member(name) / "CHANGELOG.md").read_text()
        assert not list((repository.member(name) / "changelog.d").glob("*.md"))


def remove_a_parameter(repository):
    module = repository.source("trl-redirect").parent / "redirection.py"
    text = module.read_text()
    start = text.index(SIGNATURE)
    end = text.index("->", start)
    lines = [line for line in text[start:end].splitlines() if "**" not in line]
    module.write_text(text[:start] + "\n".join(lines) + text[end:])


def add_a_name(repository):
    source = repository.source("trl-redirect")
    repository.edit(source, "__all__ = [", 'extra = 1\n\n__all__ = [\n    "extra",')


def add_a_parameter(repository):
    module = repository.source("trl-zero3").parent / "hooks.py"
    old = "def remove_hooks(model: nn.Module)"
    repository.edit(module, old, old[:-1] + ", quiet: bool = True)")


def remove_a_name(repository):
    source = repository.source("trl-zero3")
    repository.edit(source, '    "gather_cost",\n', "")


def change_a_private_function(repository):
    module = repository.source("trl-chatformat").parent / "vocabulary.py"
    repository.edit(module, "def get_highest_id(tokenizer: Any)", "def get_highest_id(other: Any)")


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        (remove_a_parameter, "trl-redirect", "breaking"),
        (remove_a_name, "trl-zero3", "breaking"),
        (add_a_name, "trl-redirect", "feature"),
        (add_a_parameter, "trl-zero3", "feature"),
        (change_a_private_function, "trl-chatformat", "none"),
    ],
)
def test_the_api_sets_a_floor(repository, change, name, level):
    change(repository)
    assert "has no changelog fragment" in repository.refuse("status")
    repository.add_fragment(name, "fix")
    if level == "none":
        assert repository.status()[name]["level"] == "fix"
        assert repository.status()[name]["problem"] is None
        return
    repository.commit()
    for command in ("status", "plan", "bump"):
        refused = repository.refuse(command)
        assert (
            f"{name}'s fragments say fix, but its API's difference from 0.1.0 is {level}" in refused
        )
    (found,) = repository.status()[name]["differences"]
    assert found in refused
    repository.add_fragment(name, level)
    assert repository.status()[name]["problem"] is None
    assert repository.status()[name]["level"] == level


def test_a_break_moves_its_dependents_in_one_commit(repository):
    remove_a_name(repository)
    repository.add_fragment("trl-zero3", "breaking", "`gather_cost` is gone.")
    repository.commit()
    before = repository.git("rev-parse", "HEAD")
    planned = repository.release("plan")
    assert [line for line in planned.splitlines() if not line.startswith(" ")] == [
        "trl-zero3 0.1.0 -> 0.2.0 (breaking)",
        "trl-prepare 0.1.0 -> 0.1.1 (fix)",
        "trl-models 0.1.0 -> 0.2.0 (breaking)",
    ]
    assert repository.release("bump") == planned
    assert repository.git("rev-parse", "HEAD^") == before
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("log", "-1", "--format=%s") == (
        "Release trl-zero3 0.2.0, trl-prepare 0.1.1, trl-models 0.2.0"
    )
    changed = repository.git("diff", "--name-only", "HEAD^").splitlines()
    assert {path.split("/")[1] for path in changed} == {"trl-zero3", "trl-prepare", "trl-models"}
    for name in ("trl-prepare", "trl-models"):
        manifest = (repository.member(name) / "pyproject.toml").read_text()
        assert '"trl-zero3>=0.2,<0.3"' in manifest
        assert (
            "It requires `trl-zero3>=0.2,<0.3`."
            in (repository.member(name) / "CHANGELOG.md").read_text()
        )
    changelog = (repository.member("trl-zero3") / "CHANGELOG.md").read_text()
    assert changelog.index("## 0.2.0 (") < changelog.index("`gather_cost` is gone.")
    assert changelog.index("`gather_cost` is gone.") < changelog.index("## 0.1.0 (")
    # Comments and order stay: only the lines that had to change did.
    lines = repository.git(
        "diff", "HEAD^", "--unified=0", "--", "packages/trl-models/pyproject.toml"
    )
    assert sorted(line for line in lines.splitlines() if line[:2] in ("+v", "-v", "+ ", "- ")) == [
        '+    "trl-zero3>=0.2,<0.3",',
        '+version = "0.2.0"',
        '-    "trl-zero3>=0.1,<0.2",',
        '-version = "0.1.0"',
    ]
    states = {name: one["state"] for name, one in repository.status().items()}
    assert {name for name, state in states.items() if state == "bumped"} == {
        *("trl-zero3", "trl-prepare", "trl-models"),
    }
    assert repository.release("plan") == "Nothing moves.\n"
    repository.add_fragment("trl-prepare", "fix")
    assert "trl-prepare 0.1.1 has new fragments" in repository.refuse("plan")


def test_changes_that_no_commit_has_are_refused(repository):
    repository.add_fragment("trl-redirect", "fix")
    before = repository.snapshot()
    assert "commit them first" in first_line_of(repository.refuse("bump"))
    assert "commit them first" in first_line_of(repository.refuse("check", "trl-redirect"))
    assert repository.snapshot() == before


@pytest.mark.parametrize("hook", ["pre-commit", "reference-transaction"])
def test_a_bump_that_fails_changes_nothing(repository, hook):
    remove_a_name(repository)
    repository.add_fragment("trl-zero3", "breaking")
    repository.commit()
    before = repository.snapshot()
    script = repository.folder / ".git" / "hooks" / hook
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert "git commit" in repository.refuse("bump")
    script.unlink()
    assert repository.snapshot() == before
    assert repository.git("status", "--porcelain") == ""
    repository.release("bump")


def test_tags_of_other_branches_and_of_no_version_do_not_count(repository):
    repository.git("tag", "trl-redirect-vnext")
    repository.git("switch", "--quiet", "--create", "other")
    repository.git("commit", "--quiet", "--allow-empty", "--message", "Elsewhere")
    repository.git("tag", "trl-redirect-v0.9.0")
    repository.git("switch", "--quiet", "main")
    assert repository.status()["trl-redirect"]["released"] == "0.1.0"


@pytest.mark.parametrize(
    ("path", "affected"),
    [
        ("packages/trl-zero3/tests/test_x.py", {"trl-zero3", "trl-prepare", "trl-models"}),
        ("packages/trl-chatformat/README.md", {"trl-chatformat", "trl-models"}),
        ("packages/trl-models/examples/ppo.py", {"trl-models"}),
        ("README.md", set()),
        ("tools/rails/ranks.py", set(NAMES)),
        ("hatch.toml", set(NAMES)),
        ("tests/distributed/test_x.py", set(NAMES)),
    ],
)
def test_a_change_affects_its_package_and_those_that_need_it(repository, path, affected):
    base = repository.git("rev-parse", "HEAD")
    file = repository.folder / path
    file.write_text((file.read_text() if file.exists() else "") + "\n")
    repository.commit()
    assert set(json.loads(repository.release("affected", base))) == affected


def test_an_unknown_package_is_refused(repository):
    process = repository.start("check", "trl-redirekt")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "There is no trl-redirekt: choose of" in output
