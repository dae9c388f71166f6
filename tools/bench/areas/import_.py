"""What one pays to install and import a package alone, beside TRL.

Each package is imported alone by a fresh interpreter whose path holds nothing but the standard
library, the package and the distributions that it declares, with theirs (no extras), linked from
the environments `default`, `peer-new` (TRL 1.16.0) and `peer-old`. The peer is TRL's import of the
same function; for trl-valuehead that is TRL 0.18.2's, since TRL 1.16 has no value heads.
CPU seconds count user and system time from the interpreter's start to the end of the import, and
their limit, like that of the modules, is an interpreter that imports nothing. Megabytes (1e6 bytes)
are the files that those distributions record, without bytecode and without Python and pip; torch is
its CPU build here, and a CUDA build adds gigabytes to both sides.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.bench.measures import Measure, alternate
from tools.rails.environments import ROOT, hatch_environment

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
IMPORT = """
import resource, sys
sys.path.append({view!r})
{statement}
used = resource.getrusage(resource.RUSAGE_SELF)
print()
print([used.ru_utime + used.ru_stime, len(sys.modules)])
"""


@dataclass(frozen=True)
class Package:
    """A distribution as one environment holds it, and the import that does the job."""

    distribution: str
    statement: str
    environment: str | None = None

    @functools.cached_property
    def python(self) -> str:
        return hatch_environment(self.environment)[0] if self.environment else sys.executable

    @functools.cached_property
    def alone(self) -> dict[str, Distribution]:
        """The distribution and all that it requires, by name."""
        known = {
            canonicalize_name(found.name): found
            for found in Distribution.discover(path=[_site_packages(self.python)])
        }
        alone: dict[str, Distribution] = {}
        wanted = [Requirement(self.distribution)]
        seen = set()
        while wanted:
            requirement = wanted.pop()
            name = canonicalize_name(requirement.name)
            for extra in ("", *requirement.extras):
                if (name, extra) in seen:
                    continue
                seen.add((name, extra))
                alone[name] = known[name]
                for text in known[name].requires or ():
                    needed = Requirement(text)
                    if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                        wanted.append(needed)
        return alone

    def files(self) -> list[Path]:
        """Return all installed files of the distribution and of what it requires."""
        files = []
        for name, distribution in self.alone.items():
            files += [Path(str(file.locate())) for file in distribution.files or ()]
            source = ROOT / "packages" / name / "src"
            files += [file for file in source.rglob("*") if file.is_file()]
        return [file for file in files if file.suffix not in (".pyc", ".pth")]

    def megabytes(self) -> float:
        return sum(file.stat().st_size for file in self.files() if file.exists()) / 1e6

    def link_into(self, view: Path) -> None:
        """Make a folder from which these distributions, and no others, can be imported."""
        for name, distribution in self.alone.items():
            site = Path(str(distribution.locate_file("")))
            tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            targets = [site / top for top in tops]
            targets += (ROOT / "packages" / name / "src").glob("*")
            for target in targets:
                link = view / target.name
                if not link.exists():
                    link.symlink_to(target)

    def run(self, view: Path, statement: str | None = None) -> dict[str, float]:
        code = IMPORT.format(view=str(view), statement=statement or self.statement)
        done = subprocess.run(
            [self.python, "-I", "-S", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.statement}, alone, failed:\n{done.stderr[-2000:]}")
        seconds, modules = json.loads(done.stdout.splitlines()[-1])
        return {"seconds": seconds, "modules": modules}


def _site_packages(python: str) -> str:
    base = str(Path(python).parents[1])
    return sysconfig.get_path("purelib", vars={"base": base, "platbase": base})


def compare(package: Package, peer: Package) -> list[Measure]:
    """Measure a package beside a peer, taking turns, with a bare interpreter as the limit."""
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        package.link_into(Path(ours))
        peer.link_into(Path(theirs))
        found = alternate(
            {
                "limit": lambda: package.run(Path(ours), "pass"),
                "ours": lambda: package.run(Path(ours)),
                "peer": lambda: peer.run(Path(theirs)),
            },
            rounds=ROUNDS,
        )
    rows = {"import, CPU time": ("s", "seconds"), "modules loaded": ("modules", "modules")}
    measures = [
        Measure(name, unit, found["ours"][key], found["peer"][key], found["limit"][key])
        for name, (unit, key) in rows.items()
    ]
    return [*measures, Measure("installed", "MB", package.megabytes(), peer.megabytes())]


def _case(
    distribution: str, statement: str, peer: str, environment: str = "peer-new"
) -> Callable[[str], list[Measure]]:
    def measure(device: str) -> list[Measure]:
        return compare(Package(distribution, statement), Package("trl", peer, environment))

    return measure


CASES = {
    "trl-chatformat": _case(
        "trl-chatformat",
        "from trl_chatformat import setup_chat_format",
        "from trl import clone_chat_template",
    ),
    "trl-zero3": _case(
        "trl-zero3",
        "from trl_zero3 import unwrap_model_for_generation",
        "from trl.models import unwrap_model_for_generation",
    ),
    "trl-prepare": _case(
        "trl-prepare",
        "from trl_prepare import create_reference_model, prepare_deepspeed",
        "from trl.models import create_reference_model, prepare_deepspeed",
    ),
    "trl-redirect": _case(
        "trl-redirect",
        "from trl_redirect import ForwardRedirection",
        "from trl.models.utils import _ForwardRedirection",
    ),
    "trl-valuehead": _case(
        "trl-valuehead",
        "from trl_valuehead import AutoModelForCausalLMWithValueHead",
        "from trl import AutoModelForCausalLMWithValueHead",
        "peer-old",
    ),
    "trl-models": _case("trl-models", "import trl_models", "import trl"),
}
