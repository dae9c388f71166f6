"""What ranks that gather together settle: whether it fits, and in the end whether all are well.

They settle it over a group of their own, so that it mixes with no collective of the engine's.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trl_zero3 import _torch_private

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch.distributed import ProcessGroup

_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def agreement_group(ranks: Sequence[int], device: torch.device) -> ProcessGroup | None:
    """Return the group over which these ranks agree; all of them must ask for it together.

    Args:
        ranks: Global ranks, in the same order on each.
        device: Where the engine communicates; its time limit is taken over.

    Returns:
        The group, on the CPU, made when first asked for; None for a rank on its own.
    """
    if len(ranks) < 2 or dist.group.WORLD is None:
        return None
    groups = _groups.setdefault(dist.group.WORLD, {})
    key = tuple(ranks)
    if key not in groups:
        group = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=_torch_private.time_limit(device),
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
        groups[key] = group
    return groups[key]


def most(figures: Sequence[int], *groups: ProcessGroup | None) -> list[int]:
    """Return the greatest of each of these figures on the ranks of one group after another."""
    agreed = torch.tensor(figures, dtype=torch.int64, device="cpu")
    for group in groups:
        if group is not None:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return agreed.tolist()


@contextmanager
def ending_together(group: ProcessGroup | None) -> Generator[None]:
    """Raise on every rank if the body raised on any of them.

    A rank whose body raises tells the others and waits for nobody. One whose body ends waits for
    the others, up to the group's time limit.

    Args:
        group: From `agreement_group`; None for a rank on its own.

    Raises:
        RuntimeError: The body raised on another rank, or a rank is gone.
    """
    try:
        yield
    except BaseException:
        if group is not None:
            failed = torch.tensor([dist.get_rank() + 1], device="cpu")
            with suppress(RuntimeError):  # the others are gone already
                dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group, async_op=True)
        raise
    try:
        [failed_rank] = most([0], group)
    except RuntimeError as error:
        raise RuntimeError(
            "Another rank did not reach the end of the gathered body; this rank's engine is as it "
            "was before."
        ) from error
    if failed_rank:
        raise RuntimeError(
            f"Rank {failed_rank - 1} raised inside of the gathered body, so it ends on all ranks: "
            "see that rank's own error. This rank's engine is as it was before."
        )
