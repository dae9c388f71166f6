"""What room for two new tokens costs in a matrix of 151,936 x 4,096, beside a resize and a copy.

The model is two tied layers of bfloat16 around nothing, 1.2 GB, in a vocabulary that is full.
"time" is seconds of `grow_embeddings` with a snapshot for rollback, and of transformers' own
resize: the limit is one plain copy of the matrix in the same run. transformers' mean takes minutes
there and is timed in the case "mean", on a quarter of the rows. "memory" is tensor storage at its
peak above the model's, in MB; the limit is the new matrix.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.bench.measures import Measure, StorageMeter, alternate
from trl_chatformat.embeddings import grow_embeddings
from trl_chatformat.rollback import ModelSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH = 151_936, 4_096


def _make_model(rows: int, width: int = WIDTH) -> Any:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=0,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config).bfloat16()
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    return model


class _Contest:
    def __init__(self, rows: int, width: int = WIDTH) -> None:
        self.rows = rows
        self.model = _make_model(rows, width)
        self.weight: Any = self.model.get_input_embeddings().weight
        self.old = self.weight.data

    def copy(self) -> None:
        self.old.clone()

    def ours(self) -> None:
        undo = ModelSnapshot(self.model)
        new_ids = [self.rows, self.rows + 1]
        grow_embeddings(self.model, self.rows, self.rows + 2, new_ids, None, undo)

    def resize(self) -> None:
        self.model.resize_token_embeddings(self.rows + 2, mean_resizing=False)

    def resize_with_mean(self) -> None:
        self.model.resize_token_embeddings(self.rows + 2, mean_resizing=True)

    def reset(self) -> None:
        for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            module.weight = self.weight
        self.weight.data = self.old

    def timed(self, act: Callable[[], None]) -> dict[str, float]:
        start = time.perf_counter()
        act()
        seconds = time.perf_counter() - start
        self.reset()
        return {"seconds": seconds}

    def peak(self, act: Callable[[], None]) -> float:
        with StorageMeter() as meter:
            act()
        self.reset()
        return meter.peak / 1e6


def _check_device(device: str) -> None:
    if device != "cpu":
        raise ValueError("The area embeddings measures on the CPU only.")


def _time(device: str) -> list[Measure]:
    _check_device(device)
    contest = _Contest(ROWS)
    acts: dict[str, Any] = {"copy": contest.copy, "ours": contest.ours, "peer": contest.resize}

    def bind(act: Callable[[], None]) -> Callable[[], dict[str, float]]:
        return lambda: contest.timed(act)

    found = alternate({name: bind(act) for name, act in acts.items()}, rounds=3)
    ours, peer, copy = (found[name]["seconds"] for name in ("ours", "peer", "copy"))
    return [Measure("2 new rows, beside a resize without mean", "s", ours, peer, copy)]


def _mean(device: str) -> list[Measure]:
    _check_device(device)
    contest = _Contest(ROWS // 4)
    ours, copy = (contest.timed(act)["seconds"] for act in (contest.ours, contest.copy))
    peer = contest.timed(contest.resize_with_mean)["seconds"]
    return [Measure("2 new rows, beside a resize with mean", "s", ours, peer, copy)]


def _memory(device: str) -> list[Measure]:
    _check_device(device)
    contest = _Contest(ROWS)
    ours, peer = contest.peak(contest.ours), contest.peak(contest.resize)
    limit = (ROWS + 2) * WIDTH * 2 / 1e6
    return [Measure("2 new rows, storage at the peak", "MB", ours, peer, limit)]


CASES = {"time": _time, "mean": _mean, "memory": _memory}
