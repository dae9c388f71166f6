"""What changed in a package's public API since its last release."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.release.commands import export
from tools.release.members import Member
from tools.release.versions import Level


def compare_api(root: Path, member: Member, tag: str) -> tuple[Level, list[str]]:
    """Compare what a package's `__all__` reaches with how it was at a tag.

    Returns:
        The least level that the difference calls for, and what differs, a line each.
    """
    import griffe

    source = member.folder / "src"
    with tempfile.TemporaryDirectory(prefix="release-") as old:
        export(root, f"{tag}:{source.relative_to(root)}", Path(old) / "src")
        before = _face(griffe.load(member.module, search_paths=[Path(old) / "src"]))
    after = _face(griffe.load(member.module, search_paths=[source]))
    # griffe begins each line with a file, here one of the old sources' copy.
    broken = [b.explain().partition(": ")[2] for b in griffe.find_breaking_changes(before, after)]
    added = sorted(set(_paths(after)) - set(_paths(before)))
    level = Level.BREAKING if broken else Level.FEATURE if added else Level.NONE
    return level, [*broken, *(f"{path}: added" for path in added)]


def _face(package: Any) -> Any:
    """Make a module of just the names that users import from a package."""
    import griffe

    face = griffe.Module(package.name, filepath=package.filepath)
    face.exports = {str(name) for name in package.exports or ()}
    for name in sorted(face.exports):
        found = package.members.get(name)
        try:
            found = found.final_target if found is not None and found.is_alias else found
        except griffe.GriffeError:
            found = None  # of another package, which has an API of its own
        face.set_member(name, found or griffe.Attribute(name))
    return face


def _paths(face: Any) -> Iterator[str]:
    pending = [(name, face.members[name]) for name in face.exports]
    while pending:
        path, found = pending.pop()
        yield path
        if found.is_function:
            yield from (f"{path}({parameter.name})" for parameter in found.parameters)
        elif found.is_class:
            own = [(n, m) for n, m in found.members.items() if m.is_public and not m.is_alias]
            pending += [(f"{path}.{name}", member) for name, member in own]
