"""Whether what is to be gathered fits into the memory that is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trl_zero3.agreement import most

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

_NO_LIMIT = 2**62


class GatherWontFit(RuntimeError):
    """Gathering would need more memory than is free; raised on every rank, and nothing is gathered.

    Args:
        needed: The bytes that gathering would allocate on a rank.
        free: The bytes that are free on the rank that has least.

    Example:
        >>> str(GatherWontFit(200, 100)).split(":")[0]
        'Gathering needs 200 bytes on each rank, and one has 100 free'
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(
            f"Gathering needs {needed} bytes on each rank, and one has {free} free: free some, "
            "generate layer by layer (gather_deepspeed3_params=False, for ZeRO-3), or skip this "
            "check with check_memory=False."
        )
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[GatherWontFit], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class Size(NamedTuple):
    """How large something is that an engine shards: its numbers, and bytes on each rank."""

    numel: int
    shard: int
    """Of one rank's part, with the padding that makes all parts equal."""
    whole: int
    """Of all parts, gathered."""


class Launch(NamedTuple):
    """What one launch of a gather allocates, in bytes."""

    kept: int
    """What stays, until the body ends."""
    passing: int
    """What it holds besides while it runs."""


def bytes_to_allocate(launches: Iterable[Launch]) -> int:
    """Return the most that launches, one after another, hold at any moment."""
    kept = highest = 0
    for launch in launches:
        kept += launch.kept
        highest = max(highest, kept + launch.passing)
    return highest


def check_fits(
    launches: Iterable[Launch], device: torch.device, *groups: ProcessGroup | None
) -> None:
    """Raise on every rank alike if launches would not fit on one of them.

    Args:
        launches: What is to be gathered.
        device: Where to.
        groups: The ranks that gather together, from `agreement_group`; replicas of it too.

    Raises:
        GatherWontFit: There is not enough free memory on some rank.
    """
    needed, lacking = most([bytes_to_allocate(launches), -_free_bytes(device)], *groups)
    if needed > -lacking:
        raise GatherWontFit(needed, -lacking)


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a rank; what the allocator holds without using it is free too."""
    if device.type == "cpu":
        import psutil
        from accelerate.utils import get_int_from_env

        # The ranks of a machine share its memory.
        local = get_int_from_env(["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"], 1)
        return psutil.virtual_memory().available // local
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return _NO_LIMIT
    unused = backend.memory_reserved(device) - backend.memory_allocated(device)
    return backend.mem_get_info(device)[0] + unused
