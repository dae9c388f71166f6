"""One accelerator for each engine the examples run on, on GPUs or on CPU.

accelerate declines DeepSpeed and FSDP on CPU, although both run there; `make_accelerator` lifts
that, so that an example can be tried on a laptop exactly as it will run on a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from folders import whole_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor

ENGINES = ("single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2")


def check_engine(engine: str, processes: int) -> None:
    """Refuse an engine or a number of processes that can't run here.

    Raises:
        ValueError: The engine is unknown, its library is missing, or the processes don't fit.
    """
    if engine not in ENGINES:
        raise ValueError(f"Unknown engine {engine!r}: choose one of {', '.join(ENGINES)}.")
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f"The engine {engine!r} needs DeepSpeed, which is not installed: "
            "pip install 'trl-models[deepspeed]'."
        )
    import torch

    devices = torch.cuda.device_count() or os.cpu_count() or 1
    if not 1 <= processes <= devices:
        raise ValueError(
            f"{processes} processes were asked for, but this machine runs 1 to {devices} "
            "(one for each GPU, or for each core where there is none)."
        )
    if engine == "single" and processes != 1:
        raise ValueError(
            f"The engine 'single' runs one process, not {processes}: choose another engine."
        )


def rank_environment(engine: str) -> dict[str, str]:
    """Return the environment variables that a rank of this engine starts with."""
    environment = dict(os.environ)
    if engine.startswith("zero"):
        environment["ACCELERATE_USE_DEEPSPEED"] = "true"
        import torch

        if not torch.cuda.is_available():
            environment["DS_ACCELERATOR"] = "cpu"
    return environment


def torchrun_command(processes: int) -> list[str]:
    """Return the start of a command line that runs a script on this many local ranks."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={processes}", "--max-restarts=0"),
        # Port 0 lets the system choose a free one.
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        "--rdzv-conf=timeout=120",
    ]


def launch(script: str, arguments: Sequence[str], engine: str, processes: int) -> int:
    """Run a script on this many ranks of an engine and return its exit code."""
    environment = rank_environment(engine)
    cores = os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    command = [*torchrun_command(processes), script, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def end_process(code: int) -> NoReturn:
    """End this process; a launched rank ends at once, without the interpreter's finalization.

    torch 2.13 keeps the gloo threads of a group that a DDP model used, even past
    `destroy_process_group`. One that still drops a tensor while Python finalizes is ended
    inside C++ code that can't bear it, and takes the whole rank down with SIGABRT.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_accelerator(
    engine: str, *, mixed_precision: str = "no", max_grad_norm: float = 0.0
) -> Accelerator:
    """Make the accelerator of an engine; on a machine without a GPU it runs on the CPU.

    Args:
        engine: One of `ENGINES`.
        mixed_precision: "no", "bf16" or "fp16".
        max_grad_norm: What DeepSpeed clips to by itself, 0 for never; elsewhere call
            `accelerator.clip_grad_norm_`.

    Returns:
        The accelerator, whose `prepare(model, optimizer)` shards as the engine does.
    """
    import torch
    from accelerate import Accelerator

    on_cpu = not torch.cuda.is_available()
    if engine.startswith("zero"):
        from accelerate import DeepSpeedPlugin
        from transformers.integrations import unset_hf_deepspeed_config

        if on_cpu:
            _let_deepspeed_ranks_meet_on_cpu()
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": max_grad_norm,
                "zero_force_ds_cpu_optimizer": False,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": int(engine[-1]),
                    "stage3_gather_16bit_weights_on_model_save": True,
                },
            }
        )
        # DeepSpeed prints, on every rank, that it could load its communication op.
        with contextlib.redirect_stdout(io.StringIO()):
            accelerator = Accelerator(mixed_precision=mixed_precision, deepspeed_plugin=plugin)
        # Otherwise transformers shards models while it loads them, and a reference could no
        # longer be copied from the policy.
        unset_hf_deepspeed_config()
        return accelerator
    if engine.startswith("fsdp"):
        from accelerate import FullyShardedDataParallelPlugin

        if on_cpu:
            _let_fsdp_run_on_cpu()
        version = int(engine[-1])
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True if version == 2 else "FULL_SHARD",
            state_dict_type="SHARDED_STATE_DICT" if version == 2 else "FULL_STATE_DICT",
            cpu_ram_efficient_loading=False,
            use_orig_params=True,
        )
        return Accelerator(cpu=on_cpu, mixed_precision=mixed_precision, fsdp_plugin=plugin)
    return Accelerator(cpu=on_cpu, mixed_precision=mixed_precision)


def whole_state_dict(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Return the whole model's weights, on rank 0 at least; every rank must call this.

    It is `accelerator.get_state_dict`, but for FSDP1 on the CPU: there accelerate asks torch to
    offload the weights to where they are already, and torch frees them under its own hands.
    """
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    if not isinstance(model, FullyShardedDataParallel) or accelerator.device.type != "cpu":
        return accelerator.get_state_dict(model)
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def save_model(accelerator: Accelerator, model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a prepared model and its tokenizer in place of what the folder held."""
    state = whole_state_dict(accelerator, model)
    if not accelerator.is_main_process:
        return
    with whole_folder(folder, replace=True) as unfinished:
        inner: Any = accelerator.unwrap_model(model)
        inner.save_pretrained(unfinished, state_dict=state)
        tokenizer.save_pretrained(unfinished)


def share(accelerator: Accelerator, rows: list[Any]) -> list[Any]:
    """Return this rank's rows of what all ranks work on together."""
    return rows[accelerator.process_index :: accelerator.num_processes]


def total(accelerator: Accelerator, *values: Tensor) -> Tensor:
    """Return each value summed over all ranks."""
    import torch

    return accelerator.reduce(torch.stack(values).double(), reduction="sum").float()


def _let_deepspeed_ranks_meet_on_cpu() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState._prepare_backend
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def prepare_backend(self, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and "LOCAL_RANK" in os.environ:
            return "gloo", DistributedType.MULTI_CPU
        return original(self, *args, **kwargs)

    PartialState._prepare_backend = prepare_backend


def _let_fsdp_run_on_cpu() -> None:
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(self, *args, fsdp_plugin=None, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP
                shared["device"] = torch.device("cpu")  # FSDP1 takes no index on CPU
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = initialize
