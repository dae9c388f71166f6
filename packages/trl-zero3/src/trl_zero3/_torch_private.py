"""The names of torch that are not its public API; read in torch 2.6 and 2.13."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch.distributed import ProcessGroup


def gather_each(
    wholes: list[torch.Tensor], shards: list[torch.Tensor], group: ProcessGroup
) -> Callable[[], None]:
    """Start to all-gather each shard straight into its whole, all with one launch.

    Returns:
        What waits for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 has another name for it
        with distributed_c10d._coalescing_manager(group, async_ops=True) as launch:
            for whole, shard in zip(wholes, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard, group=group)
    return launch.wait


def hook_entries(handles: Iterable[Any]) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield where each hook sits: a hook dictionary of its module and the key in it."""
    for handle in handles:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            dictionary = reference()
            if dictionary is not None and handle.id in dictionary:
                yield dictionary, handle.id


def time_limit(device: torch.device) -> datetime.timedelta | None:
    """Return the time limit of the default group's collectives on this device, if it is known."""
    try:
        backend = distributed_c10d._get_default_group()._get_backend(device)
    except RuntimeError:  # none for this kind of device
        return None
    return getattr(getattr(backend, "options", None), "_timeout", None)
