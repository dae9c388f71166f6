"""Count the collectives that a rank takes part in."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """Counts this rank's collectives of every group by name while it is entered; slows them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._opname:
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))

    def gathers(self) -> int:
        """Return how many of them were all-gathers, of any form."""
        return sum(number for name, number in self.counts.items() if "gather" in name)

    def others(self) -> int:
        """Return how many of them were anything else."""
        return self.counts.total() - self.gathers()
