"""Distributions built from a commit, and proof that they don't depend on where or when."""

import hashlib
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.release.commands import ReleaseError, export, run
from tools.release.members import Member

# Builders who share nothing but the commit: folder, umask, the files' age, and the environment.
BUILDERS = (
    ("a", 0o022, 1_000_000_000, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
    ("b c/d", 0o077, 1_700_000_001, {"TZ": "Asia/Kolkata", "LC_ALL": "C.UTF-8"}),
)


def build(root: Path, member: Member, out: Path) -> tuple[Path, Path]:
    """Build a member's wheel and sdist from the last commit: twice, and the wheel a third time.

    Returns:
        The wheel and the sdist, in `out`.

    Raises:
        ReleaseError: The second build, or a wheel built from the sdist, has other bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        builds = []
        for number, (place, umask, age, environment) in enumerate(BUILDERS):
            source = folder / place
            _check_out(root, member, source, umask, age)
            builds.append(_build(source, folder / f"built-{number}", umask, environment))
        sdist = next(file for file in builds[0] if file.name.endswith(".tar.gz"))
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
        builds.append(_build(source, folder / "again", 0o022, {}, "--target", "wheel"))
        for file in (file for other in builds[1:] for file in other):
            if digest(file) != digest(folder / "built-0" / file.name):
                raise ReleaseError(
                    f"{file.name} has other bytes when it is built in another folder, with another "
                    "umask, clock or locale, or from the sdist: find out what it takes from there."
                )
        wheel, sdist = (file.replace(out / file.name) for file in builds[0])
        return wheel, sdist


def digest(file: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_out(root: Path, member: Member, source: Path, umask: int, age: int) -> None:
    source.parent.mkdir(exist_ok=True)
    export(root, f"HEAD:{member.folder.relative_to(root)}", source)
    for path in source.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.utime(path, (age, age))


def _build(
    source: Path, out: Path, umask: int, environment: dict[str, str], *options: str
) -> list[Path]:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out), *options]
    run(command, source, env=environment, umask=umask)
    return sorted(out.iterdir())
