"""Where each package stands: its last release, and what has come since."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tools.release.api import compare_api
from tools.release.commands import git
from tools.release.members import Member
from tools.release.versions import FRAGMENT_LEVELS, Level

SHIPPED = ("src", "pyproject.toml", "README.md", "LICENSE")


@dataclass
class Status:
    """Where a package stands.

    Args:
        member: The package.
        released: The version of its last tag; None before the first.
        shipped: Files that users get and that differ from that release.
        fragments: The levels of its changelog fragments by their names.
        api: The level that its API's differences call for.
        differences: Those differences, a line each.
        heading: The version on top of its changelog, if any.
    """

    member: Member
    released: Version | None = None
    shipped: list[str] = field(default_factory=list)
    fragments: dict[str, Level] = field(default_factory=dict)
    api: Level = Level.NONE
    differences: list[str] = field(default_factory=list)
    heading: str | None = None

    @property
    def level(self) -> Level:
        """What the next release must be at least."""
        return max([self.api, *self.fragments.values()])

    @property
    def state(self) -> str:
        """One of "first", "bumped" (and not tagged yet), "changed" and "unchanged"."""
        if self.heading == str(self.member.version) and self.released != self.member.version:
            return "bumped"
        if self.released is None:
            return "first"
        return "changed" if self.shipped or self.fragments else "unchanged"

    @property
    def problem(self) -> str | None:
        """What must be put right before a release, if anything."""
        name, version = self.member.name, self.member.version
        if self.state == "bumped":
            if self.fragments:
                return f"{name} {version} has new fragments and is not released: publish it first."
            return None
        if self.released is None:
            return None
        if version != self.released:
            return (
                f"{name}'s manifest says {version}, and its last release is {self.released}: "
                "leave versions to `bump`."
            )
        if self.shipped and not self.fragments:
            return f"{name} changed since {version} and has no changelog fragment: add one."
        written = max(self.fragments.values(), default=Level.NONE)
        if written < self.api:
            return "\n    ".join(
                [
                    f"{name}'s fragments say {written.name.lower()}, but its API's difference from "
                    f"{version} is {self.api.name.lower()}: name a fragment for that, or undo it.",
                    *self.differences,
                ]
            )
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        texts = {"name": self.member.name, "version": str(self.member.version)}
        released = None if self.released is None else str(self.released)
        weights = {"level": self.level.name.lower(), "fragments": sorted(self.fragments)}
        names = ("state", "shipped", "differences", "problem")
        found = {name: getattr(self, name) for name in names}
        return {**texts, "released": released, **weights, **found}


def read_status(root: Path, member: Member) -> Status:
    """Find out where a package stands, from its manifest, its tags and its changelog alone."""
    status = Status(member, _find_last_release(root, member.name))
    status.heading = read_heading(member)
    for file in (member.folder / "changelog.d").glob("*.md"):
        kind = file.name.split(".")[-2]
        if kind in FRAGMENT_LEVELS:
            status.fragments[file.name] = FRAGMENT_LEVELS[kind]
    if status.released is not None:
        tag = f"{member.name}-v{status.released}"
        folder = member.folder.relative_to(root)
        paths = [str(folder / name) for name in SHIPPED]
        changed = git(root, "diff", "--name-only", tag, "--", *paths)
        changed += "\n" + git(root, "ls-files", "--others", "--exclude-standard", "--", *paths)
        status.shipped = sorted(path.removeprefix(f"{folder}/") for path in changed.split())
        if any(path.startswith("src/") for path in status.shipped):
            status.api, status.differences = compare_api(root, member, tag)
    return status


def _find_last_release(root: Path, name: str) -> Version | None:
    found = []
    for tag in git(root, "tag", "--merged", "HEAD", "--list", f"{name}-v*").split():
        try:
            found.append(Version(tag.removeprefix(f"{name}-v")))
        except InvalidVersion:
            continue
    return max(found, default=None)


def read_heading(member: Member) -> str | None:
    """Return the version that a package's changelog has on top, if it has any."""
    text = (member.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## (\S+)", text, re.MULTILINE)
    return found[1] if found else None
