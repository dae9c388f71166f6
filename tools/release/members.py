"""The packages of the workspace: what they are, and what they need of each other."""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


@dataclass
class Member:
    """A package of the workspace.

    Args:
        name: The distribution's name.
        folder: Where it is.
        version: The version that its manifest has.
        siblings: Its requirements on other members, those of extras too, as they are written.
        reexports: Whether its API consists of its siblings'.
    """

    name: str
    folder: Path
    version: Version
    siblings: list[str]
    reexports: bool = False

    @cached_property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @cached_property
    def needs(self) -> list[str]:
        """The names of the members that it requires."""
        return sorted({Requirement(text).name for text in self.siblings})


def load_members(root: Path) -> dict[str, Member]:
    """Read all members, each after those that it needs."""
    files = sorted(root.glob("packages/*/pyproject.toml"))
    manifests = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    names = {manifest["project"]["name"] for manifest in manifests}
    members = {}
    for file, manifest in zip(files, manifests, strict=True):
        project = manifest["project"]
        lists = [
            project.get("dependencies", []),
            *project.get("optional-dependencies", {}).values(),
        ]
        siblings = [text for texts in lists for text in texts if Requirement(text).name in names]
        reexports = manifest["tool"].get("release", {}).get("reexports", False)
        version = Version(project["version"])
        members[project["name"]] = Member(
            project["name"], file.parent, version, siblings, reexports
        )
    graph = {name: member.needs for name, member in members.items()}
    return {name: members[name] for name in TopologicalSorter(graph).static_order()}
