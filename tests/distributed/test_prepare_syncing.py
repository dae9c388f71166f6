"""References that follow their policies on every engine, to the bit as if both were whole."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]
SHARDED = ["zero3", "fsdp1", "fsdp2"]


def whole_weights(model):
    """Return every parameter whole, by the name that it has in the model inside."""
    import torch
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from trl_zero3 import gathered, unwrap

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            named = model.named_parameters()
            return {n.replace("_fsdp_wrapped_module.", ""): p.clone() for n, p in named}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    inner = unwrap(model)
    with torch.no_grad(), gathered(inner):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in inner.named_parameters()
        }


def differences(found, expected):
    import torch

    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def moved(start, goal, alpha):
    return {
        name: (value.float() * (1 - alpha) + goal[name].float() * alpha).to(value.dtype)
        for name, value in start.items()
    }


def logits_of(model, accelerator):
    import torch

    ids = torch.arange(20, device=accelerator.device).reshape(2, 10)
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def follow(accelerator, kinds, tied=False, dtype="float32", orig_params=True):
    """Sync twice, a training step and forwards of both between; report what differs."""
    import torch

    from tools.rails.collectives import CountCollectives
    from trl_prepare import prepare_reference_model, sync_reference_model

    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.use_orig_params = orig_params
    settings = {"tie_word_embeddings": tied}
    policy = random_llama(seed=1, **settings)
    reference = random_llama(seed=2, **settings).to(getattr(torch, dtype)).requires_grad_(False)
    plain = random_llama(seed=2, **settings).to(getattr(torch, dtype)).eval()
    optimizer = None
    if kinds[0] == "engine":
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
        policy, optimizer = accelerator.prepare(policy, optimizer)
    if kinds[1] == "engine":
        reference = prepare_reference_model(reference, accelerator)
    else:
        reference = reference.eval()
    ids = torch.arange(20, device=accelerator.device).reshape(2, 10)
    wrong, furthest, counts = [], 0.0, []
    for alpha in (0.3, 0.75, 1):
        if optimizer is not None:
            loss = policy(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # After these, some parameters are resident, here as whole ones.
        logits_of(policy, accelerator)
        logits_of(reference, accelerator)
        start, goal = whole_weights(reference), whole_weights(policy)
        with CountCollectives() as collectives:
            sync_reference_model(policy, reference, alpha)
        counts.append(sum(collectives.counts.values()))
        expected = moved(start, goal, alpha)
        found = whole_weights(reference)
        wrong += differences(found, expected) + differences(whole_weights(policy), goal)
        plain.load_state_dict(expected, strict=not tied)
        plain.tie_weights()
        off = logits_of(reference, accelerator) - logits_of(plain, accelerator)
        furthest = max(furthest, off.abs().max().item())
    again = differences(whole_weights(reference), found)
    return {
        "wrong": wrong + again,
        "furthest": furthest,
        "counts": counts,
        "trainable": sum(p.requires_grad for p in reference.parameters()),
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_is_what_the_formula_gives_for_whole_models(engine, tied):
    for rank in run_on_ranks(follow, engine=engine, kinds=("engine", "engine"), tied=tied):
        assert rank["wrong"] == []
        assert rank["furthest"] < 1e-5
        assert rank["trainable"] == 0
        if engine in ("single", "ddp", "zero2", "fsdp2"):
            assert rank["counts"] == [0, 0, 0]
        if engine == "zero3":
            assert rank["counts"] == [0, 1, 1]  # what is resident by then, gathered anew


@pytest.mark.parametrize("kinds", [("engine", "plain"), ("plain", "engine")])
@pytest.mark.parametrize("engine", SHARDED)
def test_one_that_is_whole_and_one_that_is_sharded_agree_on_the_same_bits(engine, kinds):
    for rank in run_on_ranks(follow, engine=engine, kinds=kinds):
        assert rank["wrong"] == []
        assert rank["furthest"] < 1e-5


def test_flat_parameters_of_fsdp1_follow_too():
    for rank in run_on_ranks(follow, engine="fsdp1", kinds=("engine", "engine"), orig_params=False):
        assert rank["wrong"] == []
        assert rank["furthest"] < 1e-5


@pytest.mark.parametrize("engine", SHARDED)
def test_a_bf16_reference_follows_a_policy_in_mixed_precision(engine):
    for rank in run_on_ranks(
        follow,
        engine=engine,
        kinds=("engine", "engine"),
        dtype="bfloat16",
        mixed_precision="bf16",
    ):
        assert rank["wrong"] == []
        assert rank["furthest"] < 0.05


def refused(accelerator):
    import torch

    from trl_prepare import prepare_reference_model, sync_reference_model

    policy = random_llama(seed=1, intermediate_size=48)
    policy, _ = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.1))
    reference = prepare_reference_model(random_llama(seed=2), accelerator)
    before = whole_weights(reference)
    try:
        sync_reference_model(policy, reference, 0.5)
    except ValueError as error:
        return str(error), differences(whole_weights(reference), before)
    return None


@pytest.mark.parametrize("engine", SHARDED)
def test_sharded_models_of_other_shapes_are_refused_before_anything_moves(engine):
    for message, changed in run_on_ranks(refused, engine=engine):
        assert "both must be of one architecture" in message
        assert changed == []
