"""ZeRO-3's hooks, taken off and put back as the very same entries in the same places.

Registering them again would number the modules anew and lose the recorded trace, and with it the
prefetching of the next training step.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl_zero3 import _deepspeed_private as private

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn

_REMOVED = "_trl_zero3_removed_hooks"


class _HookStash:
    """Hooks that were taken off an engine, and where each belongs."""

    def __init__(self, entries: Iterable[tuple[dict[int, Any], int]]) -> None:
        self._places: dict[int, tuple[dict[int, Any], dict[int, Any], set[int]]] = {}
        for dictionary, key in entries:
            place = self._places.setdefault(id(dictionary), (dictionary, dict(dictionary), set()))
            place[2].add(key)

    def take_off(self) -> None:
        for dictionary, _, keys in self._places.values():
            for key in keys:
                dictionary.pop(key, None)

    def put_back(self) -> None:
        for dictionary, before, keys in self._places.values():
            merged = _merge(before, dict(dictionary), keys)
            # In place: handles refer to this very dictionary.
            dictionary.clear()
            dictionary.update(merged)


def _merge(before: dict[int, Any], now: dict[int, Any], taken: set[int]) -> dict[int, Any]:
    """Return `before`, without what was removed meanwhile and with what was added meanwhile."""
    added = [key for key in now if key not in before]
    survivors = [key for key in now if key in before]
    order = list(now)
    # A hook registered with `prepend=True` stands before the ones that stayed, and goes first.
    first = order.index(survivors[0]) if survivors else 0
    front = [key for key in added if order.index(key) < first]
    merged = {key: now[key] for key in front}
    merged.update({k: hook for k, hook in before.items() if k in taken or k in now})
    merged.update({key: now[key] for key in added})
    return merged


@contextmanager
def suspended_hooks(engine: nn.Module) -> Generator[None]:
    """Run the body without a ZeRO-3 engine's own hooks, then put the very same entries back.

    Hooks of other origin stay, also those added inside. Without the hooks a forward gathers
    nothing, so the parameters that it needs must be there: see `gathered`.

    Args:
        engine: A DeepSpeed engine at ZeRO stage 3.

    Raises:
        ValueError: It is not such an engine.
    """
    offload = private.offload_of(engine)
    if offload is None:
        raise ValueError(
            f"suspended_hooks takes a DeepSpeed engine at ZeRO stage 3, not {_describe(engine)}."
        )
    with suspended_entries(private.hook_entries(engine, offload)):
        yield


@contextmanager
def suspended_entries(entries: Iterable[tuple[dict[int, Any], int]]) -> Generator[None]:
    """Run the body without these entries of hook dictionaries, then put them back."""
    stash = _HookStash(entries)
    try:
        stash.take_off()
        yield
    finally:
        stash.put_back()


def remove_hooks(model: nn.Module) -> None:
    """Take a ZeRO-3 engine's own hooks off, until `add_hooks`.

    Also forgets which modules are using a parameter, since nothing is left to say that they are
    done. Calling it twice is calling it once. Prefer `unwrap_model_for_generation`, which does
    this and more, and puts the hooks back whatever happens.

    Args:
        model: A DeepSpeed engine at ZeRO stage 3; a model without `optimizer` is left alone.

    Raises:
        RuntimeError: The optimizer is None or is not ZeRO stage 3's.

    Example:
        >>> from torch import nn
        >>> remove_hooks(nn.Linear(2, 2))  # not an engine: nothing to do
    """
    if not hasattr(model, "optimizer"):
        return
    offload = _require_offload(model, "remove_hooks")
    if hasattr(offload, _REMOVED):
        return
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    stash = _HookStash(private.hook_entries(model, offload))
    setattr(offload, _REMOVED, stash)
    stash.take_off()


def add_hooks(model: nn.Module) -> None:
    """Put back the hooks that `remove_hooks` took off: the same ones, in their places.

    Nothing happens if they are in place already.

    Args:
        model: A DeepSpeed engine at ZeRO stage 3; a model without `optimizer` is left alone.

    Raises:
        RuntimeError: The optimizer is None or is not ZeRO stage 3's, or the hooks are gone without
            `remove_hooks` having taken them.

    Example:
        >>> from torch import nn
        >>> add_hooks(nn.Linear(2, 2))  # not an engine: nothing to do
    """
    if not hasattr(model, "optimizer"):
        return
    offload = _require_offload(model, "add_hooks")
    stash = vars(offload).get(_REMOVED)
    if stash is not None:
        stash.put_back()
        delattr(offload, _REMOVED)
    elif not private.has_its_hooks(offload):
        raise RuntimeError(
            "This engine's ZeRO-3 hooks were taken off by something other than "
            "trl_zero3.remove_hooks, so they can't be put back: take them off with remove_hooks, "
            "or initialize the engine again."
        )


def _require_offload(model: nn.Module, caller: str) -> Any:
    if model.optimizer is None:
        raise RuntimeError(
            f"The engine's optimizer is None, so it has no ZeRO-3 hooks for {caller}: initialize "
            "it at ZeRO stage 3."
        )
    offload = private.offload_of(model)
    if offload is None:
        raise RuntimeError(
            f"{caller} takes a DeepSpeed engine at ZeRO stage 3; the optimizer of this "
            f"{type(model).__name__} is {_describe(model.optimizer)}."
        )
    return offload


def _describe(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
