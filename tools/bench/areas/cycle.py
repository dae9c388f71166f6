"""Generate 24 tokens, then train for one step, on two ranks: ours beside TRL 1.16.0.

Ours and TRL's `unwrap_model_for_generation` take turns in the very same ranks, in the environment
`peer-new`, each time on a newly sharded Llama of 8 layers and 7.4 M parameters in fp32; a turn's
first cycle warms up and is not counted. With `--device cuda` there is one rank a GPU, at most two.
The limit of the times is the same work on the whole model on each rank, without an engine and
without any communication. The limit of the gathers is one in generation, and what the step before
the first generation took in training. Megabytes (1e6 bytes) are the most tensor storage held during
the generation above what there was before it; their limit is the rank's missing part of the
parameters, and whoever holds less communicates for each token.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from typing import TYPE_CHECKING, Any

import torch

from tools.bench.measures import Measure, StorageMeter, alternate
from tools.rails.collectives import CountCollectives
from tools.rails.models import generate_greedily, random_llama
from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

ROUNDS = 3
CYCLES = 3
NEW_TOKENS = 24


def cycles(accelerator: Accelerator, contestant: str) -> dict[str, float]:
    """Measure one contestant: "ours", "peer", or "limit" for the model without an engine."""
    unwrap_model_for_generation = _as_it_is
    if contestant != "limit":
        module = importlib.import_module({"ours": "trl_zero3", "peer": "trl.models"}[contestant])
        unwrap_model_for_generation = module.unwrap_model_for_generation
    model = random_llama(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        vocab_size=1000,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ).to(accelerator.device)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if contestant != "limit":
        model, optimizer = accelerator.prepare(model, optimizer)
    prompt = torch.randint(2, 1000, (2, 16), device=accelerator.device)

    def train() -> None:
        ids = torch.randint(2, 1000, (2, 64), device=accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward() if contestant == "limit" else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def generate() -> None:
        with torch.no_grad(), unwrap_model_for_generation(model, accelerator) as unwrapped:
            generate_greedily(unwrapped, prompt, NEW_TOKENS)

    def seconds(work: Any) -> float:
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        work()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    train()
    undisturbed, generation, training = (CountCollectives() for _ in range(3))
    with undisturbed:
        train()
    generate()
    train()
    with generation, StorageMeter() as storage:
        generate()
    with training:
        train()
    measured = {
        "gathers before": undisturbed.gathers(),
        "generation gathers": generation.gathers(),
        "generation others": generation.others(),
        "training gathers": training.gathers(),
        "training others": training.others(),
        "storage": storage.peak / 1e6,
        "missing": whole * (1 - 1 / accelerator.num_processes) / 1e6,
    }
    runs = [(seconds(generate), seconds(train)) for _ in range(CYCLES)]
    generated, trained = (sorted(phase)[CYCLES // 2] for phase in zip(*runs, strict=True))
    return measured | {"generate": generated, "train": trained}


@contextlib.contextmanager
def _as_it_is(model: Any, accelerator: Accelerator) -> Any:
    yield model


def _measure(engine: str, device: str) -> list[Measure]:
    processes = 2 if device == "cpu" else min(2, torch.cuda.device_count())

    def one_turn(contestant: str) -> dict[str, float]:
        ranks = run_on_ranks(
            cycles,
            engine=engine,
            environment="peer-new",
            sources=("trl-zero3",),
            device=device,
            processes=processes,
            time_limit=300,
            contestant=contestant,
        )
        # The slower rank is the one that everybody waits for.
        return {key: max(rank[key] for rank in ranks) for key in ranks[0]}

    contestants = ("limit", "ours", "peer")
    found = alternate({name: functools.partial(one_turn, name) for name in contestants}, ROUNDS)
    for values in found.values():
        values["cycle"] = values["generate"] + values["train"]
    ours, peer, limit = (found[name] for name in ("ours", "peer", "limit"))
    rows = [
        ("cycle", "s", "cycle", limit["cycle"]),
        (f"generate {NEW_TOKENS} tokens", "s", "generate", limit["generate"]),
        ("training step", "s", "train", limit["train"]),
        ("gathers in generation", "calls", "generation gathers", 1),
        ("other collectives in generation", "calls", "generation others", 0),
        ("gathers in training", "calls", "training gathers", ours["gathers before"]),
        ("other collectives in training", "calls", "training others", None),
        ("storage for generation", "MB", "storage", ours["missing"]),
    ]
    return [Measure(name, unit, ours[key], peer[key], low) for name, unit, key, low in rows]


CASES = {engine: functools.partial(_measure, engine) for engine in ("zero3", "fsdp2")}
