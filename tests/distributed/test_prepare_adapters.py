"""A PEFT policy that is its own reference on every engine, while it trains."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]


def make_policy(start=False):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(
        target_modules=["q_proj", "up_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=not start,
        inference_mode=False,
    )
    return get_peft_model(random_llama(seed=3), config).train()


def train_beside_itself(accelerator, *, call_reference, start=False):
    """Train for three steps; return each step's loss, and the reference's before it and after."""
    import torch

    from trl_prepare import add_reference_adapter, prepare_reference_model, reference_logprobs

    policy = make_policy(start)
    if start:
        add_reference_adapter(policy)
    flags = [p.requires_grad for p in policy.parameters()]
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    reference = prepare_reference_model(None, accelerator, policy=policy)
    ids = torch.arange(20).reshape(2, 10) + accelerator.process_index
    mask = torch.ones_like(ids)
    losses, references, logprobs = [], [], []
    for _ in range(3):
        if call_reference:
            # The very first forward is the reference's: engines remember what they see then.
            references.append(reference(input_ids=ids, labels=ids).loss.item())
            logprobs.append(reference_logprobs(reference, ids, mask).tolist())
        loss = policy(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if call_reference:
        references.append(reference(input_ids=ids, labels=ids).loss.item())
    now = [p.requires_grad for p in accelerator.unwrap_model(policy).parameters()]
    return {
        "losses": losses,
        "references": references,
        "logprobs": logprobs,
        "flags kept": accelerator.unwrap_model(policy).training and now == flags,
    }


def too_late(accelerator):
    import torch

    from trl_prepare import add_reference_adapter

    policy = make_policy()
    optimizer = torch.optim.SGD((p for p in policy.parameters() if p.requires_grad), lr=0.5)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    inner = accelerator.unwrap_model(policy)
    before = [name for name, _ in inner.named_parameters()]
    try:
        add_reference_adapter(policy)
    except ValueError as error:
        return str(error), before == [name for name, _ in inner.named_parameters()]
    return None


def plain_loss(model, rank):
    import torch

    ids = torch.arange(20).reshape(2, 10) + rank
    with torch.no_grad():
        return model.eval()(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_is_where_the_policy_started_and_the_policy_trains_as_without_it(
    engine, start
):
    beside = run_on_ranks(train_beside_itself, engine=engine, call_reference=True, start=start)
    alone = run_on_ranks(train_beside_itself, engine=engine, call_reference=False, start=start)
    for rank, (result, expected) in enumerate(zip(beside, alone, strict=True)):
        began = make_policy(start) if start else random_llama(seed=3)
        loss = plain_loss(began, rank)
        assert result["references"] == pytest.approx([loss] * 4, rel=1e-5)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert result["losses"][0] == pytest.approx(loss, rel=1e-5)
        assert result["losses"][2] < loss - 0.01
        assert result["logprobs"][0] == result["logprobs"][2]
        assert result["flags kept"]


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_a_reference_adapter_is_refused_once_an_engine_has_the_policy(engine):
    for message, unchanged in run_on_ranks(too_late, engine=engine):
        assert "call add_reference_adapter before preparing it" in message
        assert unchanged
