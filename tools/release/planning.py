"""Which packages the next release moves, and where to."""

from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.version import Version

from tools.release.commands import ReleaseError
from tools.release.status import Status
from tools.release.versions import Level, admits, raise_version, require


@dataclass
class Move:
    """A package that the next release moves.

    Args:
        status: Where it stands.
        version: The version that it gets.
        level: How much that means to its users.
        reasons: Why it moves.
        ranges: New requirements on siblings, by those that they replace.
    """

    status: Status
    version: Version
    level: Level
    reasons: list[str] = field(default_factory=list)
    ranges: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.status.member.name


def make_plan(statuses: dict[str, Status]) -> list[Move]:
    """Decide which packages move: those that changed, and those whose ranges then exclude one.

    Args:
        statuses: All packages, each after those that it needs.

    Returns:
        The moves, in the order in which they must be published.

    Raises:
        ReleaseError: A package has a problem that must be put right first.
    """
    problems = [status.problem for status in statuses.values() if status.problem]
    if problems:
        raise ReleaseError("\n".join(problems))
    versions = {name: status.member.version for name, status in statuses.items()}
    moves: dict[str, Move] = {}
    for name, status in statuses.items():
        member = status.member
        move = Move(status, member.version, status.level)
        if status.state == "first":
            move.reasons.append("first release")
        elif status.state == "changed":
            move.reasons += [*sorted(status.fragments), *status.differences]
        for text in member.siblings:
            sibling = Requirement(text).name
            if not admits(text, versions[sibling]):
                move.ranges[text] = require(text, versions[sibling])
                move.reasons.append(f"{text} excludes {versions[sibling]}")
        if not move.reasons:
            continue
        if status.state == "bumped":
            raise ReleaseError(f"{name} {member.version}: {move.reasons[0]}. Publish it first.")
        if move.ranges:
            move.level = max(move.level, Level.FIX)
        if member.reexports:
            # What breaks its siblings' names breaks its own, which its source doesn't show.
            move.level = max([move.level, *(moves[n].level for n in member.needs if n in moves)])
        if status.released is not None:
            move.version = raise_version(status.released, move.level)
        moves[name] = move
        versions[name] = move.version
    return list(moves.values())
