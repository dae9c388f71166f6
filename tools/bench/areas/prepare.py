"""A reference beside a sharded policy: ours beside TRL 1.16.0, and log-probabilities by it.

`zero3` and `fsdp2` run on two ranks of the environment `peer-new`, with a Llama of 12 layers and
47 M parameters in fp32, and take turns. Ours copies the policy that is sharded already, as
`create_reference_model` can; TRL's copies it while it is whole and prepares the copy. The limit of
what is held is a rank's share of the model and one layer, that of the peak and of the seconds is
what a deep copy of the whole model takes. Megabytes (1e6 bytes) are tensor storage on a rank above
what there was before.

`logprobs` is one process with a vocabulary of 151,936 and 2 x 512 tokens: `reference_logprobs`
beside a log-softmax over all logits in float32. The limit of its peak is an eighth of that.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import time
from typing import TYPE_CHECKING, Any

import torch

from tools.bench.measures import Measure, StorageMeter, alternate
from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

ROUNDS = 3


def make_model() -> Any:
    return random_llama(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=8000,
    )


def prepare(accelerator: Accelerator, contestant: str, *, metered: bool) -> dict[str, float]:
    """Make and prepare one reference; return the seconds, or the storage held and its peak."""
    model = make_model()
    policy, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = make_model()

    def ours() -> Any:
        package = importlib.import_module("trl_prepare")
        return package.prepare_reference_model(package.create_reference_model(policy), accelerator)

    def peer() -> Any:
        create = importlib.import_module("trl.experimental.utils").create_reference_model
        utilities = importlib.import_module("trl.models.utils")
        if accelerator.distributed_type.value == "DEEPSPEED":
            return utilities.prepare_deepspeed(create(whole), accelerator)
        return utilities.prepare_fsdp(create(whole), accelerator)

    contestants: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "peer": peer,
        "limit": lambda: copy.deepcopy(whole),
    }
    make = contestants[contestant]
    gc.collect()
    if metered:
        with StorageMeter() as meter:
            reference = make()
            gc.collect()
            held = meter.current()
        result = {"held": held / 1e6, "peak": meter.peak / 1e6}
    else:
        started = time.perf_counter()
        reference = make()
        result = {"seconds": time.perf_counter() - started}
    del reference
    return result


def compare(accelerator: Accelerator) -> dict[str, dict[str, float]]:
    """Return by contestant what it took on this rank."""
    names = ("ours", "peer", "limit")
    timed = alternate(
        {name: functools.partial(prepare, accelerator, name, metered=False) for name in names},
        ROUNDS,
    )
    for name in names:
        timed[name] |= prepare(accelerator, name, metered=True)
    model = make_model()
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    share = sum(p.nbytes for p in model.parameters()) / accelerator.num_processes
    return timed | {"bound": {"held": (share + layer) / 1e6}}


def references(engine: str, device: str) -> list[Measure]:
    """Return what a reference takes on an engine, of the rank that takes most."""
    results = run_on_ranks(
        compare, engine=engine, environment="peer-new", sources=SOURCES, device=device
    )

    def most(name: str, key: str) -> float:
        return max(result[name][key] for result in results)

    return [
        Measure("held", "MB", most("ours", "held"), most("peer", "held"), most("bound", "held")),
        *(
            Measure(key, unit, *(most(name, key) for name in ("ours", "peer", "limit")))
            for key, unit in (("peak", "MB"), ("seconds", "s"))
        ),
    ]


def logprobs(device: str) -> list[Measure]:
    """Return the peak and the seconds of log-probabilities, chunked and naive."""
    from trl_prepare import reference_logprobs

    model: Any = random_llama(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=151_936
    )
    model = model.eval().to(device)
    ids = torch.randint(0, 151_936, (2, 512), device=device)
    mask = torch.ones_like(ids)

    def naive() -> torch.Tensor:
        with torch.no_grad():
            logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)

    def chunked() -> torch.Tensor:
        return reference_logprobs(model, ids, mask, chunk_tokens=64)

    found: dict[str, dict[str, float]] = {}
    contestants = {"ours": chunked, "peer": naive}
    for name, compute in contestants.items():
        with StorageMeter() as meter:
            compute()
        found[name] = {"peak": meter.peak / 1e6}

    def seconds(compute: Callable[[], torch.Tensor]) -> dict[str, float]:
        started = time.perf_counter()
        compute()
        return {"seconds": time.perf_counter() - started}

    timed = alternate({n: functools.partial(seconds, c) for n, c in contestants.items()}, ROUNDS)
    ours, peer = found["ours"]["peak"], found["peer"]["peak"]
    return [
        Measure("peak", "MB", ours, peer, peer / 8),
        Measure("seconds", "s", timed["ours"]["seconds"], timed["peer"]["seconds"]),
    ]


SOURCES = ("trl-zero3", "trl-prepare")
CASES = {
    "zero3": functools.partial(references, "zero3"),
    "fsdp2": functools.partial(references, "fsdp2"),
    "logprobs": logprobs,
}
