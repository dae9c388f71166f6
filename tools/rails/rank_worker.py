"""One rank: waits for tasks in a folder, runs each, and writes down what came of it.

Runs under the interpreter of any environment, so it imports nothing of this repository but the
examples' engines.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib.util
import itertools
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

PROCESS_GROUP_LIMIT = datetime.timedelta(seconds=300)


def main(folder: Path, parent: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    stacks = (folder / f"rank{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        from deepspeed.accelerator import get_accelerator

        # The first time this compiles, for a minute: before any task's time limit runs.
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    if "RANK" in os.environ:
        import torch.distributed

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=PROCESS_GROUP_LIMIT)
    (folder / f"rank{rank}.ready").touch()
    for number in itertools.count():
        task = folder / f"task{number}"
        while not task.exists():
            if (folder / "stop").exists() or not _runs(parent):
                os._exit(0)
            time.sleep(0.02)
        outcome: dict[str, Any] = {"rank": rank}
        try:
            outcome["value"] = run(pickle.loads(task.read_bytes()))
            content = pickle.dumps(outcome)
        except BaseException:
            outcome = {"rank": rank, "error": traceback.format_exc(), "time": time.time()}
            content = pickle.dumps(outcome)
        partial = folder / f"partial.rank{rank}"
        partial.write_bytes(content)
        partial.rename(folder / f"task{number}.rank{rank}")


def run(task: dict[str, Any]) -> Any:
    import torch

    function: Any = load(Path(task["file"]))
    for part in task["function"].split("."):
        function = getattr(function, part)
    torch.manual_seed(0)
    if task["engine"] is None:
        return function(**task["arguments"])
    environment = dict(os.environ)
    try:
        from engines import make_accelerator

        accelerator = make_accelerator(task["engine"], mixed_precision=task["mixed_precision"])
        return function(accelerator, **task["arguments"])
    finally:
        os.environ.clear()
        os.environ.update(environment)
        forget_accelerator()


def forget_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def load(file: Path) -> ModuleType:
    name = f"on_ranks_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file.")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
