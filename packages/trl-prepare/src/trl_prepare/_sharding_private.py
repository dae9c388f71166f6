"""What ZeRO-3 and FSDP2 keep about a sharded parameter; read in the versions named beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.fsdp import FSDPModule

from trl_prepare._private_names import ZERO3_PARAMETER_MARK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


@dataclass
class Fsdp2Unit:
    """Modules that `fully_shard` made one unit of, and how."""

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def fsdp2_units(root: nn.Module) -> list[Fsdp2Unit]:
    """Return a model's units, outer ones first.

    torch 2.6 to 2.11 keep one `_fsdp_param_group` in a state, 2.12 and 2.13 `_fsdp_param_groups`;
    `_auto_reshard_after_forward` came with 2.8.
    """
    found: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
    states: list[Any] = list({id(s): s for m in found for s in [m._get_fsdp_state()]}.values())
    grouped = [(state, _group_of(state)) for state in states]
    # A unit without parameters of its own says nothing about itself.
    usual = next(group for _, group in grouped if group is not None)
    units: list[Fsdp2Unit] = []
    for state, own in grouped:
        group = own or usual
        after = group.post_forward_mesh_info
        reshard: bool | int = after is not None
        if after is not None and after is not group.mesh_info:
            reshard = after.shard_mesh_size
        automatic = getattr(state, "_auto_reshard_after_forward", False)
        units.append(
            Fsdp2Unit(
                modules=state._modules,
                mesh=group.mesh_info.mesh,
                reshard_after_forward=None if automatic else reshard,
                mp_policy=group.mp_policy,
                offload_policy=group.offload_policy,
            )
        )
    return units


def _group_of(state: Any) -> Any:
    if hasattr(state, "_fsdp_param_groups"):
        return next(iter(state._fsdp_param_groups), None)
    return state._fsdp_param_group


def is_zero3(parameter: Any) -> bool:
    """Say whether ZeRO-3 has partitioned a parameter, or keeps it whole beside its shard."""
    return hasattr(parameter, ZERO3_PARAMETER_MARK)


def unsupported_zero3(parameter: Any) -> str | None:
    """Return what about a parameter keeps its shard from being read or written, if anything does.

    DeepSpeed 0.16.4 to 0.19.8; `comm` marks MiCS in 0.16.4.
    """
    if not is_zero3(parameter):
        return None
    if parameter.nvme_swapper is not None:
        return "offload to NVMe"
    if hasattr(parameter.ds_tensor, "ds_quant_scale"):
        return "quantized weights"
    if parameter.ds_secondary_tensor is not None:
        return "a secondary partition (zero_hpz_partition_size)"
    if hasattr(parameter, "comm"):
        return "MiCS, which shards over a part of the ranks"
    return None


def same_zero3_layout(first: Any, second: Any) -> bool:
    """Say whether each rank holds the same part of two parameters of one shape."""
    return (
        is_zero3(first)
        and is_zero3(second)
        and first.ds_tensor.shape == second.ds_tensor.shape
        and zero3_rank(first) == zero3_rank(second)
    )


def zero3_rank(parameter: Any) -> int:
    """Return which part of a parameter this rank holds."""
    return distributed.get_rank(parameter.ds_process_group)


def refresh_zero3(parameters: Iterable[Any], bucket_elements: int) -> None:
    """Gather anew what ZeRO-3 keeps whole beside shards that have changed, as it does itself."""
    bucket: list[Any] = []
    filled = 0
    for parameter in {id(p): p for p in parameters}.values():
        if not is_zero3(parameter) or parameter.ds_status.name != "AVAILABLE":
            continue
        if bucket and filled + parameter.ds_numel > bucket_elements:
            bucket[0].all_gather_coalesced(bucket).wait()
            bucket = []
            filled = 0
        parameter.partition()
        bucket.append(parameter)
        filled += parameter.ds_numel
    if bucket:
        bucket[0].all_gather_coalesced(bucket).wait()
