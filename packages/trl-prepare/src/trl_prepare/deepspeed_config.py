"""What a training config of DeepSpeed means for a model that only infers."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

# Only training reads these, or they would log and trace a second model beside the policy.
TRAINING_KEYS = (
    "activation_checkpointing",
    "autotuning",
    "comet",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "gradient_clipping",
    "hybrid_engine",
    "optimizer",
    "progressive_layer_drop",
    "scheduler",
    "tensorboard",
    "wandb",
)
ZERO_TRAINING_KEYS = ("offload_optimizer", "zenflow")
MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
# DeepSpeed itself knows what "auto" means here.
AUTO_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules",)


def inference_config(
    config: Mapping[str, Any], model: nn.Module, *, world_size: int
) -> dict[str, Any]:
    """Make the DeepSpeed config of a model that only infers out of a training config.

    Optimizer, scheduler, optimizer offload and what else only training reads are left out, every
    `"auto"` is resolved, and what is set explicitly stays. Stages 1 and 2 become 0: they shard only
    what a model without an optimizer doesn't have.

    Args:
        config: A training config, which is not changed. It needs no `zero_optimization`.
        model: The model that will infer. Under stage 3 its hidden size gives the bucket sizes that
            the config doesn't set, as transformers' Trainer chooses them:
            https://huggingface.co/docs/transformers/deepspeed
        world_size: The number of ranks.

    Returns:
        A new config for `deepspeed.initialize`.

    Raises:
        ValueError: An `"auto"` can't be resolved; the batch sizes contradict each other;
            `world_size` isn't positive; or `zero_optimization` is no block of settings.

    Warns:
        UserWarning: Parameter offload was dropped, since only stage 3 can offload parameters.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(config=SimpleNamespace(hidden_size=32))
        >>> training = {
        ...     "train_micro_batch_size_per_gpu": "auto",
        ...     "optimizer": {"type": "AdamW"},
        ...     "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        ... }
        >>> config = inference_config(training, model, world_size=2)
        >>> "optimizer" in config, config["train_batch_size"]
        (False, 2)
        >>> config["zero_optimization"]["reduce_bucket_size"]
        1024
    """
    if world_size < 1:
        raise ValueError(f"world_size is the number of ranks and must be positive: {world_size}.")
    config = {
        key: copy.deepcopy(value) for key, value in config.items() if key not in TRAINING_KEYS
    }
    config |= _batch_sizes(config, world_size)
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"zero_optimization is {zero!r}, where a block of settings was expected: write "
            '{"stage": ...}.'
        )
    zero.setdefault("stage", 0)
    if zero["stage"] in (0, 1, 2):
        device = (zero.get("offload_param") or {}).get("device")
        if device not in (None, "none"):
            warnings.warn(
                f"The reference is whole on each rank under ZeRO stage {zero['stage']}, and its "
                f"parameters are not offloaded to {device!r}: only stage 3 can do that.",
                stacklevel=2,
            )
        # Nothing else in the block has a meaning for a model that is whole on each rank.
        config["zero_optimization"] = {"stage": 0}
    else:
        for key in ZERO_TRAINING_KEYS:
            zero.pop(key, None)
        if zero.get("stage3_gather_16bit_weights_on_model_save") == "auto":
            zero["stage3_gather_16bit_weights_on_model_save"] = False
        for key, size in _bucket_sizes(model).items():
            if zero.get(key, "auto") == "auto":
                zero[key] = size

    unresolved = [key for key in _auto_keys(config) if key not in AUTO_BY_DEEPSPEED]
    if unresolved:
        raise ValueError(
            f"The DeepSpeed config says 'auto' for {', '.join(unresolved)}, which can't be derived "
            "from this model: set the value in the config."
        )
    return config


def _batch_sizes(config: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Return the three sizes; DeepSpeed demands that they agree even where nothing trains."""
    # Ranks that share a sequence or a layer's tensors work on the same samples.
    tensor_parallel = config.get("tensor_parallel", {}).get("autotp_size") or 1
    replicas = world_size // (config.get("sequence_parallel_size", 1) * tensor_parallel)
    given = {
        key: size for key in (MICRO, STEPS, TOTAL) if (size := config.get(key, "auto")) != "auto"
    }
    total = given.get(TOTAL)
    if total is None:
        micro, steps = given.get(MICRO, 1), given.get(STEPS, 1)
    elif MICRO in given:
        micro = given[MICRO]
        steps = given.get(STEPS, total // (micro * replicas))
    else:
        steps = given.get(STEPS, 1)
        micro = total // (steps * replicas)
    sizes = {MICRO: micro, STEPS: steps, TOTAL: micro * steps * replicas}
    if min(sizes.values()) < 1 or (total is not None and sizes[TOTAL] != total):
        raise ValueError(
            f"The DeepSpeed config sets {given}, which can't be on {replicas} data-parallel ranks: "
            f"{TOTAL} must be {MICRO} x {STEPS} x ranks."
        )
    return sizes


def _bucket_sizes(model: nn.Module) -> dict[str, int]:
    hidden_size = _hidden_size(getattr(model, "config", None))
    if hidden_size is None:
        return {}
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": hidden_size**2 * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _hidden_size(config: Any) -> int | None:
    sizes = getattr(config, "hidden_sizes", None)
    if sizes:
        return max(sizes)
    for name in ("hidden_size", "d_model", "n_embd"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    # Composite configs (vision-language, encoder-decoder, speech) keep it in a part.
    for part in ("text_config", "decoder", "thinker_config"):
        if (inner := getattr(config, part, None)) is not None:
            return _hidden_size(inner)
    return None


def _auto_keys(config: Any, key: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _auto_keys(value, f"{key}.{name}" if key else name)
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from _auto_keys(value, f"{key}[{index}]")
    elif config == "auto":
        yield key
