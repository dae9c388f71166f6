"""What holding a whole model would cost, told without gathering it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_zero3 import _deepspeed_private, _fsdp_private
from trl_zero3.fsdp import fsdp1_launches, fsdp2_launches, topmost
from trl_zero3.gathering import zero3_launches, zero3_size
from trl_zero3.memory import Launch, bytes_to_allocate

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class GatherCost:
    """What `unwrap_model_for_generation` would cost on each rank.

    Args:
        parameters: How many parameters (numbers) the model has.
        missing_bytes: What would be gathered, with the padding that makes all shards equal.
        peak_bytes: The most that parameters would take: what is there now, what is gathered, and
            buffers that pass. Shards in the memory of another device don't count.
        launches: How many gathers would be launched.
    """

    parameters: int
    missing_bytes: int
    peak_bytes: int
    launches: int


def gather_cost(model: nn.Module, world_size: int | None = None) -> GatherCost:
    """Tell what `unwrap_model_for_generation` would cost, without gathering or changing anything.

    Args:
        model: Any model, wrapped or not, also one on the meta device.
        world_size: Answer for this many ranks. A model that is not sharded counts as if ZeRO-3 had
            sharded all of it over them. Without it, the answer is for the model as it is.

    Returns:
        The cost on each rank.

    Raises:
        ValueError: `world_size` is less than 1.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(1000, 1000, bias=False, device="meta")  # 4 MB
        >>> gather_cost(model, world_size=4)
        GatherCost(parameters=1000000, missing_bytes=4000000, peak_bytes=5000000, launches=1)
        >>> gather_cost(model)
        GatherCost(parameters=1000000, missing_bytes=0, peak_bytes=4000000, launches=0)
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}.")
    rest = {id(parameter): parameter for parameter in model.parameters()}
    numel = held = 0
    launches: list[Launch] = []

    roots: list[Any] = topmost(model, _fsdp_private.is_fsdp2)
    states = {id(s): s for root in roots for s in _fsdp_private.fsdp2_states(root)}
    groups = _fsdp_private.fsdp2_groups(states.values())
    launches += fsdp2_launches([group for group in groups if group.is_sharded], world_size)
    for group in groups:
        size = _fsdp_private.fsdp2_size(group, world_size)
        numel += size.numel
        held += size.shard + (0 if group.is_sharded else size.whole)
        for parameter in _fsdp_private.fsdp2_parameters(group):
            rest.pop(id(parameter), None)

    for root in topmost(model, _fsdp_private.is_fsdp1):
        launches += fsdp1_launches(root, world_size)
        for handle in _fsdp_private.fsdp1_handles(root):
            size = _fsdp_private.fsdp1_size(handle, world_size)
            numel += size.numel
            held += size.shard
        for parameter in root.parameters():
            rest.pop(id(parameter), None)

    # What an engine left whole stays so, on any number of ranks.
    plain = numel == 0 and not any(map(_deepspeed_private.is_sharded, rest.values()))
    missing = []
    for parameter in rest.values():
        zero3 = _deepspeed_private.is_sharded(parameter)
        size = zero3_size(parameter, world_size if zero3 or plain else 1)
        numel += size.numel
        if not _deepspeed_private.is_offloaded(parameter):
            held += size.shard
        if zero3 and not _deepspeed_private.is_missing(parameter):
            held += size.whole
        elif zero3 or size.shard < size.whole:
            missing.append(parameter)
    launches += zero3_launches(missing, world_size=world_size)
    return GatherCost(
        parameters=numel,
        missing_bytes=sum(launch.kept for launch in launches),
        peak_bytes=held + bytes_to_allocate(launches),
        launches=sum(launch.kept > 0 for launch in launches),
    )
