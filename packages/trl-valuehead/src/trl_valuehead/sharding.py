"""Parameters that lie in pieces on several ranks: DeepSpeed ZeRO-3's and FSDP2's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

# DeepSpeed's mark on a ZeRO-3 parameter; private, there in 0.16.4 to 0.19.8.
_ZERO3_MARK = "ds_id"


def writable(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
    """Makes the parameters whole, and hands out what rank 0 writes into them.

    Collective if one of them is a ZeRO-3 parameter: every rank must enter.
    """
    parameters = list(parameters)
    if not any(hasattr(parameter, _ZERO3_MARK) for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 parameters of `model` are in pieces now."""
    return any(hasattr(p, _ZERO3_MARK) and p.numel() == 0 for p in model.parameters())


def has_shards(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict holds DTensors, each with this rank's piece alone."""
    return any(hasattr(value, "full_tensor") for value in state_dict.values())
