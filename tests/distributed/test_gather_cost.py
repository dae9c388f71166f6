"""What `gather_cost` tells, against what gathering then takes."""

import pytest
import torch

from tests.distributed.generation_helpers import prepared, tiny_model, train_step
from tools.bench.measures import StorageMeter
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks

SHARDED = ["zero3", "fsdp1", "fsdp2"]


def tell_and_measure(accelerator):
    import gc

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import gather_cost, unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    found = []
    for _ in range(2):
        with unwrap_model_for_generation(model, accelerator):
            pass  # FSDP makes itself ready
        gc.collect()
        before = engine_snapshot(model)
        with CountCollectives() as none:
            cost = gather_cost(model)
            gather_cost(model, world_size=64)
        assert differences(before, engine_snapshot(model)) == []
        assert not none.counts
        with CountCollectives() as collectives, StorageMeter() as storage:
            with unwrap_model_for_generation(model, accelerator):
                launched = collectives.gathers()
                inner = gather_cost(model)
            assert storage.current() == 0
        assert launched == cost.launches
        found.append((cost, inner, storage.peak))
        train_step(accelerator, model, optimizer)
    return found


@pytest.mark.parametrize("engine", SHARDED)
def test_it_is_what_gathering_then_takes(engine):
    numel = sum(parameter.numel() for parameter in tiny_model().parameters())
    shards = pytest.approx(numel * 4 / 2, rel=0.03)  # fp32, two ranks, some padding
    for found in run_on_ranks(tell_and_measure, engine=engine):
        for cost, inner, peak in found:
            assert cost.parameters == numel
            if engine == "fsdp2":
                # A group's buffer passes while it is copied out, and gloo's threads may hold one
                # for a moment longer.
                needed = cost.peak_bytes - numel * 4 / 2
                assert cost.missing_bytes < needed < cost.missing_bytes * 1.5
                assert cost.missing_bytes < peak < needed * 1.3
            elif engine == "zero3":
                assert cost.peak_bytes - peak == shards
                assert cost.missing_bytes == peak, "nothing is there twice"
            else:  # the largest layer is gathered besides, while it runs
                assert cost.missing_bytes == peak
                assert cost.missing_bytes * 1.5 < cost.peak_bytes - numel * 4 / 2 < numel * 4
                continue
            assert inner.missing_bytes == inner.launches == 0
            assert inner.peak_bytes == pytest.approx(numel * 4 * 3 / 2, rel=0.03)


def cost_of_what_is_not_sharded(accelerator):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from trl_zero3 import gather_cost

    whole = FullyShardedDataParallel(
        tiny_model(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    half = parallelize_module(torch.nn.Linear(100, 100, bias=False), mesh, ColwiseParallel())
    return gather_cost(whole), gather_cost(half)


def test_what_no_engine_gathers_costs_what_is_there():
    numel = sum(parameter.numel() for parameter in tiny_model().parameters())
    for whole, half in run_on_ranks(cost_of_what_is_not_sharded, engine="ddp"):
        assert (whole.parameters, whole.peak_bytes) == (numel, numel * 4)
        assert (half.parameters, half.peak_bytes) == (10000, 20000)
        assert whole.missing_bytes == whole.launches == half.missing_bytes == half.launches == 0


def ask_of_another_size(accelerator):
    from trl_zero3 import gather_cost

    model, _ = prepared(accelerator, tiny_model())
    return [gather_cost(model, world_size=ranks) for ranks in (1, 2, 8)]


@pytest.mark.parametrize("engine", SHARDED)
def test_more_ranks_hold_smaller_shards_and_gather_as_much(engine):
    for alone, two, eight in run_on_ranks(ask_of_another_size, engine=engine):
        assert alone.parameters == two.parameters == eight.parameters
        assert alone.missing_bytes <= two.missing_bytes <= eight.missing_bytes
        assert eight.missing_bytes < alone.missing_bytes * 1.05, "padding"
        saved = alone.peak_bytes - eight.peak_bytes
        assert saved == pytest.approx(alone.parameters * 4 * 7 / 8, rel=0.1)
