"""Find the interpreter of a hatch environment, making the environment where it is missing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def hatch_command() -> str:
    """Return where hatch is.

    Raises:
        RuntimeError: It is not on the path.
    """
    hatch = shutil.which("hatch")
    if hatch is None:
        raise RuntimeError("hatch is not on the path: python3 -m pip install hatch")
    return hatch


@functools.cache
def hatch_environment(name: str) -> tuple[str, dict[str, str]]:
    """Return the interpreter and the environment variables of one of hatch.toml's environments.

    Raises:
        RuntimeError: hatch is not on the path, or could not make the environment.
    """
    ask = "import json, os, sys; print(json.dumps([sys.executable, dict(os.environ)]))"
    # The caller's own environment is active: without this its variables would leak into the other.
    outer = {k: v for k, v in os.environ.items() if k not in ("HATCH_ENV_ACTIVE", "VIRTUAL_ENV")}
    done = subprocess.run(
        [hatch_command(), "-e", name, "run", "python", "-c", ask],
        cwd=ROOT,
        env=outer,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    if done.returncode != 0:
        raise RuntimeError(f"hatch could not make the environment {name!r}:\n{done.stderr[-3000:]}")
    executable, variables = json.loads(done.stdout.strip().splitlines()[-1])
    return executable, variables
