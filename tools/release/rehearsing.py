"""A release of one package from end to end: in a throw-away clone, to an index on loopback."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.rails.wheels import CONSTRAINTS, closure, extras
from tools.release.building import build
from tools.release.bumping import write_changelog
from tools.release.commands import ReleaseError, git, run
from tools.release.members import load_members
from tools.release.publishing import upload_files


def rehearse(root: Path, name: str, say: Callable[[str], None]) -> None:
    """Change a package in a clone of the last commit, and release it as a maintainer would.

    Raises:
        ReleaseError: A step failed, or users would not get what was published.
    """
    # The index on loopback asks for neither; twine does.
    os.environ |= {"TWINE_USERNAME": "x", "TWINE_PASSWORD": "x"}
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        url = stack.enter_context(serve(place / "index"))
        clone = place / "clone"
        git(root, "clone", "--quiet", "--no-tags", str(root), str(clone))
        git(clone, "config", "user.name", "Rehearsal")
        git(clone, "config", "user.email", "rehearsal@localhost")
        _release_everything(clone, place / "released", url)
        _change(clone / "packages" / name)
        where = ["--index", f"{url}simple/", "--upload", url]
        steps = [["status"], ["plan"], ["bump"], ["check", name]]
        for step in [*steps, ["publish", *where, "--dry-run"], ["publish", *where]]:
            say(f"$ release {' '.join(step)}")
            say(run([sys.executable, "-m", "tools.release", *step], clone).rstrip())
        version = str(load_members(clone)[name].version)
        if f"{name}-v{version}" not in git(clone, "tag").split():
            raise ReleaseError(f"{name} {version} was published and not tagged.")
        _use(name, version, clone, place / "user", f"{url}simple/")
        say(f"{name} {version}: installed by name, and its README's examples run")


def _release_everything(clone: Path, out: Path, url: str) -> None:
    """Make the clone a repository in which everything was released as it is."""
    members = load_members(clone).values()
    for member in members:
        write_changelog(member, str(member.version))
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "Release everything")
    for member in members:
        upload_files(build(clone, member, out), url)
        git(clone, "tag", f"{member.name}-v{member.version}")


def _change(folder: Path) -> None:
    with (folder / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\nThis was rehearsed.\n")
    (folder / "changelog.d" / "rehearsal.fix.md").write_text("This was rehearsed.\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A change")


def _use(name: str, version: str, clone: Path, user: Path, index: str) -> None:
    """Install a package by name from the index, and run its README's examples."""
    venv.create(user, with_pip=True)
    python, report = str(user / "bin" / "python"), user / "report.json"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    # From nowhere else: another index may have others under these names.
    alone = ["--no-deps", "--index-url", index, "--report", str(report)]
    run([*pip, *alone, *(closure(name) - {name}), f"{name}=={version}"], user)
    for entry in json.loads(report.read_text())["install"]:
        if not entry["download_info"]["url"].startswith(index.removesuffix("simple/")):
            raise ReleaseError(f"{entry['metadata']['name']} came from elsewhere.")
    constraints = {"PIP_CONSTRAINT": CONSTRAINTS.as_uri()}
    run([*pip, f"{name}[{','.join(extras(name))}]=={version}"], user, env=constraints)
    text = (clone / "packages" / name / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    run([python, "-c", "\n".join(examples)], user)


@contextlib.contextmanager
def serve(files: Path, python: str = sys.executable) -> Iterator[str]:
    """Run a package index of a folder's files on loopback, and yield its URL."""
    files.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = ["-i", "127.0.0.1", "-p", port, "-P", ".", "-a", ".", "--disable-fallback"]
    command = [python, "-m", "pypiserver", "run", *where, "--hash-algo", "sha256"]
    server = subprocess.Popen([*command, str(files)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/"):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()
