"""Versions, ranges and changelogs of the next release, in one commit."""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.rails.environments import hatch_command
from tools.release.commands import ReleaseError, git, refuse_changes, run
from tools.release.members import Member
from tools.release.planning import Move
from tools.release.versions import Level, rewrite


def bump(root: Path, moves: list[Move]) -> None:
    """Write what a plan says, and commit it; if anything fails, all is as it was.

    Raises:
        ReleaseError: The working tree has changes, nothing moves, or a program failed.
    """
    refuse_changes(root)
    if not moves:
        raise ReleaseError("Nothing moves: no package changed since its last release.")
    title = "Release " + ", ".join(f"{move.name} {move.version}" for move in moves)
    reasons = [f"{move.name}: {reason}" for move in moves for reason in move.reasons]
    try:
        for move in moves:
            _write(move)
        git(root, "add", "--all", "--", "packages")
        git(root, "commit", "--quiet", "--message", "\n".join([title, "", *reasons]))
    except BaseException:
        git(root, "restore", "--staged", "--worktree", "--", "packages")
        git(root, "clean", "--quiet", "-d", "--force", "--", "packages")
        raise
    # The metadata of members that are installed to be edited has the old versions.
    environments = tomllib.loads((root / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    for name in (name for name, settings in environments.items() if "workspace" in settings):
        run([hatch_command(), "env", "remove", name], root)


def _write(move: Move) -> None:
    member = move.status.member
    rewrite(member.folder / "pyproject.toml", move.ranges)
    for text in move.ranges.values():
        kind = "breaking" if move.level == Level.BREAKING else "fix"
        fragment = member.folder / "changelog.d" / f"requires-{Requirement(text).name}.{kind}.md"
        fragment.write_text(f"It requires `{text}`.\n", encoding="utf-8")
    if move.version != member.version:
        run([hatch_command(), "version", str(move.version)], member.folder)
    write_changelog(member, str(move.version))


def write_changelog(member: Member, version: str) -> None:
    """Turn a package's fragments into the section of a version in its changelog."""
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", version]
    run(command, member.folder)
