"""Run a function on every rank of a real engine and bring back what it returned.

The ranks stay up between calls, since starting them costs more than most tests: one group of
processes serves all tests of the same engine family, number of ranks and environment. A group in
which anything failed is ended and never used again.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.rails.environments import ROOT, hatch_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXAMPLES = ROOT / "packages" / "trl-models" / "examples"
WORKER = Path(__file__).with_name("rank_worker.py")
START_LIMIT = 540  # seconds; the first ZeRO run of an environment compiles a communication op
GRACE = 5  # seconds for the other ranks to report, once one has failed
GROUPS_KEPT = 3  # one process, and two ranks of each family; a rank holds most of a gigabyte


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


def run_on_ranks(
    function: Callable[..., Any],
    *,
    engine: str | None = "single",
    processes: int | None = None,
    time_limit: float = 300,
    mixed_precision: str = "no",
    environment: str | None = None,
    sources: Sequence[str] = (),
    device: str = "cpu",
    fresh: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Call a function on every rank of an engine.

    Args:
        function: A module-level function, called as `function(accelerator, **arguments)`; its file
            is imported again on every rank, so it must import there.
        engine: "single", "ddp", "zero2", "zero3", "fsdp1" or "fsdp2"; None calls
            `function(**arguments)` in one plain process.
        processes: The number of ranks; 1 for "single" and None, else 2.
        time_limit: Seconds until the ranks are ended and their stacks shown.
        mixed_precision: As accelerate takes it.
        environment: A hatch environment such as "peer-new"; the current one unless given.
        sources: Packages of this repository put on the path there ("trl-zero3", ...).
        device: "cpu", also where there is a GPU, or "cuda" for a GPU a rank, with NCCL.
        fresh: Start new processes, and end them afterwards.
        arguments: Picklable keyword arguments of the function.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: A rank raised, died, or the time limit passed.
    """
    if processes is None:
        processes = 1 if engine in (None, "single") else 2
    family = "zero" if engine is not None and engine.startswith("zero") else "torch"
    key = (family, processes, engine in (None, "single"), environment, tuple(sources), device)
    if fresh:
        _close(key)
    group = _groups.get(key)
    if group is None or not group.alive():
        _groups[key] = group = _Ranks(family, processes, key[2], environment, sources, device)
        while len(_groups) > GROUPS_KEPT:
            _close(next(iter(_groups)))
    _groups.move_to_end(key)
    task = {
        "file": inspect.getsourcefile(function),
        "function": function.__qualname__,
        "engine": engine,
        "mixed_precision": mixed_precision,
        "arguments": arguments,
    }
    try:
        return group.run(task, time_limit)
    except BaseException:
        _close(key)
        raise
    finally:
        if fresh:
            _close(key)


_groups: OrderedDict[tuple, _Ranks] = OrderedDict()


def _close(key: tuple) -> None:
    group = _groups.pop(key, None)
    if group is not None:
        group.close()


@atexit.register
def _close_all() -> None:
    for key in list(_groups):
        _close(key)


class _Ranks:
    def __init__(
        self,
        family: str,
        processes: int,
        alone: bool,
        environment: str | None,
        sources: Sequence[str],
        device: str,
    ) -> None:
        python, variables = sys.executable, dict(os.environ)
        if environment is not None:
            python, variables = hatch_environment(environment)
            variables = dict(variables)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        path = [ROOT, EXAMPLES, *(ROOT / "packages" / name / "src" for name in sources)]
        variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
        variables["HF_HUB_OFFLINE"] = "1"
        variables["OMP_NUM_THREADS"] = "1"
        variables["PYTHONFAULTHANDLER"] = "1"
        variables.pop("ACCELERATE_USE_DEEPSPEED", None)
        if family == "zero":
            variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        if device == "cpu":
            variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.processes = processes
        self.calls = 0
        command = [python, str(WORKER), str(self.folder), str(os.getpid())]
        if not alone:
            torchrun = [
                *("-m", "torch.distributed.run", f"--nproc-per-node={processes}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
                *("--rdzv-conf=timeout=60", "--max-restarts=0"),
            ]
            command[1:1] = torchrun
        self.log = self.folder / "log"
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                command,
                env=variables,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self.launcher.poll() is None

    def run(self, task: dict[str, Any], time_limit: float) -> list[Any]:
        number, self.calls = self.calls, self.calls + 1
        partial = self.folder / f"task{number}.partial"
        partial.write_bytes(pickle.dumps(task))
        partial.rename(self.folder / f"task{number}")
        answers = [self.folder / f"task{number}.rank{rank}" for rank in range(self.processes)]
        ready = [self.folder / f"rank{rank}.ready" for rank in range(self.processes)]
        self._wait(ready, START_LIMIT, "start")
        self._wait(answers, time_limit, task["function"])
        outcomes = [pickle.loads(answer.read_bytes()) for answer in answers if answer.exists()]
        failures = [outcome for outcome in outcomes if "error" in outcome]
        if failures:
            first = min(failures, key=lambda outcome: outcome["time"])
            silent = self.processes - len(outcomes)
            note = f"\n{silent} other rank(s) had not returned; ended." if silent else ""
            raise RankError(
                f"rank {first['rank']} raised on engine {task['engine']}:\n{first['error']}{note}"
            )
        return [outcome["value"] for outcome in outcomes]

    def _wait(self, files: list[Path], limit: float, what: str) -> None:
        deadline = time.monotonic() + limit
        failed_at = None
        while True:
            there = [file for file in files if file.exists()]
            if len(there) == len(files):
                return
            now = time.monotonic()
            if failed_at is None and any(_is_failure(file) for file in there):
                failed_at = now
            if failed_at is not None and now > failed_at + GRACE:
                return
            if not self.alive():
                raise RankError(f"the ranks ended during {what}:\n{self._tail()}")
            if now > deadline:
                raise RankError(
                    f"no answer from all ranks within {limit} s ({what}).\n"
                    f"{self._stacks()}\n{self._tail()}"
                )
            time.sleep(0.02)

    def _pids(self) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.folder.glob("rank*.pid"))]

    def _stacks(self) -> str:
        for pid in self._pids():
            _signal(pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = sorted(self.folder.glob("rank*.stacks"))
        return "\n".join(f"{file.stem}:\n{file.read_text()}" for file in files)

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        (self.folder / "stop").touch()
        try:
            self.launcher.wait(timeout=2)
        except subprocess.TimeoutExpired:
            # torchrun gives its ranks process groups of their own.
            for pid in [*self._pids(), self.launcher.pid]:
                _signal(pid, signal.SIGKILL)
            self.launcher.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_failure(answer: Path) -> bool:
    content = answer.read_bytes()
    return bool(content) and "error" in pickle.loads(content)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
