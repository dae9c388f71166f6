"""What a redirected call costs over a direct one: ours beside TRL 1.16.0's `_ForwardRedirection`.

All call the same wrapper around the same module, whose forwards do nothing, take turns in one
process of the environment `peer-new`, and run the same function; numbers are medians of
microseconds a call. The overhead is what a call takes above calling the wrapper, which is the
limit. `redirect` finds the inner module by itself.
"""

from __future__ import annotations

import functools
import importlib
import timeit
from typing import TYPE_CHECKING, Any

from torch import nn

from tools.bench.measures import Measure, alternate
from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 15
CALLS = 5000


class Model(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)


def measure() -> dict[str, float]:
    """Return by contestant the microseconds of a call."""
    trl_redirect = importlib.import_module("trl_redirect")
    trl = importlib.import_module("trl.models.utils")

    model = Model()
    wrapper = Wrapper(model)

    def function(x: Any) -> Any:
        return x

    ours, peer = trl_redirect.ForwardRedirection(), trl._ForwardRedirection()
    calls = {
        "direct": lambda: wrapper(1),
        "ours": lambda: ours(wrapper, model, function, 1),
        "redirect": lambda: trl_redirect.redirect(wrapper, function, 1),
        "peer": lambda: peer(wrapper, model, function, 1),
    }

    def turn(call: Callable[[], Any]) -> dict[str, float]:
        return {"call": timeit.timeit(call, number=CALLS) / CALLS * 1e6}

    found = alternate({name: functools.partial(turn, calls[name]) for name in calls}, ROUNDS)
    return {name: values["call"] for name, values in found.items()}


def _measure(device: str) -> list[Measure]:
    (found,) = run_on_ranks(
        measure, engine=None, environment="peer-new", sources=("trl-redirect",), device=device
    )
    direct, peer = found["direct"], found["peer"]
    rows = [("ForwardRedirection", found["ours"]), ("redirect", found["redirect"])]
    return [
        *(Measure(f"{name}, call", "us", call, peer, direct) for name, call in rows),
        *(Measure(f"{name}, overhead", "us", call - direct, peer - direct) for name, call in rows),
    ]


CASES = {"overhead": _measure}
