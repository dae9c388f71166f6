"""A model that only infers, beside a policy that DeepSpeed trains."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from trl_prepare.freezing import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from torch import nn

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Only training reads these, so their "auto" needs no value.
TRAINING_KEYS = (*BATCH_KEYS, "gradient_clipping")
# DeepSpeed itself knows what "auto" means here.
AUTO_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules",)


def prepare_deepspeed(model: nn.Module, accelerator: Accelerator) -> DeepSpeedEngine:
    """Wrap a reference or reward model in a DeepSpeed engine, frozen and in eval mode.

    Under ZeRO-3 the model is sharded like the policy. Under every other stage each rank holds it
    whole, since stages 1 and 2 shard only what a model without an optimizer doesn't have. Call it
    on every rank. The accelerator's configuration is read, never changed.

    Args:
        model: A module that isn't wrapped yet. If it is a DeepSpeed engine already, that engine is
            set to eval mode and returned.
        accelerator: An accelerator with a DeepSpeed plugin. Its config decides the stage and the
            precision; bucket sizes that it doesn't set follow from the model's hidden size, as
            transformers' Trainer chooses them:
            https://huggingface.co/docs/transformers/deepspeed

    Returns:
        The engine; its `module` is the model.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: The accelerator has no DeepSpeed plugin; an `"auto"` in its config can't be
            resolved; or the model is quantized and the stage is 3.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> prepare_deepspeed(torch.nn.Linear(2, 2), Accelerator(cpu=True))
        Traceback (most recent call last):
        ...
        ValueError: prepare_deepspeed needs an accelerator that runs DeepSpeed, but this one runs \
NO: pass a DeepSpeedPlugin to Accelerator.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            "prepare_deepspeed needs DeepSpeed: pip install 'trl-prepare[deepspeed]'."
        ) from error

    if isinstance(model, deepspeed.DeepSpeedEngine):
        model.eval()
        return model
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        raise ValueError(
            "prepare_deepspeed needs an accelerator that runs DeepSpeed, but this one runs "
            f"{accelerator.distributed_type.value}: pass a DeepSpeedPlugin to Accelerator."
        )
    config = _inference_config(plugin.deepspeed_config, model)
    if config["zero_optimization"]["stage"] == 3 and _is_quantized(model):
        raise ValueError(
            "ZeRO-3 can't shard a quantized model: load it without a quantization config, or use "
            "a ZeRO stage below 3."
        )
    with frozen(model):
        engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    engine.training = False  # `eval` sets only the module's flag
    return engine


def _inference_config(training: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    config = copy.deepcopy(dict(training))
    for block in ("optimizer", "scheduler"):
        config.pop(block, None)
    for key in TRAINING_KEYS:
        if config.get(key) == "auto":
            del config[key]
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)

    zero = config.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    if zero["stage"] in (0, 1, 2):
        # Nothing else in the block has a meaning for a model that is whole on each rank.
        config["zero_optimization"] = {"stage": 0}
    else:
        for block in ("offload_optimizer", "zenflow"):
            zero.pop(block, None)
        if zero.get("stage3_gather_16bit_weights_on_model_save") == "auto":
            zero["stage3_gather_16bit_weights_on_model_save"] = False
        for key, size in _sizes(model).items():
            if zero.get(key, "auto") == "auto":
                zero[key] = size

    unresolved = [key for key in _auto_keys(config) if key not in AUTO_BY_DEEPSPEED]
    if unresolved:
        raise ValueError(
            f"The DeepSpeed config says 'auto' for {', '.join(unresolved)}, which can't be derived "
            "from this model: set the value in the config."
        )
    return config


def _sizes(model: nn.Module) -> dict[str, int]:
    hidden_size = _hidden_size(getattr(model, "config", None))
    if hidden_size is None:
        return {}
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": hidden_size**2 * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _hidden_size(config: Any) -> int | None:
    sizes = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None)]
    if sizes[0] is not None:
        return max(sizes)
    # Composite configs (vision-language, encoder-decoder) keep it in a part.
    for part in ("text_config", "decoder"):
        if (inner := getattr(config, part, None)) is not None:
            return _hidden_size(inner)
    return None


def _is_quantized(model: nn.Module) -> bool:
    # transformers marks the model; weights quantized by other means show by their dtype.
    return any(getattr(module, "is_quantized", False) for module in model.modules()) or any(
        not parameter.is_floating_point() for parameter in model.parameters()
    )


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _auto_keys(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key
