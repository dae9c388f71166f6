"""Redirection through torch's own wrappers. Run as a script, this file is one rank of two."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trl_redirect
from trl_redirect import ForwardRedirection

redirect = ForwardRedirection()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loss_of(model):
    """Two forwards and a scalar: nothing that the module's own forward returns."""
    return lambda x: (model(x) * model(2 * x)).mean()


def batch(rows=4):
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4)


def plain_gradients(x):
    model = Model()
    loss_of(model)(x).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_reduces_what_a_redirected_loss_leaves(options):
    model = Model()
    ddp = DistributedDataParallel(model, **options)
    reduced = []

    def reduce(state, bucket):
        reduced.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, reduce)

    loss_of(model)(batch()).backward()
    assert reduced == []  # a loss taken past the wrapper is never reduced

    model.zero_grad()
    redirect(ddp, model, loss_of(model), batch()).backward()
    assert reduced
    for name, gradient in plain_gradients(batch()).items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)
    assert "forward" not in model.__dict__


@pytest.mark.usefixtures("process_group")
def test_fsdp2_wrapper_is_the_module_itself():
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    redirect(model, model, loss_of(model), batch()).backward()
    for name, gradient in plain_gradients(batch()).items():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), gradient)


@pytest.mark.usefixtures("process_group")
def test_fsdp1_gathers_for_the_function():
    model = Model()
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    by_layer = trl_redirect.redirect(
        wrapped, lambda x: model.second(torch.tanh(model.first(x))), batch()
    )
    torch.testing.assert_close(by_layer, Model()(batch()))
    redirect(wrapped, model, loss_of(model), batch()).backward()
    for name, gradient in plain_gradients(batch()).items():
        torch.testing.assert_close(model.get_parameter(name).grad.reshape(gradient.shape), gradient)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_model_runs_each_new_function_and_its_own_forward_afterwards(in_place, warm):
    torch.compiler.reset()
    model = Model()
    if in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    if warm:  # the graph of the real forward is in the cache before the first redirection
        compiled(batch())
    for factor in range(10):  # more new functions than torch.compile's recompilation limit
        result = redirect(compiled, model, lambda x, f=factor: loss_of(model)(x) * f, batch())
        torch.testing.assert_close(result, loss_of(model)(batch()) * factor)
        torch.testing.assert_close(compiled(batch()), Model()(batch()))
    redirect(compiled, model, loss_of(model), batch()).backward()
    for name, gradient in plain_gradients(batch()).items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)
    torch.compiler.reset()


def test_gradients_of_two_ranks_are_their_mean(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, __file__, str(tmp_path)], check=True, timeout=120)
    halves = [plain_gradients(half) for half in batch(8).chunk(2)]
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, (halves[0][name] + halves[1][name]) / 2)


def run_rank(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, model = dist.get_rank(), Model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    redirect(ddp, model, loss_of(model), batch(8).chunk(2)[rank]).backward()
    gradients = {
        name: p.grad for name, p in model.named_parameters() if not name.startswith("spare")
    }
    torch.save(gradients, f"{folder}/{rank}.pt")
    del ddp  # its reducer must not outlive the process group: the two can deadlock at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_rank(sys.argv[1])
