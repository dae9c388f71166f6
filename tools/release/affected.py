"""Which packages a change can break."""

from pathlib import Path

from tools.release.commands import git
from tools.release.members import Member

# What no package's behaviour depends on.
NO_CODE = (".md", "LICENSE", "NOTICE")


def find_affected(root: Path, members: dict[str, Member], base: str) -> list[str]:
    """List the packages to test after a change: those with changed files, and their dependents.

    Args:
        root: The repository.
        members: All packages, each after those that it needs.
        base: The commit to compare HEAD with, from where the two parted.

    Returns:
        Their names, in order; all, where something changed that they share.
    """
    found: set[str] = set()
    for path in git(root, "diff", "--name-only", f"{base}...HEAD").splitlines():
        top, *rest = path.split("/")
        if top == "packages" and rest[0] in members:
            found.add(rest[0])
        elif not path.endswith(NO_CODE):
            found.update(members)
    for name, member in members.items():
        if found.intersection(member.needs):
            found.add(name)
    return [name for name in members if name in found]
