"""Other programs, run in a clean environment."""

import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# hatch's own variables would make an inner hatch work on the outer one's environment.
HIDDEN = ("HATCH_ENV_ACTIVE", "PIP_CONSTRAINT", "PYTHONPATH", "SOURCE_DATE_EPOCH", "VIRTUAL_ENV")


class ReleaseError(Exception):
    """Something must be done before the release can go on; the message says what."""


def run(
    command: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None, umask: int = -1
) -> str:
    """Run a program and return what it printed; if it fails, raise a ReleaseError with that."""
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment = kept | dict(env or {})
    done = subprocess.run(
        command, cwd=cwd, env=environment, umask=umask, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        output = f"{done.stdout}\n{done.stderr}".strip()
        raise ReleaseError(f"`{' '.join(command)}` failed:\n{output[-4000:]}")
    return done.stdout


def git(root: Path, *arguments: str) -> str:
    """Run git in a repository and return what it printed, without the end of the last line."""
    return run(["git", *arguments], root).rstrip("\n")


def export(root: Path, tree: str, folder: Path) -> None:
    """Write the files of a tree, such as `HEAD:packages`, into a new folder."""
    archive = folder.with_name(f"{folder.name}.tar")
    git(root, "archive", "--output", str(archive), tree)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()


def refuse_changes(root: Path, *paths: str) -> None:
    """Raise a ReleaseError where the working tree differs from the last commit."""
    changes = git(root, "status", "--porcelain", "--", *paths)
    if changes:
        raise ReleaseError(f"There are changes that no commit has: commit them first.\n{changes}")
