"""Ranks that gather together: they refuse together what does not fit, and end together."""

import contextlib

import pytest

from tests.distributed.generation_helpers import greedy, prepared, tiny_model, train_step
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks

GATHERING = ["zero3", "fsdp2"]
SHARDED = ["zero3", "fsdp1", "fsdp2"]


@contextlib.contextmanager
def nearly_full(free):
    """Let this rank's machine have only so many bytes left, shared with the other rank."""
    from types import SimpleNamespace

    import psutil

    original = psutil.virtual_memory
    psutil.virtual_memory = lambda: SimpleNamespace(available=2 * free)
    try:
        yield
    finally:
        psutil.virtual_memory = original


def gather_what_does_not_fit(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import (
        GatherWontFit,
        gather_cost,
        gathered,
        unwrap,
        unwrap_model_for_generation,
    )

    model, optimizer = prepared(accelerator, tiny_model())
    train_step(accelerator, model, optimizer)
    with unwrap_model_for_generation(model, accelerator):
        pass  # FSDP makes itself ready
    before = engine_snapshot(model)
    cost = gather_cost(model)
    free = cost.missing_bytes // 2 if accelerator.process_index == 1 else 10**12
    found = []
    with nearly_full(free):
        with (
            pytest.raises(GatherWontFit, match="check_memory=False") as caught,
            unwrap_model_for_generation(model, accelerator),
        ):
            found.append("the body ran")
        found.append((caught.value.needed, caught.value.free))
        if accelerator.state.deepspeed_plugin is not None:
            with pytest.raises(GatherWontFit), gathered(unwrap(model)):
                found.append("the body ran")
        assert differences(before, engine_snapshot(model)) == []
        with unwrap_model_for_generation(model, accelerator, check_memory=False) as inside:
            greedy(inside)
            # What is there already needs no memory, whatever is free.
            with unwrap_model_for_generation(model, accelerator) as again:
                greedy(again)
    assert differences(before, engine_snapshot(model)) == []
    train_step(accelerator, model, optimizer)
    return found, cost.missing_bytes


@pytest.mark.parametrize("engine", SHARDED)
def test_what_does_not_fit_on_one_rank_is_refused_on_all_with_the_same_figures(engine):
    (found, missing), other = run_on_ranks(gather_what_does_not_fit, engine=engine)
    assert other == (found, missing)
    [(needed, free)] = found
    assert free == missing // 2
    assert needed >= missing


def raise_on_one_rank(accelerator, error):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import gathered, unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(2)]
    with unwrap_model_for_generation(model, accelerator) as inside:
        expected = greedy(inside)
    before = engine_snapshot(model)

    def end_badly(context):
        with context as given:
            if given is not None:
                greedy(given, 1 + 4 * accelerator.process_index)
            if accelerator.process_index == 1:
                raise error

    contexts = [unwrap_model_for_generation(model, accelerator)]
    if accelerator.state.deepspeed_plugin is not None:
        contexts.append(gathered(model))
    for context in contexts:
        with pytest.raises((RuntimeError, error)) as caught:
            end_badly(context)
        if accelerator.process_index == 1:
            assert caught.type is error
        else:
            assert "Rank 1 raised inside of the gathered body" in str(caught.value)
        assert differences(before, engine_snapshot(model)) == []
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert greedy(inside) == expected
    losses += [train_step(accelerator, model, optimizer, seed=step) for step in range(2, 4)]
    return losses


def train(accelerator):
    model, optimizer = prepared(accelerator, tiny_model())
    return [train_step(accelerator, model, optimizer, seed=step) for step in range(4)]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("engine", GATHERING)
def test_a_body_that_raises_on_one_rank_ends_on_all_and_training_goes_on(engine, error):
    results = run_on_ranks(raise_on_one_rank, engine=engine, time_limit=60, error=error)
    assert results == run_on_ranks(train, engine=engine)


def leave_for_good(accelerator, folder):
    """Rank 1 dies inside; what rank 0 then finds is written down, for it is ended with rank 1."""
    import os
    import signal
    from pathlib import Path

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    # The launcher ends the other ranks as soon as it sees that one is gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model, _ = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(model, accelerator):
        pass
    before = engine_snapshot(model)
    try:
        with unwrap_model_for_generation(model, accelerator) as inside:
            if accelerator.process_index == 1:
                os._exit(1)
            greedy(inside)
    except RuntimeError as error:
        changed = differences(before, engine_snapshot(model))
        Path(folder, "found").write_text(f"{error} Changed: {changed}")
    os._exit(1)


@pytest.mark.parametrize("engine", GATHERING)
def test_a_rank_that_dies_inside_does_not_leave_the_others_waiting(engine, tmp_path):
    from tools.rails.ranks import RankError

    with pytest.raises(RankError):
        run_on_ranks(leave_for_good, engine=engine, time_limit=60, fresh=True, folder=str(tmp_path))
    found = (tmp_path / "found").read_text()
    assert found == (
        "Another rank did not reach the end of the gathered body; this rank's engine is as it was "
        "before. Changed: []"
    )


def count_agreements(accelerator):
    from trl_zero3 import gather_cost, unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    launches = gather_cost(model).launches
    found = []
    for _ in range(2):
        train_step(accelerator, model, optimizer)
        with CountCollectives() as collectives:
            with unwrap_model_for_generation(model, accelerator) as inside:
                at_entry = collectives.gathers(), collectives.others()
                greedy(inside)
                # One rank alone may enter again: nothing is missing, so nothing is agreed on.
                if accelerator.process_index == 1:
                    with unwrap_model_for_generation(model, accelerator) as again:
                        greedy(again)
            in_all = collectives.gathers(), collectives.others()
        found.append((at_entry, in_all))
    return launches, found


@pytest.mark.parametrize("engine", GATHERING)
def test_entering_takes_a_gather_for_each_bucket_and_one_agreement_and_leaving_one(engine):
    for gathers, found in run_on_ranks(count_agreements, engine=engine):
        assert found == [((gathers, 1), (gathers, 2))] * 2
        # One bucket; the layers and the rest, which accelerate 1.15 splits once more.
        assert gathers == 1 if engine == "zero3" else gathers in (4, 5)
