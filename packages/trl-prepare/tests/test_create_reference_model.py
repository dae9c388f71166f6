"""References copied from policies, on one process."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    T5Config,
)

from trl_prepare import create_reference_model

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
CONFIGS = {
    "llama": LlamaConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=3, tie_word_embeddings=False
    ),
    "llama-tied": LlamaConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=3, tie_word_embeddings=True
    ),
    "gpt2": GPT2Config(n_embd=32, n_head=4, vocab_size=99, n_layer=12, n_positions=64),
    "opt": OPTConfig(**SIZES, ffn_dim=64, num_hidden_layers=3, word_embed_proj_dim=16),
    "neox": GPTNeoXConfig(**SIZES, intermediate_size=64, num_hidden_layers=3),
}
LAYER_NAMES = {
    "llama": "model.layers.",
    "llama-tied": "model.layers.",
    "gpt2": "transformer.h.",
    "opt": "model.decoder.layers.",
    "neox": "gpt_neox.layers.",
}
IDS = torch.arange(20).reshape(2, 10)


def make_policy(kind="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).train()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def train_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model):
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return flags, copy.deepcopy(model.state_dict())


def assert_unchanged(model, before):
    flags, tensors = state(model)
    assert flags == before[0]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[1][name])


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_copy_equals_the_policy_and_stays_while_the_policy_trains(kind):
    policy = make_policy(kind)
    before = state(policy)
    reference = create_reference_model(policy)
    assert_unchanged(policy, before)
    assert policy.training
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    original = logits(reference)
    assert torch.equal(original, logits(policy.eval()))
    train_step(policy)
    assert not torch.equal(original, logits(policy))
    assert torch.equal(original, logits(reference))
    assert all(parameter.grad is None for parameter in reference.parameters())
    ours = {parameter.data_ptr() for parameter in reference.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in policy.parameters())


def test_tied_weights_stay_tied_in_the_copy():
    reference = create_reference_model(make_policy("llama-tied"))
    assert reference.lm_head.weight is reference.model.embed_tokens.weight


@pytest.mark.parametrize("kind", CONFIGS)
def test_shared_layers_are_the_policys_own_and_frozen_in_it(kind):
    policy = make_policy(kind)
    reference = create_reference_model(policy, num_shared_layers=2)
    theirs = dict(policy.named_parameters(remove_duplicate=False))
    tied = policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    layers = tuple(f"{LAYER_NAMES[kind]}{number}." for number in (0, 1))
    for name, parameter in reference.named_parameters():
        shared = parameter is theirs[name]
        assert shared != theirs[name].requires_grad, name
        if LAYER_NAMES[kind] in name:
            assert shared == name.startswith(layers), name
        if parameter is reference.get_input_embeddings().weight:
            assert shared != tied
    original = logits(reference)
    train_step(policy)
    assert torch.equal(original, logits(reference))
    assert not torch.equal(original, logits(policy.eval()))


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied"])
def test_weights_tied_across_the_boundary_are_neither_shared_nor_frozen(kind):
    policy = make_policy(kind)
    reference = create_reference_model(policy, num_shared_layers=1)
    head = policy.get_output_embeddings().weight
    assert head.requires_grad
    assert reference.get_output_embeddings().weight is reference.get_input_embeddings().weight
    assert reference.get_output_embeddings().weight is not head
    before = head.detach().clone()
    train_step(policy)
    assert not torch.equal(head, before)


def test_layer_one_is_not_layer_ten():
    policy = nn.Module()
    policy.layers = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in (10, 0, 1)})
    create_reference_model(policy, num_shared_layers=1, pattern="layers.{layer}")
    frozen = [n for n, p in policy.named_parameters() if not p.requires_grad]
    assert {name.split(".")[1] for name in frozen} == {"10", "0"}


def test_zero_shared_layers_share_what_comes_before_the_first():
    policy = make_policy()
    reference = create_reference_model(policy, num_shared_layers=0)
    assert reference.model.embed_tokens.weight is policy.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in policy.model.layers.parameters())


def test_a_pattern_names_the_layers_of_other_architectures():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=99, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, use_cache=False
    )
    policy = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match="pattern must name them"):
        create_reference_model(policy, num_shared_layers=1)
    reference = create_reference_model(policy, 1, "encoder.block.{layer}")
    assert (
        reference.encoder.block[0].layer[0].SelfAttention.q.weight
        is policy.encoder.block[0].layer[0].SelfAttention.q.weight
    )
    assert policy.encoder.block[1].layer[0].SelfAttention.q.weight.requires_grad
    assert policy.shared.weight.requires_grad  # tied to the decoder's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shared_layers": 3}, "No parameter of LlamaForCausalLM is in a layer 3"),
        ({"num_shared_layers": -1}, "No parameter of LlamaForCausalLM is in a layer -1"),
        ({"num_shared_layers": 1, "pattern": "transformer.h.{layer}"}, "'transformer.h.{layer}'"),
        ({"num_shared_layers": 1, "pattern": "model.layers"}, "must contain '{layer}'"),
        ({"pattern": "model.layers.{layer}"}, "without num_shared_layers"),
    ],
)
def test_wrong_layers_are_refused_before_anything_changes(arguments, message):
    policy = make_policy()
    before = state(policy)
    with pytest.raises(ValueError) as error:
        create_reference_model(policy, **arguments)
    assert message in str(error.value)
    assert_unchanged(policy, before)


def test_hooks_and_gradient_checkpointing_are_not_inherited():
    policy = make_policy()
    policy.gradient_checkpointing_enable()
    policy.enable_input_require_grads()
    calls = []
    policy.model.layers[0].register_forward_hook(lambda *_: calls.append("forward"))
    policy.model.layers[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    policy.model.layers[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    reference = create_reference_model(policy)
    assert not reference.is_gradient_checkpointing
    assert policy.is_gradient_checkpointing
    reference.train()  # checkpointing would act in this mode only
    assert not reference(input_ids=IDS).logits.requires_grad
    assert calls == []
    policy(input_ids=IDS, labels=IDS).loss.backward()
    assert {"forward", "pre", "backward"} <= set(calls)


def test_hidden_states_come_out_of_the_copy_of_a_policy_that_gave_them_before():
    policy = make_policy().eval()
    expected = policy(input_ids=IDS, output_hidden_states=True).hidden_states
    reference = create_reference_model(policy)
    for _ in range(2):
        actual = reference(input_ids=IDS, output_hidden_states=True).hidden_states
        assert len(actual) == len(expected) == 4
        assert all(map(torch.equal, actual, expected))


def test_a_peft_policy_gives_a_reference_with_its_adapters():
    policy = peft.get_peft_model(
        make_policy(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    policy.eval()
    reference = create_reference_model(policy)
    assert type(reference) is type(policy)
    assert torch.equal(logits(reference), logits(policy))
    with reference.disable_adapter():
        base = logits(reference)
    assert not torch.equal(base, logits(reference))
    shared = create_reference_model(policy, num_shared_layers=1)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert shared.get_parameter(name) is policy.get_parameter(name)
    assert not policy.get_parameter(name).requires_grad
    assert policy.get_parameter(name.replace("layers.0", "layers.1")).requires_grad


def test_a_compiled_policy_gives_a_plain_reference():
    policy = make_policy()
    reference = create_reference_model(torch.compile(policy))
    assert type(reference) is type(policy)
    assert torch.equal(logits(reference), logits(policy.eval()))


def test_a_plain_module_gives_a_reference():
    policy = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    reference = create_reference_model(policy)
    assert not any(module.training for module in reference.modules())
    assert reference[1].running_mean is not policy[1].running_mean
