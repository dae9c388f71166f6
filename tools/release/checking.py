"""Proof that what users would install is what was tested."""

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from tools.rails.wheels import closure, extras, fresh_venv
from tools.release.building import build, digest
from tools.release.commands import ReleaseError, git, refuse_changes, run
from tools.release.members import Member
from tools.release.status import read_heading
from tools.release.versions import pin_lowest


def check(root: Path, members: dict[str, Member], name: str, say: Callable[[str], None]) -> None:
    """Build a member into `dist/`, examine and test what was built, and record its hashes.

    Raises:
        ReleaseError: Something is not as users need it; there is no record then.
    """
    refuse_changes(root, "packages")
    member = members[name]
    record_file(root, member).unlink(missing_ok=True)
    _run_tool("validate_pyproject", member.folder / "pyproject.toml")
    if read_heading(member) not in (None, str(member.version)):
        raise ReleaseError(
            f"{name}'s version is {member.version}, and its changelog's newest heading "
            f"{read_heading(member)}: leave both to `bump`."
        )
    wheel, sdist = build(root, member, root / "dist")
    say(f"{name} {member.version}: three builds have equal hashes")
    _run_tool("twine", "check", "--strict", wheel, sdist)
    _run_tool("check_wheel_contents", wheel)
    _check_contents(root, member, wheel)
    say(f"{name} {member.version}: metadata and contents are right")
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        wheels = {name: wheel}
        for other in closure(name) - {name}:
            wheels[other], _ = build(root, members[other], Path(folder) / "siblings")
        for title, floor in (("newest", []), ("lowest", _find_lowest(wheels))):
            report = _test_alone(member, wheels, Path(folder) / title, floor)
            say(f"{name} {member.version}: alone, with the {title} versions: {report}")
    write_record(root, member, [wheel, sdist])


def record_file(root: Path, member: Member) -> Path:
    """Return where the hashes of a member's checked files are recorded."""
    return root / "dist" / f"{member.name}-{member.version}.json"


def write_record(root: Path, member: Member, files: Iterable[Path]) -> None:
    """Record which files were checked, and the tree that they were built from."""
    record = {"tree": tree_of(root, member), "files": {f.name: digest(f) for f in files}}
    partial = record_file(root, member).with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(record_file(root, member))


def tree_of(root: Path, member: Member) -> str:
    """Return git's name for a member's folder as it is in the last commit."""
    return git(root, "rev-parse", f"HEAD:{member.folder.relative_to(root)}")


def _run_tool(module: str, *arguments: Any) -> None:
    run([sys.executable, "-m", module, *map(str, arguments)], Path.cwd())


def _check_contents(root: Path, member: Member, wheel: Path) -> None:
    info = f"{member.module}-{member.version}.dist-info"
    licence = f"{info}/licenses/LICENSE"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        missing = {f"{member.module}/py.typed", licence} - set(names)
        strangers = {name.split("/")[0] for name in names} - {member.module, info}
        strangers |= {name for name in names if "test" in name}
        if missing or strangers:
            raise ReleaseError(
                f"{wheel.name} lacks {sorted(missing)} and holds {sorted(strangers)}: its module, "
                "its types and its licence were expected, and nothing else."
            )
        if archive.read(licence) != (root / "LICENSE").read_bytes():
            raise ReleaseError(f"{wheel.name}'s LICENSE differs from the repository's: copy that.")


def _find_lowest(wheels: dict[str, Path]) -> list[str]:
    found = set()
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            file = next(name for name in archive.namelist() if name.endswith("/METADATA"))
            metadata = Metadata.from_email(archive.read(file), validate=False)
        for requirement in metadata.requires_dist or ():
            if requirement.name not in wheels:
                found.update(pin_lowest(requirement))
    return sorted(found)


def _test_alone(member: Member, wheels: dict[str, Path], folder: Path, floor: list[str]) -> str:
    folder.mkdir()
    try:
        venv = fresh_venv(folder, member.name, wheels, floor)
        venv.install(extras=extras(member.name), others=["pytest"])
        return venv.run_own_tests().splitlines()[-1]
    except AssertionError as failure:
        raise ReleaseError(str(failure)) from failure
