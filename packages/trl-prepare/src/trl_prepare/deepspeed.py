"""A model that only infers, beside a policy that DeepSpeed trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed

from trl_prepare.deepspeed_config import inference_config
from trl_prepare.freezing import frozen

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine
    from torch import nn


def prepare_deepspeed(model: nn.Module, accelerator: Accelerator) -> DeepSpeedEngine:
    """Wrap a reference or reward model in a DeepSpeed engine, frozen and in eval mode.

    Under ZeRO-3 the model is sharded like the policy. Under every other stage each rank holds it
    whole, since stages 1 and 2 shard only what a model without an optimizer doesn't have. Call it
    on every rank. The accelerator's configuration is read, never changed.

    Args:
        model: A module that isn't wrapped yet. If it is a DeepSpeed engine already, that engine is
            set to eval mode and returned.
        accelerator: An accelerator with a DeepSpeed plugin. Its config decides the stage and the
            precision; `inference_config` says what becomes of it.

    Returns:
        The engine; its `module` is the model.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: The accelerator has no DeepSpeed plugin; `inference_config` refuses its config;
            or the model is quantized and the stage is 3.

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
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    config = inference_config(plugin.deepspeed_config, model, world_size=world_size)
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


def _is_quantized(model: nn.Module) -> bool:
    # transformers marks the model; weights quantized by other means show by their dtype.
    return any(getattr(module, "is_quantized", False) for module in model.modules()) or any(
        not parameter.is_floating_point() for parameter in model.parameters()
    )
