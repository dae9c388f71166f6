"""The rails themselves: ranks really run, failures show, hanging ranks are ended."""

import time

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import RankError, run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]


def train_two_steps(accelerator):
    import torch

    model = random_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(20).reshape(2, 10)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return type(model).__name__, accelerator.num_processes, losses


def raise_on_rank_one(accelerator):
    import torch.distributed

    if accelerator.process_index == 1:
        raise KeyError("only rank one")
    torch.distributed.barrier()


def hang_forever(accelerator):
    time.sleep(1000)


def rank_and_size(accelerator):
    return accelerator.process_index, accelerator.num_processes


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_to_the_same_losses(engine):
    results = run_on_ranks(train_two_steps, engine=engine)
    (wrapper, size, losses) = results[0]
    assert size == len(results) == (1 if engine == "single" else 2)
    assert all(result == results[0] for result in results)
    assert losses == pytest.approx(
        run_on_ranks(train_two_steps, engine="single")[0][2], rel=1e-5
    ), wrapper


def test_a_failing_rank_shows_its_traceback_and_the_next_call_works():
    with pytest.raises(RankError, match=r"rank 1 raised[\s\S]*KeyError: 'only rank one'"):
        run_on_ranks(raise_on_rank_one, engine="ddp")
    assert run_on_ranks(rank_and_size, engine="ddp") == [(0, 2), (1, 2)]


def test_hanging_ranks_are_ended_at_the_time_limit_with_their_stacks():
    started = time.monotonic()
    with pytest.raises(RankError, match=r"within 1 s[\s\S]*hang_forever"):
        run_on_ranks(hang_forever, engine="ddp", time_limit=1, fresh=True)
    assert time.monotonic() - started < 100
