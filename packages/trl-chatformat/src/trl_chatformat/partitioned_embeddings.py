"""Rows for new tokens where `deepspeed.zero.Init` has partitioned a model over processes."""

from collections.abc import Callable, Collection
from typing import Any

from trl_chatformat._transformers_private import grows_plainly


def is_partitioned(weight: Any) -> bool:
    """Tells whether ZeRO-3 holds a parameter."""
    return hasattr(weight, "ds_id")


def check_partitioned(model: Any) -> None:
    """Refuses a partitioned model whose embeddings can't be grown.

    Args:
        model: A transformers model with partitioned embeddings.

    Raises:
        ValueError: A DeepSpeed engine has it already, or its class grows in a way of its own.
    """
    if any("ds_id" in vars(module) for module in model.modules()):
        raise ValueError(
            "A DeepSpeed engine has this model already, and its optimizer would not know new rows: "
            "set up the chat format before `accelerator.prepare` or `deepspeed.initialize`."
        )
    if not grows_plainly(model):
        raise ValueError(
            f"{type(model).__name__} grows its embeddings in a way of its own, which can't be done "
            "while they are sharded over processes: set it up before the DeepSpeed config exists."
        )


def grow_partitioned(
    model: Any,
    tensors: list[Any],
    new_ids: Collection[int],
    rows: int,
    fill: Callable[[Any, int, list[int]], None],
) -> None:
    """Gives partitioned embeddings room and values for new tokens, the same on every process.

    Every process must call this. Parameters that get longer are replaced by new ones.

    Args:
        model: A transformers model that `check_partitioned` accepts.
        tensors: Its input embeddings, then an output layer of its own and that one's bias.
        new_ids: The ids of new tokens.
        rows: How many rows there shall be.
        fill: Writes values for given rows of a whole tensor that had so many rows before.
    """
    import deepspeed
    import torch
    from torch import nn

    longer: list[tuple[Any, Any]] = []
    # Rank 0's values are everybody's, both here and where new parameters are partitioned.
    with torch.no_grad(), deepspeed.zero.GatheredParameters(tensors, modifier_rank=0):
        for tensor in tensors:
            old = tensor.data.shape[0]
            whole = tensor.data
            if old < rows:
                whole = whole.new_empty((rows, *whole.shape[1:]))
                whole[:old] = tensor.data
                longer.append((tensor, nn.Parameter(whole, requires_grad=tensor.requires_grad)))
            fill(whole, old, sorted({*new_ids, *range(old, rows)}))
    for old, new in longer:
        old.convert_to_zero_parameters(param_list=[new])
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new
                    for size in ("num_embeddings", "out_features"):
                        if hasattr(module, size):
                            setattr(module, size, rows)
