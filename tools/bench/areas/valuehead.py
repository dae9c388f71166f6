"""Logits and values of one model: ours beside TRL 0.18.2 and the bare language model.

All take turns on the very same Llama with random weights (16 layers, hidden size 1024, vocabulary
32,000, batch 2 x 256), in one process of the environment `peer-old`; times are medians. The limit
is the bare model, which has no values. `values only` is ours without the LM head, which TRL can't
leave out: its peer and its limit are the whole forward. Megabytes (1e6 bytes) are the most tensor
storage held during a forward without gradients above what there was before it.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from tools.bench.measures import Measure, StorageMeter, alternate
from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

CLASS = "AutoModelForCausalLMWithValueHead"


def contestants(dtype: torch.dtype, device: str) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return by name what computes logits and values, all with the same model and input."""
    base: Any = random_llama(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=32_000,
    )
    base = base.to(device, dtype).train()
    ids = torch.randint(0, 32_000, (2, 256), device=device)
    ours = getattr(importlib.import_module("trl_valuehead"), CLASS)(base)
    peer = getattr(importlib.import_module("trl"), CLASS)(base)
    peer.is_peft_model = False  # its constructor leaves this out, its forward reads it
    peer.v_head.to(device)

    def both(model: Any) -> list[torch.Tensor]:
        logits, _, value = model(ids)
        return [logits, value]

    return {
        "ours": functools.partial(both, ours),
        "peer": functools.partial(both, peer),
        "limit": lambda: [base(ids).logits],
        "values only": lambda: [ours(ids, values_only=True)[2]],
    }


def measure(dtype: str) -> dict[str, dict[str, float]]:
    """Return by contestant the seconds of both passes and the storage of one without gradients."""
    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = contestants(getattr(torch, dtype), device)

    def seconds(compute: Callable[[], list[torch.Tensor]], backward: bool) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.set_grad_enabled(backward):
            results = compute()
            if backward:
                torch.stack([result.mean().float() for result in results]).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def turn(compute: Callable[[], list[torch.Tensor]], backward: bool) -> dict[str, float]:
        return {"seconds": seconds(compute, backward)}

    measured: dict[str, dict[str, float]] = {name: {} for name in found}
    for key, backward, rounds in (("forward", False, 15), ("both", True, 7)):
        turns = {name: functools.partial(turn, found[name], backward) for name in found}
        for name, values in alternate(turns, rounds).items():
            measured[name][key] = values["seconds"]
    for name, compute in found.items():
        with torch.no_grad(), StorageMeter() as storage:
            compute()
        measured[name]["storage"] = storage.peak / 1e6
    return measured


def _case(dtype: str, device: str) -> list[Measure]:
    (found,) = run_on_ranks(
        measure,
        engine=None,
        environment="peer-old",
        sources=("trl-valuehead",),
        device=device,
        time_limit=900,
        dtype=dtype,
    )
    rows = [
        (title + suffix, unit, found[name][key], found["peer"][key], found["limit"][key])
        for name, suffix in (("ours", ""), ("values only", ", values only"))
        for title, unit, key in (
            ("storage without gradients", "MB", "storage"),
            ("forward without gradients", "s", "forward"),
            ("forward and backward", "s", "both"),
        )
    ]
    return [Measure(*row) for row in rows]


CASES = {dtype: functools.partial(_case, dtype) for dtype in ("float32", "bfloat16")}
