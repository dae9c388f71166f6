"""Whole parameters where FSDP keeps shards: all of FSDP2's, and FSDP1's root."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from trl_zero3 import _fsdp_private as private

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn


@contextmanager
def unsharded(model: nn.Module) -> Generator[None]:
    """Hold every FSDP2 parameter whole inside, in its mixed-precision dtype, with no more gathers.

    Groups that were whole stay so, the others end up as shards; leaving involves no communication.

    Args:
        model: Any module; one without FSDP2 in it is left alone.

    Raises:
        RuntimeError: A group is between its forward and its backward, sharded over fewer ranks.
    """
    states = [s for root in _topmost(model, private.is_fsdp2) for s in private.fsdp2_states(root)]
    groups = private.fsdp2_groups(states)
    if any(group.is_sharded_post_forward for group in groups):
        raise RuntimeError(
            "FSDP2 holds parameters resharded to fewer ranks, from a forward that awaits its "
            "backward: generate before that forward or after that backward."
        )
    sharded = [group for group in groups if group.is_sharded]
    with private.fsdp2_idle(states, groups):
        try:
            private.fsdp2_unshard(sharded)
            yield
        finally:
            private.fsdp2_reshard(sharded)


@contextmanager
def summoned(model: nn.Module) -> Generator[bool]:
    """Hold FSDP1's root parameters whole inside; the wrapped layers still gather by themselves.

    Args:
        model: Any module; one without FSDP1 in it is left alone.

    Yields:
        Whether layers inside still gather.
    """
    roots: list[Any] = _topmost(model, private.is_fsdp1)
    with ExitStack() as stack:
        for root in roots:
            states = private.fsdp1_states(root)
            if private.fsdp1_is_summoned(root):
                continue
            stack.enter_context(private.fsdp1_idle(states))
            # With recurse=True, a layer's own forward asserts or gathers once more.
            stack.enter_context(root.summon_full_params(root, recurse=False, writeback=False))
        yield any(len(private.fsdp1_states(root)) > 1 for root in roots)


def _topmost(model: nn.Module, matches: Callable[[object], bool]) -> list[Any]:
    """Return the matching modules that no other matching module contains."""
    if matches(model):
        return [model]
    return [found for child in model.children() for found in _topmost(child, matches)]
