"""Generation and training hundreds of times over: nothing grows, nothing wears off."""

import pytest

from tests.distributed.generation_helpers import greedy, prepared, tiny_model, train_step
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks


def held():
    """Return the number of tensors that are alive, and the bytes of their storages."""
    import gc

    import torch

    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    plain = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in plain)}
    return len(tensors), sum(storages.values())


def cycle(accelerator, cycles, gather):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model(), lr=1e-3)

    def generate():
        with unwrap_model_for_generation(model, accelerator, gather) as inside:
            greedy(inside, 1 + accelerator.process_index)

    counts, after_training, memory = [], [], []
    for number in range(cycles):
        with CountCollectives() as generation:
            generate()
        with CountCollectives() as training:
            train_step(accelerator, model, optimizer, seed=number)
        counts.append((dict(generation.counts), dict(training.counts)))
        if number in (3, 4, cycles - 1):
            after_training.append(engine_snapshot(model))
            memory.append(held())
    assert all(count == counts[4] for count in counts[4:])
    second, third, last = after_training
    steps = {line.partition(": ")[0] for line in differences(second, third)}
    grown = [line for line in differences(third, last) if line.partition(": ")[0] not in steps]
    return grown, sorted(steps), memory[1:]


@pytest.mark.parametrize("cycles", [200, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("engine", "gather"), [("zero3", True), ("zero3", False), ("fsdp1", True), ("fsdp2", True)]
)
def test_counts_hooks_and_memory_stay_flat(engine, gather, cycles):
    for grown, steps, (early, late) in run_on_ranks(
        cycle, engine=engine, cycles=cycles, gather=gather, time_limit=600
    ):
        assert grown == []
        assert early == late
        assert len(steps) < 10, steps
