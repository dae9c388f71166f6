"""References beside a training policy on every engine: their losses, their units, their peace."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]
SHARDED = ["zero3", "fsdp1", "fsdp2"]


def make_policy(kind="untied", dtype="float32"):
    import torch

    model = random_llama(tie_word_embeddings=kind == "tied")
    return model.to(getattr(torch, dtype)).train()


def make_reward_model():
    import torch
    from transformers import AutoModelForSequenceClassification, GPT2Config

    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=99, n_positions=32, num_labels=1, pad_token_id=98
    )
    return AutoModelForSequenceClassification.from_config(config)


def make_plain_module():
    import torch
    from torch import nn

    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def prepare(model, accelerator):
    from trl_prepare import prepare_deepspeed, prepare_fsdp

    engine = accelerator.distributed_type.value
    if engine == "DEEPSPEED":
        return prepare_deepspeed(model, accelerator)
    if engine == "FSDP":
        return prepare_fsdp(model, accelerator)
    return model.to(accelerator.device).eval()


def losses_side_by_side(accelerator, policy, optimizer, reference):
    """Train for two steps; return the policy's and the reference's loss of each in turn."""
    import torch

    ids = torch.arange(20).reshape(2, 10)
    losses = []
    for _ in range(2):
        loss = policy(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), reference(input_ids=ids, labels=ids).loss.item()]
    return losses


def shards(model):
    """Return this rank's part of each parameter."""
    from torch.distributed.fsdp import FSDPModule

    local = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # FSDP2 leaves the last units whole after a forward
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", parameter)
        part = part.to_local() if hasattr(part, "to_local") else part
        local.append(part.detach().clone())
    return local


def settings(accelerator):
    """Return what preparing must leave alone on the accelerator."""
    import copy

    state = accelerator.state
    plugin = getattr(state, "deepspeed_plugin", None) or getattr(state, "fsdp_plugin", None)
    facts = {} if plugin is None else dict(vars(plugin))
    facts["deepspeed_config"] = copy.deepcopy(facts.get("deepspeed_config"))
    return facts, list(accelerator._models), accelerator.mixed_precision


def beside_a_training_policy(accelerator, kind="untied", dtype="float32"):
    import torch
    from engines import whole_state_dict
    from torch.distributed.fsdp import FSDPModule

    from trl_prepare import create_reference_model

    policy = make_policy(kind, dtype)
    reference = create_reference_model(policy)
    # Optimizers come last: under FSDP2 none is needed to prepare a model.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    before = settings(accelerator)
    reference = prepare(reference, accelerator)
    rewarder = prepare(make_reward_model(), accelerator)
    plain = prepare(make_plain_module(), accelerator)
    ids = torch.arange(20, device=accelerator.device).reshape(2, 10)

    def losses(model):
        with torch.no_grad():
            return model(input_ids=ids, labels=ids).loss.item()

    weights = shards(reference)
    first = losses(reference)
    policy_losses = [losses(policy)]
    for number in range(50):
        accelerator.backward(policy(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        if number < 3:
            policy_losses.append(losses(policy))
    with torch.no_grad():
        rewards = rewarder(input_ids=ids).logits.flatten().tolist()
        ones = torch.ones(2, 4, device=accelerator.device, dtype=next(plain.parameters()).dtype)
        features = plain(ones).flatten().tolist()
    return {
        "reference": first,
        "reference later": losses(reference),
        "same shards": all(map(torch.equal, weights, shards(reference))),
        "policy": policy_losses,
        "rewards": rewards,
        "features": features,
        "training": [m.training for m in (reference, rewarder, plain)],
        "modules training": any(module.training for module in reference.modules()),
        "trainable": sum(p.requires_grad for p in reference.parameters()),
        "gradients": sum(p.grad is not None for p in reference.parameters()),
        "dtypes": sorted({str(p.dtype) for p in reference.parameters()}),
        "settings kept": settings(accelerator) == before,
        "again": all(prepare(m, accelerator) is m for m in (reference, rewarder, plain)),
        "units": [
            [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
            for model in (reference, policy, rewarder)
        ],
        "bytes": sum(part.nbytes for part in weights),
        "saved": sorted(whole_state_dict(accelerator, policy) or ()),  # on rank 0 alone
    }


def refuses_a_sharded_policy(accelerator, **settings):
    import torch

    from trl_prepare import create_reference_model

    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    messages = []
    for model in (policy, accelerator.unwrap_model(policy)):
        try:
            create_reference_model(model, **settings)
        except ValueError as error:
            messages.append(str(error))
    ids = torch.arange(20).reshape(2, 10)
    accelerator.backward(policy(input_ids=ids, labels=ids).loss)
    optimizer.step()
    return messages


def from_a_wrapped_policy(accelerator):
    import torch

    from trl_prepare import create_reference_model

    policy = make_policy()
    kind = type(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    reference = create_reference_model(policy)
    try:
        create_reference_model(policy, num_shared_layers=1)
        refused = None
    except ValueError as error:
        refused = str(error)
    losses = losses_side_by_side(accelerator, policy, optimizer, reference)
    return type(reference) is kind, refused, losses


def shared_with_a_policy_prepared_later(accelerator):
    import torch

    from trl_prepare import create_reference_model

    policy = make_policy()
    reference = create_reference_model(policy, num_shared_layers=1)
    optimizer = torch.optim.SGD((p for p in policy.parameters() if p.requires_grad), lr=0.1)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    losses = losses_side_by_side(accelerator, policy, optimizer, reference)
    inner = accelerator.unwrap_model(policy)
    first = inner.model.layers[0].mlp.up_proj.weight
    return first is reference.model.layers[0].mlp.up_proj.weight, losses


def value_head_reference(accelerator):
    import torch
    from torch.distributed.fsdp import FSDPModule

    from trl_prepare import create_reference_model
    from trl_valuehead import AutoModelForCausalLMWithValueHead

    policy = AutoModelForCausalLMWithValueHead.from_pretrained(make_policy()).train()
    reference = create_reference_model(policy)
    same_class = type(reference) is type(policy)
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        logits, _, values = reference(input_ids=ids)
        reference = prepare(reference, accelerator)
        prepared_logits, _, prepared_values = reference(input_ids=ids)
    torch.testing.assert_close(prepared_logits, logits)
    torch.testing.assert_close(prepared_values, values)
    units = [name for name, m in reference.named_modules() if isinstance(m, FSDPModule)]
    return same_class, policy.training, units


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_gives_the_plain_models_losses_and_stays_while_the_policy_trains(engine, kind):
    import torch

    model = make_policy(kind).eval()
    ids = torch.arange(20).reshape(2, 10)
    expected = model(input_ids=ids, labels=ids).loss.item()
    rewards = make_reward_model().eval()(input_ids=ids).logits.flatten().tolist()
    features = make_plain_module().eval()(torch.ones(2, 4)).flatten().tolist()
    ranks = run_on_ranks(beside_a_training_policy, engine=engine, kind=kind)
    for rank in ranks:
        assert rank["reference"] == pytest.approx(expected, rel=1e-5)
        assert rank["policy"][0] == pytest.approx(expected, rel=1e-5)
        assert rank["policy"] == sorted(rank["policy"], reverse=True)
        assert rank["policy"][3] < expected - 0.1
        assert rank["reference later"] == rank["reference"]
        assert rank["same shards"]
        assert rank["rewards"] == pytest.approx(rewards, abs=1e-5)
        assert rank["features"] == pytest.approx(features, abs=1e-5)
        assert not any(rank["training"])
        assert not rank["modules training"]
        assert rank["trainable"] == rank["gradients"] == 0
        assert rank["settings kept"]
        assert rank["again"]
    assert ranks[0]["saved"] == sorted(model.state_dict())
    held = sum(rank["bytes"] for rank in ranks)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if engine in SHARDED:
        assert whole <= held <= 1.1 * whole
    else:
        assert held == whole * len(ranks)
    reference_units, policy_units, reward_units = ranks[0]["units"]
    assert reference_units == policy_units
    if engine == "fsdp2":
        assert {"model.layers.0", "model.layers.1"} <= set(reference_units)
        assert {"transformer.h.0", "transformer.h.1"} <= set(reward_units)


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_a_bf16_reference_stays_bf16_and_gives_the_plain_models_loss(engine):
    import torch

    model = make_policy(dtype="bfloat16").eval()
    ids = torch.arange(20).reshape(2, 10)
    expected = model(input_ids=ids, labels=ids).loss.item()
    for rank in run_on_ranks(
        beside_a_training_policy, engine=engine, mixed_precision="bf16", dtype="bfloat16"
    ):
        assert rank["reference"] == pytest.approx(expected, rel=2**-8)
        assert rank["reference later"] == rank["reference"]
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert rank["same shards"]


def test_a_policy_under_fsdp1_is_refused_with_what_to_do_and_still_trains():
    for messages in run_on_ranks(refuses_a_sharded_policy, engine="fsdp1"):
        assert len(messages) == 2
        assert all("sharded by FSDP1: make the reference before" in text for text in messages)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_sharded_policies_share_no_layers(engine):
    for messages in run_on_ranks(refuses_a_sharded_policy, engine=engine, num_shared_layers=1):
        assert len(messages) == 2
        assert all("leave num_shared_layers out" in text for text in messages)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_a_wrapped_policy_gives_a_plain_reference_and_shares_nothing_that_it_trains(engine):
    for same_class, refused, losses in run_on_ranks(from_a_wrapped_policy, engine=engine):
        assert same_class
        assert refused is not None
        assert "make the reference before wrapping the policy" in refused
        policy, first, later_policy, later = losses
        assert first == later == pytest.approx(policy, rel=1e-5)
        assert later_policy < policy


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_layers_stay_shared_with_a_policy_that_is_prepared_afterwards(engine):
    for shared, losses in run_on_ranks(shared_with_a_policy_prepared_later, engine=engine):
        assert shared
        policy, first, later_policy, later = losses
        assert first == later == pytest.approx(policy, rel=1e-5)
        assert later_policy < policy


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_with_a_value_head_gives_the_plain_models_logits_and_values(engine):
    for same_class, training, units in run_on_ranks(value_head_reference, engine=engine):
        assert same_class
        assert training
        if engine == "fsdp2":
            layers = {f"pretrained_model.model.layers.{number}" for number in (0, 1)}
            assert layers <= set(units)
