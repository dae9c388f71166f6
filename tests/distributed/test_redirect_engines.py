"""A redirected loss trains on every engine as one process does on the whole batch."""

import pytest

from tools.rails.ranks import run_on_ranks


def train(accelerator, redirected):
    """Two steps on a loss of two forwards, each rank with its part of the batch."""
    import torch
    from torch import nn

    from trl_redirect import ForwardRedirection

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inner._no_split_modules = []  # accelerate 1.6 reads it of any model on FSDP2
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.5)
    wrapper, optimizer = accelerator.prepare(inner, optimizer)
    inner = accelerator.unwrap_model(wrapper)

    def loss_of(chosen, rejected):
        return (inner(chosen) * inner(rejected)).mean() + inner(chosen).square().mean()

    batch = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8)
    mine = batch.chunk(accelerator.num_processes, dim=1)[accelerator.process_index]
    losses = []
    for _ in range(3):
        if redirected:
            loss = ForwardRedirection()(wrapper, inner, loss_of, *mine)
        else:
            loss = loss_of(*mine)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert "forward" not in inner.__dict__
    return losses


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_losses_are_those_of_one_process(engine):
    (alone,) = run_on_ranks(train, engine="single", redirected=False)
    assert alone[2] < alone[0]
    for losses in run_on_ranks(train, engine=engine, redirected=True):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_without_redirection_the_ranks_of_ddp_drift_apart():
    (alone,) = run_on_ranks(train, engine="single", redirected=False)
    losses = run_on_ranks(train, engine="ddp", redirected=False)[0]
    assert losses[0] == pytest.approx(alone[0], rel=1e-4)
    assert losses[2] != pytest.approx(alone[2], rel=1e-3)


def autocast(accelerator):
    """The dtype of a product in the function, without and with accelerate's autocast around it."""
    import torch
    from torch import nn

    from trl_redirect import ForwardRedirection

    wrapper = accelerator.prepare(nn.Linear(4, 4))
    inner = accelerator.unwrap_model(wrapper)

    def product(x):
        return x @ x.T

    x = torch.ones(2, 4)
    plain = ForwardRedirection()(wrapper, inner, product, x).dtype
    context = ForwardRedirection(accelerator.autocast)(wrapper, inner, product, x).dtype
    return str(plain), str(context), str(wrapper(x).dtype), "forward" in inner.__dict__


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_accelerates_autocast_applies_through_a_context(engine):
    for plain, context, own, patched in run_on_ranks(
        autocast, engine=engine, mixed_precision="bf16"
    ):
        assert plain == "torch.float32"
        assert context == "torch.bfloat16"
        assert own == "torch.float32"  # accelerate's own forward is back: it converts its output
        assert patched
