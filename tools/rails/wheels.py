"""Install this repository's wheels in fresh venvs, as a user would, and test them there."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.rails.environments import ROOT, hatch_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANY_TORCH = ROOT / "tools" / "constraints.txt"
CONSTRAINTS = ROOT / "tools" / "constraints-default.txt"


def members() -> list[str]:
    """Return the names of all distributions of this repository."""
    return sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))


def project_table(distribution: str) -> dict[str, Any]:
    """Return the `[project]` table of a member."""
    text = (ROOT / "packages" / distribution / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]


def extras(distribution: str) -> list[str]:
    """Return the names of a member's extras."""
    return list(project_table(distribution).get("optional-dependencies", {}))


def closure(distribution: str) -> set[str]:
    """Return a member and those that it needs."""
    found = {distribution}
    for text in project_table(distribution)["dependencies"]:
        name = re.split(r"[^a-z0-9-]", text)[0]
        if name in members():
            found |= closure(name)
    return found


@functools.cache
def build_wheels() -> dict[str, Path]:
    """Build every member's wheel once a process, and return the wheels by distribution."""
    folder = Path(tempfile.mkdtemp(prefix="wheels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _run([hatch_command(), "build", "--all", "--target", "wheel", str(folder)], cwd=ROOT)
    wheels = {}
    for distribution in members():
        (wheel,) = folder.glob(f"{distribution.replace('-', '_')}-*.whl")
        wheels[distribution] = wheel
    return wheels


@dataclass
class WheelVenv:
    """A fresh venv with one member's wheel, out of reach of the sources.

    Args:
        folder: Where the venv is.
        distribution: The member.
        wheels: Its wheel and those of the members that it needs, by distribution.
        floor: Versions to install, as pip's constraints; the environment default's if empty.
    """

    folder: Path
    distribution: str
    wheels: Mapping[str, Path]
    floor: Iterable[str] = ()

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def install(self, *, extras: Iterable[str] = (), others: Iterable[str] = ()) -> None:
        """Install the wheel with these extras, and other requirements beside it."""
        names = {self.distribution: f"[{','.join(extras)}]"}
        # By their files: a range would let in what an index has under a sibling's name.
        needed = [
            f"{name}{names.get(name, '')} @ {self.wheels[name].as_uri()}"
            for name in closure(self.distribution)
        ]
        # Most files of torch are never imported here, so none is compiled ahead.
        pip = [str(self.python), "-m", "pip", "install", "-q", "--no-compile"]
        _run(
            [*pip, *needed, *others],
            cwd=self.folder,
            env=_clean_environment() | {"PIP_CONSTRAINT": self._constraints().as_uri()},
        )

    def _constraints(self) -> Path:
        if not self.floor:
            return CONSTRAINTS
        file = self.folder / "constraints.txt"
        # torch is the one that every environment has: see hatch.toml.
        lines = [line for line in self.floor if not line.startswith("torch==")]
        file.write_text("\n".join([*lines, ANY_TORCH.read_text()]))
        return file

    def run(self, code: str) -> Any:
        """Run code there, which assigns `answer`, and return that through JSON."""
        code += "\nimport json as _json\nprint()\nprint(_json.dumps(answer))"
        return json.loads(self._python("-c", code).splitlines()[-1])

    def run_own_tests(self) -> str:
        """Run the package's tests and doctests, copied out of the tree, and return the report."""
        tests = ROOT / "packages" / self.distribution / "tests"
        copied = self.folder / "tests"
        shutil.copytree(tests, copied, ignore=shutil.ignore_patterns("__pycache__"))
        return self._python(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
            *("--doctest-modules", str(copied)),
            *("--pyargs", self.distribution.replace("-", "_")),
        )

    def _python(self, *arguments: str) -> str:
        return _run([str(self.python), *arguments], cwd=self.folder)


def fresh_venv(
    folder: Path,
    distribution: str,
    wheels: Mapping[str, Path] | None = None,
    floor: Iterable[str] = (),
) -> WheelVenv:
    """Make a venv in this folder, with a member's wheel and its hard dependencies alone.

    The wheels are this repository's, built now, unless others are given.
    """
    venv = WheelVenv(folder, distribution, wheels or build_wheels(), floor)
    _run([sys.executable, "-m", "venv", str(folder / "venv")], cwd=folder)
    venv.install()
    return venv


def _clean_environment() -> dict[str, str]:
    # hatch's own variables would make it work on the caller's environment.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "HATCH_ENV_ACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HF_HUB_OFFLINE": "1"}


def _run(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_clean_environment() if env is None else env,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    if done.returncode != 0:
        output = f"{done.stdout}\n{done.stderr}"
        raise AssertionError(f"{' '.join(command[:6])} ... failed:\n{output[-6000:]}")
    return done.stdout
