"""Parameters that lie in pieces on several ranks: DeepSpeed ZeRO-3's and FSDP2's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from trl_valuehead._private_names import FSDP1_INNER, ZERO3_PARAMETER_MARK


def writable(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Makes the parameters whole, and hands out what rank 0 writes into them.

    Collective if one of them is a ZeRO-3 parameter: every rank must enter.
    """
    parameters = list(parameters)
    if not any(hasattr(parameter, ZERO3_PARAMETER_MARK) for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 parameters of `model` are in pieces now."""
    return any(hasattr(p, ZERO3_PARAMETER_MARK) and p.numel() == 0 for p in model.parameters())


def holds_fsdp1(model: nn.Module) -> bool:
    """Whether FullyShardedDataParallel wraps a module inside `model`."""
    return any(FSDP1_INNER in module._modules for module in model.modules())


def has_shards(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict holds DTensors, each with this rank's piece alone."""
    return any(hasattr(value, "full_tensor") for value in state_dict.values())
