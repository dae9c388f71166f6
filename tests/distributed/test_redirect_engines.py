"""A redirected loss trains on every engine as one process does on the whole batch."""

import pytest

from tools.rails.ranks import run_on_ranks

ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
KINDS = ["plain", "checkpointed", "compiled", "lora"]


def make_inner(kind):
    import torch
    from torch import nn

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if kind == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        inner[0] = checkpoint_wrapper(inner[0])
    # accelerate 1.6 reads these of any model on FSDP2.
    inner._no_split_modules, inner.dtype = [], torch.float32
    if kind == "compiled":
        inner.compile(backend="eager")
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        inner = get_peft_model(inner, LoraConfig(target_modules=["0"], init_lora_weights=False))
    return inner


def loss_of(inner):
    """Three forwards, and nothing that the module's own forward returns."""
    return lambda chosen, rejected: (
        (inner(chosen) * inner(rejected)).mean() + inner(chosen).square().mean()
    )


def batch(accelerator, step=0):
    """This rank's part of the chosen and the rejected."""
    import torch

    whole = torch.linspace(-1, 1 + step, 2 * 4 * 8).reshape(2, 4, 8)
    return whole.chunk(accelerator.num_processes, dim=1)[accelerator.process_index]


def whole_gradients(wrapper, inner):
    """By name, the gradients of the whole parameters, on every rank."""
    import contextlib

    from torch.distributed.fsdp import FullyShardedDataParallel

    context = contextlib.nullcontext()
    if isinstance(wrapper, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(wrapper, with_grads=True)
    found = {}
    with context:
        trained = [item for item in inner.named_parameters() if item[1].requires_grad]
        for name, parameter in trained:
            gradient = parameter.grad
            if hasattr(wrapper, "zero_optimization"):
                from deepspeed.utils import safe_get_full_grad

                gradient = safe_get_full_grad(parameter)
            if hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
            if gradient is not None:
                clean = [part for part in name.split(".") if not part.startswith("_")]
                found[".".join(clean)] = gradient.detach().float().clone()
    return found


def gradients(accelerator, kind, redirected=True):
    """Of one backward pass: what each rank's parameters get."""
    import torch

    from trl_redirect import ForwardRedirection

    torch.compiler.reset()
    inner = make_inner(kind)
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    wrapper, _ = accelerator.prepare(inner, torch.optim.SGD(trained, lr=0.5))
    inner = accelerator.unwrap_model(wrapper, keep_torch_compile=False)
    loss = loss_of(inner)
    # DeepSpeed trains in bf16 itself, on inputs in bf16.
    inputs = batch(accelerator).to(next(inner.parameters()).dtype)
    context = accelerator.autocast if accelerator.mixed_precision != "no" else None
    if redirected:
        result = ForwardRedirection(context)(wrapper, inner, loss, *inputs)
    else:
        with accelerator.autocast():
            result = loss(*inputs)
    # accelerate's own backward steps at once on DeepSpeed, and the gradients are gone.
    wrapper.backward(result) if hasattr(wrapper, "zero_optimization") else result.backward()
    return whole_gradients(wrapper, inner)


def assert_equal(ranks, expected, **tolerance):
    import torch

    for found in ranks:
        assert found.keys() == expected.keys()
        assert found
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_those_of_one_process(engine, kind):
    (alone,) = run_on_ranks(gradients, engine="single", kind=kind, redirected=False)
    assert_equal(run_on_ranks(gradients, engine=engine, kind=kind), alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_in_mixed_precision_are_those_of_one_process(engine):
    options = {"kind": "plain", "mixed_precision": "bf16"}
    (alone,) = run_on_ranks(gradients, engine="single", redirected=False, **options)
    (exact,) = run_on_ranks(gradients, engine="single", redirected=False, kind="plain")
    assert any(not alone[name].equal(exact[name]) for name in exact)
    assert_equal(run_on_ranks(gradients, engine=engine, **options), alone, rtol=0.05, atol=1e-3)


def gradients_of_ddp(accelerator, options, wrapper_compiled, unsynced):
    """Two backward passes through DistributedDataParallel itself."""
    import contextlib

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from trl_redirect import redirect

    torch.compiler.reset()
    inner = make_inner("plain")
    if options.get("find_unused_parameters"):
        inner.spare = torch.nn.Linear(2, 2)
        inner.forward = lambda x: inner[2](inner[1](inner[0](x)))
    ddp = DistributedDataParallel(inner, **options)
    wrapper = torch.compile(ddp, backend="eager") if wrapper_compiled else ddp
    for step in range(2):
        with ddp.no_sync() if unsynced and step == 0 else contextlib.nullcontext():
            redirect(wrapper, loss_of(inner), *batch(accelerator, step)).backward()
    return whole_gradients(wrapper, inner)


def gradients_of_two_steps(accelerator):
    inner = make_inner("plain")
    for step in range(2):
        loss_of(inner)(*batch(accelerator, step)).backward()
    return whole_gradients(inner, inner)


@pytest.mark.parametrize(
    ("options", "wrapper_compiled", "unsynced"),
    [
        ({}, False, False),
        ({}, False, True),
        ({}, True, False),
        ({"find_unused_parameters": True}, False, False),
        ({"static_graph": True}, False, False),
    ],
    ids=["plain", "no_sync", "compiled", "find_unused_parameters", "static_graph"],
)
def test_gradients_through_ddp_are_those_of_one_process(options, wrapper_compiled, unsynced):
    (alone,) = run_on_ranks(gradients_of_two_steps, engine="single")
    ranks = run_on_ranks(
        gradients_of_ddp,
        engine="ddp",
        options=options,
        wrapper_compiled=wrapper_compiled,
        unsynced=unsynced,
    )
    assert_equal(ranks, alone)


def train(accelerator, redirected):
    """Two steps on a loss of two forwards, each rank with its part of the batch."""
    import torch

    from trl_redirect import ForwardRedirection

    inner = make_inner("plain")
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.5)
    wrapper, optimizer = accelerator.prepare(inner, optimizer)
    inner = accelerator.unwrap_model(wrapper)

    mine = batch(accelerator)
    losses = []
    for _ in range(3):
        if redirected:
            loss = ForwardRedirection()(wrapper, inner, loss_of(inner), *mine)
        else:
            loss = loss_of(inner)(*mine)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert "forward" not in inner.__dict__
    return losses


@pytest.mark.parametrize("engine", ENGINES)
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
