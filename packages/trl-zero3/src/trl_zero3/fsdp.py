"""Whole parameters where FSDP keeps shards: all of FSDP2's, and FSDP1's root."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch.distributed import get_process_group_ranks

from trl_zero3 import _fsdp_private as private
from trl_zero3.agreement import agreement_group, ending_together
from trl_zero3.hooks import suspended_entries
from trl_zero3.memory import Launch, check_fits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn


@contextmanager
def unsharded(model: nn.Module, check_memory: bool = True) -> Generator[None]:
    """Hold every FSDP2 parameter whole inside, in its mixed-precision dtype, with no more gathers.

    Groups that were whole stay so, the others end up as shards, without communication. Where there
    was something to gather, the context raises on all ranks if the body raises on one.

    Args:
        model: Any module; one without FSDP2 in it is left alone.
        check_memory: Refuse, on all ranks alike, what does not fit on one of them.

    Raises:
        GatherWontFit: There is not enough free memory.
        RuntimeError: A group is between its forward and its backward, sharded over fewer ranks.
            On leaving, the body raised on another rank.
    """
    roots: list[Any] = topmost(model, private.is_fsdp2)
    for root in roots:
        private.fsdp2_prepare(root)
    states = [state for root in roots for state in private.fsdp2_states(root)]
    groups = private.fsdp2_groups(states)
    if any(group.is_sharded_post_forward for group in groups):
        raise RuntimeError(
            "FSDP2 holds parameters resharded to fewer ranks, as a forward leaves them: generate "
            "after its backward or, if none follows, after calling reshard() on the FSDP modules."
        )
    sharded = [group for group in groups if group.is_sharded]
    ranks = None
    if sharded:
        device = sharded[0].device
        ranks = agreement_group(private.fsdp2_ranks(sharded), device)
        if check_memory:
            check_fits(fsdp2_launches(sharded), device, ranks)
    with ending_together(ranks), private.fsdp2_idle(states, groups):
        try:
            private.fsdp2_unshard(sharded)
            with (
                private.fsdp2_gradients(groups),
                suspended_entries(private.fsdp2_hook_entries(states)),
            ):
                yield
        finally:
            private.fsdp2_reshard(sharded)


def fsdp2_launches(groups: list[Any], world_size: int | None = None) -> list[Launch]:
    """Return what `unsharded` would launch for these groups, on this many ranks.

    FSDP2 gathers a group into one buffer and copies it out; the next one's buffer is there too.
    """
    buffers = [private.fsdp2_size(group, world_size).whole for group in groups]
    return [Launch(own, own + following) for own, following in pairwise([*buffers, 0])]


@contextmanager
def summoned(model: nn.Module, check_memory: bool = True) -> Generator[bool]:
    """Hold FSDP1's root parameters whole inside; the wrapped layers still gather by themselves.

    Args:
        model: Any module; one without FSDP1 in it is left alone.
        check_memory: Refuse, on all ranks alike, what does not fit on one of them.

    Yields:
        Whether layers inside still gather.

    Raises:
        GatherWontFit: There is not enough free memory for the root and its largest layer.
    """
    roots: list[Any] = topmost(model, private.is_fsdp1)
    with ExitStack() as stack:
        for root in roots:
            states = private.fsdp1_states(root)
            if private.fsdp1_is_summoned(root):
                continue
            if check_memory:
                device = root.compute_device
                ranks = [
                    agreement_group(get_process_group_ranks(group), device)
                    for group in private.fsdp1_groups(root)
                ]
                check_fits(fsdp1_launches(root), device, *ranks)
            stack.enter_context(private.fsdp1_idle(states))
            # With recurse=True, a layer's own forward asserts or gathers once more.
            stack.enter_context(root.summon_full_params(root, recurse=False, writeback=False))
        yield any(len(private.fsdp1_states(root)) > 1 for root in roots)


def fsdp1_launches(root: Any, world_size: int | None = None) -> list[Launch]:
    """Return what `summoned` would launch for a root, on this many ranks."""
    handles = [handle for handle in private.fsdp1_handles(root) if handle.uses_sharded_strategy]
    wholes = {handle: private.fsdp1_size(handle, world_size).whole for handle in handles}
    kept = wholes.pop(root._handle, 0)
    return [Launch(kept, max(wholes.values(), default=0))]


def topmost(model: nn.Module, matches: Callable[[object], bool]) -> list[Any]:
    """Return the matching modules that no other matching module contains."""
    if matches(model):
        return [model]
    return [found for child in model.children() for found in topmost(child, matches)]
