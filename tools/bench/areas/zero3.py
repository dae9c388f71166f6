"""Enter, generate and leave on two ranks: ours beside TRL 1.16.0 and the plain model.

All take turns, a few tokens each time, in the very same ranks, in the environment `peer-new`, on
Llamas with the same random weights in fp32; numbers are medians, of the slower rank. With
`--device cuda` there is one rank a GPU, at most two. The cases `zero3` and `fsdp2` take 12 layers
and 47 M parameters; the limit of tokens/s is the whole model on each rank without an engine, the
limit of entering and leaving is one flat all-gather of the missing bytes into fresh memory, and the
limit of the storage is those bytes. Megabytes (1e6 bytes) are the most tensor storage held above
what there was before, by entering alone. `sizes` enters and leaves with 5 M to 500 M parameters,
one contestant after the other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from tools.bench.measures import Measure, StorageMeter
from tools.rails.collectives import CountCollectives
from tools.rails.models import generate_greedily, random_llama
from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelerate import Accelerator

MODULES = {"ours": "trl_zero3", "peer": "trl.models"}
ROUNDS = 15
NEW_TOKENS = 12
LAYERS_12 = {
    "hidden_size": 512,
    "intermediate_size": 1365,
    "num_hidden_layers": 12,
    "vocab_size": 9000,
}
SIZES = {
    "5 M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4},
    "17 M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
    "47 M": LAYERS_12,
    "150 M": {"hidden_size": 896, "intermediate_size": 2400, "num_hidden_layers": 15},
    "500 M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 17},
}


def contexts(
    accelerator: Accelerator, settings: dict[str, int], names: Sequence[str] = tuple(MODULES)
) -> dict[str, functools.partial[contextlib.AbstractContextManager]]:
    """Shard one model for each contestant; return how each gets at a model that can generate."""
    found = {}
    for name in names:
        model = random_llama(
            **({"vocab_size": 4000} | settings),
            num_attention_heads=8,
            eos_token_id=None,
            pad_token_id=0,
        )
        for parameter_name, parameter in model.named_parameters():
            # What trains is there more than once, which the largest model leaves no room for.
            parameter.requires_grad_("norm" in parameter_name)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1e-3)
        model, _ = accelerator.prepare(model, optimizer)
        unwrap = importlib.import_module(MODULES[name]).unwrap_model_for_generation
        found[name] = functools.partial(unwrap, model, accelerator)
    return found


def turns(
    accelerator: Accelerator, contestants: dict[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    """Run each in turn, all ranks together, and return each one's seconds, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            work()
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def enter_and_leave(context: functools.partial[contextlib.AbstractContextManager]) -> None:
    with context():
        pass


def gather_flat(missing: int, device: torch.device) -> None:
    """Gather as many bytes as are missing with one launch, into fresh memory."""
    world_size = torch.distributed.get_world_size()
    shard = _shard(missing // world_size // 4, device)
    whole = torch.empty(shard.numel() * world_size, device=device)
    torch.distributed.all_gather_into_tensor(whole, shard)


@functools.cache
def _shard(numel: int, device: torch.device) -> torch.Tensor:
    return torch.ones(numel, device=device)


def entering_alone(accelerator: Accelerator, settings: dict, name: str) -> dict[str, float]:
    """Measure entering and leaving of one contestant: a large model leaves no room for two."""
    return _entering(accelerator, contexts(accelerator, settings, [name]), {}, 5)


def _entering(accelerator: Accelerator, found: dict, others: dict, rounds: int) -> dict[str, float]:
    works = {name: functools.partial(enter_and_leave, found[name]) for name in found}
    seconds = turns(accelerator, works | others, rounds)
    return {f"enter {name}": statistics.median(times) for name, times in seconds.items()}


def generating(accelerator: Accelerator) -> dict[str, float]:
    """Measure entering and leaving, tokens inside, collectives and storage."""
    from trl_zero3 import gather_cost

    found = contexts(accelerator, LAYERS_12)
    missing = gather_cost(found["ours"].args[0]).missing_bytes
    flat = functools.partial(gather_flat, missing, accelerator.device)
    measured = _entering(accelerator, found, {"limit": flat}, ROUNDS) | {"missing": missing}
    plain = random_llama(**LAYERS_12, num_attention_heads=8, eos_token_id=None, pad_token_id=0).to(
        accelerator.device
    )
    prompt = torch.randint(2, 4000, (2, 16), device=accelerator.device)
    config = _zero3_is_known_to_transformers(accelerator)

    generate = functools.partial(generate_greedily, prompt=prompt, tokens=NEW_TOKENS)

    def generate_plainly(model: Any) -> None:
        replaced = torch.nn.functional.linear  # by DeepSpeed, for all models of the process
        torch.nn.functional.linear = torch._C._nn.linear
        try:
            generate(model, synced_gpus=False)
        finally:
            torch.nn.functional.linear = replaced

    with torch.no_grad(), contextlib.ExitStack() as stack:
        works = {"limit": functools.partial(generate_plainly, plain)}
        for name, context in found.items():
            with StorageMeter() as storage:
                works[name] = functools.partial(generate, stack.enter_context(context()))
            with CountCollectives() as collectives:
                works[name]()
            measured[f"storage {name}"] = storage.peak
            measured[f"gathers {name}"] = collectives.gathers()
            measured[f"others {name}"] = collectives.others()
        seconds = turns(accelerator, works, ROUNDS)
        for name, times in seconds.items():
            measured[f"inside {name}"] = statistics.median(times)
            # Of runs that follow each other, since a machine's speed changes in between.
            ratios = [time / plain for time, plain in zip(times, seconds["limit"], strict=True)]
            measured[f"slowdown {name}"] = statistics.median(ratios)
    del config
    return measured


def _zero3_is_known_to_transformers(accelerator: Accelerator) -> Any:
    """Let `generate` know of ZeRO-3 for as long as the result lives, as a Trainer does."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(plugin.deepspeed_config)


def _on_ranks(engine: str, device: str, function: Any, **arguments: Any) -> dict[str, float]:
    ranks = run_on_ranks(
        function,
        engine=engine,
        environment="peer-new",
        sources=("trl-zero3",),
        device=device,
        processes=2 if device == "cpu" else min(2, torch.cuda.device_count()),
        time_limit=600,
        **arguments,
    )
    # The slower rank is the one that everybody waits for.
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _measure(engine: str, device: str) -> list[Measure]:
    found = _on_ranks(engine, device, generating)
    speed = {name: NEW_TOKENS / found[f"inside {name}"] for name in ("ours", "peer", "limit")}
    over_plain = {name: 1 / found[f"slowdown {name}"] for name in speed}
    return [
        Measure("tokens inside, each sequence", "1/s", *speed.values()),
        Measure("over the plain model", "x", *over_plain.values()),
        *_rows("enter and leave", "s", found, "enter", limit=found["enter limit"]),
        *_rows("gathers inside", "calls", found, "gathers", limit=0),
        *_rows("other collectives inside", "calls", found, "others", limit=0),
        *_rows("storage", "MB", found, "storage", scale=1e6, limit=found["missing"] / 1e6),
    ]


def _rows(
    name: str,
    unit: str,
    found: dict[str, float],
    key: str,
    *,
    limit: float | None,
    scale: float = 1,
) -> list[Measure]:
    return [Measure(name, unit, found[f"{key} ours"] / scale, found[f"{key} peer"] / scale, limit)]


def _sizes(device: str) -> list[Measure]:
    measures = []
    for size, settings in SIZES.items():
        for engine in ("zero3", "fsdp2"):
            found = {}
            for name in ("peer", "ours"):
                # In new processes, which hold nothing of the model before.
                found |= _on_ranks(
                    engine, device, entering_alone, settings=settings, name=name, fresh=True
                )
            measures += _rows(f"{engine}, {size}", "s", found, "enter", limit=None)
    return measures


CASES = {
    "zero3": functools.partial(_measure, "zero3"),
    "fsdp2": functools.partial(_measure, "fsdp2"),
    "sizes": _sizes,
}
