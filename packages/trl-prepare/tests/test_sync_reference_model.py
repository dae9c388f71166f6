"""References that follow their policies, where both are whole."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_prepare import create_reference_model, prepare_reference_model, sync_reference_model


def make_model(seed=0, **settings):
    torch.manual_seed(seed)
    settings = {"hidden_size": 32, "vocab_size": 99, "tie_word_embeddings": False} | settings
    config = LlamaConfig(
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **settings
    )
    return AutoModelForCausalLM.from_config(config)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(reference, policy, alpha):
    return {n: reference[n] * (1 - alpha) + policy[n] * alpha for n in reference}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("alpha", [0, 0.25, 0.6, 1])
def test_every_parameter_moves_once_and_the_policy_stays(alpha, tied):
    policy = make_model(1, tie_word_embeddings=tied)
    reference = make_model(2, tie_word_embeddings=tied).requires_grad_(False)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(policy, reference, alpha)
    assert_equal(weights(reference), moved(start, goal, alpha))
    assert_equal(weights(policy), goal)
    assert not any(p.requires_grad for p in reference.parameters())
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == tied


def test_half_precision_is_mixed_in_float32_and_rounded_once():
    policy, reference = make_model(1), make_model(2).to(torch.bfloat16)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(policy, reference, 0.3)
    wide = {name: value.float() for name, value in start.items()}
    expected = {n: v.to(torch.bfloat16) for n, v in moved(wide, goal, 0.3).items()}
    assert_equal(weights(reference), expected)


def test_large_and_strided_tensors_are_mixed_like_any_other(monkeypatch):
    from trl_prepare import syncing

    monkeypatch.setattr(syncing, "BUCKET_ELEMENTS", 7)
    policy, reference = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    reference.to(memory_format=torch.channels_last)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(policy, reference, 0.4)
    assert_equal(weights(reference), moved(start, goal, 0.4))


def test_shared_layers_are_left_alone_and_the_others_move():
    policy = make_model(1)
    reference = create_reference_model(policy, num_shared_layers=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(policy, reference, 0.5)
    assert_equal(weights(reference), moved(start, goal, 0.5))
    name = "model.layers.0.mlp.up_proj.weight"
    assert reference.get_parameter(name) is policy.get_parameter(name)


def test_a_compiled_policy_is_read_through_its_wrapper():
    policy, reference = make_model(1), make_model(2)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(torch.compile(policy), reference, 0.5)
    assert_equal(weights(reference), moved(start, goal, 0.5))


def test_a_value_head_is_no_part_of_a_plain_reference():
    class WithHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.pretrained_model = make_model(1)
            self.v_head = nn.Linear(32, 1)

    policy, reference = WithHead(), make_model(2)
    start, goal = weights(reference), weights(policy.pretrained_model)
    sync_reference_model(policy, reference, 0.5)
    assert_equal(weights(reference), moved(start, goal, 0.5))
    twin = copy.deepcopy(policy)
    nn.init.ones_(policy.v_head.weight)
    sync_reference_model(policy, twin, 1)
    assert torch.equal(twin.v_head.weight, policy.v_head.weight)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_a_step_outside_of_0_to_1_is_refused(alpha):
    reference = make_model(2)
    start = weights(reference)
    with pytest.raises(ValueError, match="a number between 0 and 1 was expected"):
        sync_reference_model(make_model(1), reference, alpha)
    assert_equal(weights(reference), start)


def test_other_architectures_are_refused_before_anything_moves():
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    reference = make_model(2)
    start = weights(reference)
    larger = make_model(1, vocab_size=100)
    policy = get_peft_model(make_model(1), LoraConfig(target_modules=["q_proj"]))
    for other, text in (
        (larger, r"'model.embed_tokens.weight' of \(99, 32\) and the policy has one of \(100, 32"),
        (nn.Linear(2, 2), "the policy has none of this name"),
        (policy, "a PEFT policy needs a PEFT copy"),
    ):
        with pytest.raises(ValueError, match=text):
            sync_reference_model(other, reference, 0.5)
    assert_equal(weights(reference), start)
    itself = prepare_reference_model(None, Accelerator(cpu=True), policy=policy)
    with pytest.raises(ValueError, match="with its adapters off, which has nothing to move"):
        sync_reference_model(policy, itself, 0.5)


def test_a_peft_copy_follows_with_its_adapters():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    policy = get_peft_model(make_model(1), config)
    reference = create_reference_model(policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
    start, goal = weights(reference), weights(policy)
    sync_reference_model(policy, reference, 0.5)
    assert_equal(weights(reference), moved(start, goal, 0.5))
