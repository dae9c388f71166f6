"""The names of torch.distributed that are not its public API; read in torch 2.6 and 2.13."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    import datetime

    import torch
    from torch.distributed import ProcessGroup


def gather_each(
    wholes: list[torch.Tensor], shards: list[torch.Tensor], group: ProcessGroup
) -> None:
    """All-gather each shard straight into its whole, all with one launch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 has another name for it
        with distributed_c10d._coalescing_manager(group, async_ops=True) as launch:
            for whole, shard in zip(wholes, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard, group=group)
    launch.wait()


def time_limit(device: torch.device) -> datetime.timedelta | None:
    """Return the time limit of the default group's collectives on this device, if it is known."""
    try:
        backend = distributed_c10d._get_default_group()._get_backend(device)
    except RuntimeError:  # none for this kind of device
        return None
    return getattr(getattr(backend, "options", None), "_timeout", None)
