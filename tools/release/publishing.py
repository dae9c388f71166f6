"""Checked files, uploaded in order and tagged; a run that was cut short goes on where it was."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.release.building import digest
from tools.release.checking import record_file, tree_of
from tools.release.commands import ReleaseError, git, refuse_changes, run
from tools.release.members import Member
from tools.release.status import Status


def publish(
    root: Path,
    statuses: Iterable[Status],
    index: str,
    upload: str,
    say: Callable[[str], None],
    *,
    dry_run: bool = False,
) -> None:
    """Upload what was bumped and checked, in order, and tag each package after its files.

    Args:
        root: The repository.
        statuses: All packages, each after those that it needs.
        index: The simple index's URL, from which users install.
        upload: The URL to upload to; twine knows the credentials.
        say: Told about each step.
        dry_run: Look, and say what would be done.

    Raises:
        ReleaseError: A package's files aren't those that were checked, the index has others under
            their names, or an upload failed. What came before is done, and nothing after it.
    """
    refuse_changes(root, "packages")
    waiting = [status.member for status in statuses if status.state == "bumped"]
    if not waiting:
        raise ReleaseError("Nothing to publish: no package is bumped and not tagged yet.")
    # All are looked at before the first is uploaded.
    checked = [(member, _read_record(root, member)) for member in waiting]
    missing = [(member, _find_missing(root, member, files, index)) for member, files in checked]
    would = "would " if dry_run else ""
    for member, files in missing:
        for file in files:
            say(f"{would}upload {file.name}")
            if not dry_run:
                upload_files([file], upload)
        tag = f"{member.name}-v{member.version}"
        say(f"{would}tag {tag}")
        if not dry_run:
            git(root, "tag", tag)


def upload_files(files: Iterable[Path], url: str) -> None:
    """Upload files with twine."""
    command = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
    run([*command, "--repository-url", url, *map(str, files)], Path.cwd())


def _read_record(root: Path, member: Member) -> dict[str, str]:
    file = record_file(root, member)
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    files = record.get("files", {})
    found = {n: digest(root / "dist" / n) for n in files if (root / "dist" / n).is_file()}
    if record.get("tree") != tree_of(root, member) or found != files:
        raise ReleaseError(
            f"{member.name} {member.version} was not checked as it is now: run `check` on it."
        )
    return files


def _find_missing(root: Path, member: Member, files: dict[str, str], index: str) -> list[Path]:
    """List the files that the index lacks, the wheel last: it is what pip prefers."""
    there = _ask_index(member.name, index)
    for name, expected in files.items():
        if there.get(name, expected) != expected:
            raise ReleaseError(
                f"The index has another {name}, of hash {there[name]}, than was checked, of hash "
                f"{expected}: the version is taken, so raise it."
            )
    return [root / "dist" / name for name in sorted(files, reverse=True) if name not in there]


def _ask_index(name: str, index: str) -> dict[str, str | None]:
    from pypi_simple import NoSuchProjectError, PyPISimple
    from requests import RequestException

    with PyPISimple(index) as client:
        try:
            page = client.get_project_page(name)
        except NoSuchProjectError:
            return {}
        except RequestException as error:
            raise ReleaseError(f"The index {index} gave no answer: {error}") from error
    return {package.filename: package.digests.get("sha256") for package in page.packages}
