"""What areas measure with: medians of alternating runs, and storage counted."""

from __future__ import annotations

import gc
import statistics
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Measure:
    """One row: ours beside the peer's, and what no implementation can go below, where known."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's; None where there is no peer, or the peer's is 0."""
        return self.ours / self.peer if self.peer else None


def alternate(
    contestants: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Run contestants in turn, round by round, and return each one's medians.

    A first round warms caches up and is thrown away. Taking turns spreads whatever else the
    machine does over all of them.

    Args:
        contestants: By name, a function that runs once and returns named values.
        rounds: How often each one runs after the first round.

    Returns:
        By contestant, the median of each of its named values.
    """
    runs: dict[str, list[Mapping[str, float]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            values = contestant()
            if number > 0:
                runs[name].append(values)
    return {
        name: {key: statistics.median(run[key] for run in done) for key in done[0]}
        for name, done in runs.items()
    }


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of tensor storage above what there was on entry; slows what it counts.

    Storage is summed after each operation, so that what is freed, shared or resized counts as it
    is then; what one operation uses and frees inside is not seen.

    Example:
        >>> with StorageMeter() as meter:
        ...     a = torch.zeros(100)
        ...     b = a.view(10, 10) + 1
        ...     del a
        ...     c = torch.zeros(50)
        >>> meter.peak, meter.current()
        (800, 600)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_entry = 0

    def __enter__(self) -> Self:
        for value in gc.get_objects():
            if _plain(value):
                self._watch(value)
        self._on_entry = self.current()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _plain(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _plain(leaf) and _key(leaf) not in given:
                self._watch(leaf)
        self.peak = max(self.peak, self.current())
        return result

    def current(self) -> int:
        """Return the bytes held now, less those held on entry."""
        alive = {key: ref for key, ref in self._storages.items() if ref() is not None}
        self._storages = alive
        held = sum(storage.nbytes() for ref in alive.values() if (storage := ref()) is not None)
        return held - self._on_entry

    def _watch(self, tensor: torch.Tensor) -> None:
        self._storages[_key(tensor)] = weakref.ref(tensor.untyped_storage())


def _plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
