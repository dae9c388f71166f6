"""PEFT policies that are their own references: what comes back, what is refused."""

import warnings

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_prepare import (
    add_reference_adapter,
    prepare_reference_model,
    reference_context,
    reference_logprobs,
)

IDS = torch.arange(20).reshape(2, 10)


def make_base(seed=0, **settings):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.5,
        **settings,
    )
    return AutoModelForCausalLM.from_config(config)


def make_policy(config=None, seed=0):
    base = make_base(seed)
    torch.manual_seed(seed + 1)
    if config is None:
        config = LoraConfig(
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["lm_head"],
            lora_dropout=0.5,
            init_lora_weights=False,
        )
    return get_peft_model(base, config).train()


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def train(policy, steps=2):
    optimizer = torch.optim.SGD((p for p in policy.parameters() if p.requires_grad), lr=0.5)
    for _ in range(steps):
        policy(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def facts(policy):
    return (
        [(n, p.requires_grad, id(p)) for n, p in policy.named_parameters()],
        [(n, m.training) for n, m in policy.named_modules()],
        [
            (n, m.disable_adapters, list(m.active_adapters))
            for n, m in policy.named_modules()
            if isinstance(getattr(m, "disable_adapters", None), bool)
        ],
        policy.active_adapter,
        sorted(vars(policy)),
    )


def test_inside_the_policy_is_the_base_model_and_afterwards_what_it_was():
    policy = make_policy()
    expected = logits_of(make_base().eval())
    before = facts(policy)
    with reference_context(policy) as reference:
        assert reference is policy
        inside = policy(input_ids=IDS).logits
        assert not any(module.training for module in policy.modules())
    assert torch.equal(inside, expected)
    assert not inside.requires_grad
    assert facts(policy) == before
    assert not torch.equal(logits_of(policy.eval()), expected)


def test_a_body_that_raises_leaves_the_policy_as_it_was():
    policy = make_policy()
    before = facts(policy)
    with pytest.raises(KeyError), reference_context(policy):
        raise KeyError
    assert facts(policy) == before


def test_contexts_nest_and_policies_that_were_off_stay_off():
    policy = make_policy()
    expected = logits_of(make_base().eval())
    with reference_context(policy):
        with reference_context(policy):
            pass
        assert torch.equal(logits_of(policy), expected)
    layers = policy.base_model.model.model.layers
    layers[0].self_attn.q_proj.enable_adapters(False)  # one of them, by hand
    before = facts(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with reference_context(policy):
            pass
    assert facts(policy) == before


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["prompt", "prefix"],
)
def test_learned_prompts_are_off_inside_too(config):
    policy = make_policy(config)
    expected = logits_of(make_base().eval())
    before = facts(policy)
    with reference_context(policy):
        inside = policy(input_ids=IDS).logits
    assert torch.equal(inside, expected)
    assert facts(policy) == before


def test_a_policy_that_starts_from_an_adapter_keeps_that_start_as_its_reference():
    policy = make_policy()
    start = logits_of(policy.eval())
    flags = {name: p.requires_grad for name, p in policy.named_parameters()}
    add_reference_adapter(policy)
    assert policy.active_adapter == "default"
    now = {name: p.requires_grad for name, p in policy.named_parameters()}
    assert {name: now[name] for name in flags} == flags
    added = now.keys() - flags.keys()
    assert added
    assert all(".ref." in f"{name}." and not now[name] for name in added)
    assert torch.equal(logits_of(policy), start)
    train(policy.train())
    before = facts(policy)
    with reference_context(policy):
        inside = policy(input_ids=IDS).logits
        with reference_context(policy):
            assert torch.equal(policy(input_ids=IDS).logits, start)
        assert torch.equal(policy(input_ids=IDS).logits, start)
    assert torch.equal(inside, start)
    assert facts(policy) == before
    assert not torch.equal(logits_of(policy.eval()), start)


def test_the_copy_has_the_dtypes_of_the_adapter_and_leaves_a_pissa_base_alone():
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa", r=4)
    policy = make_policy(config)
    policy.to(torch.bfloat16)
    start = logits_of(policy.eval())
    base = {n: p.clone() for n, p in policy.named_parameters()}
    add_reference_adapter(policy)
    parameters = dict(policy.named_parameters())
    assert all(torch.equal(parameters[name], base[name]) for name in base)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    with reference_context(policy):
        assert torch.equal(logits_of(policy), start)


def test_an_adapter_that_trains_under_the_name_ref_is_no_reference():
    base = make_base()
    policy = get_peft_model(
        base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False), adapter_name="ref"
    )
    with reference_context(policy):
        inside = policy(input_ids=IDS).logits
    assert torch.equal(inside, logits_of(make_base().eval()))


def test_what_is_prepared_from_none_is_called_as_the_policy_and_measured_as_any_reference():
    from accelerate import Accelerator

    policy = make_policy()
    reference = prepare_reference_model(None, Accelerator(cpu=True), policy=policy)
    base = make_base().eval()
    train(policy)
    output = reference(input_ids=IDS, labels=IDS)
    assert torch.equal(output.loss, base(input_ids=IDS, labels=IDS).loss)
    mask = torch.ones_like(IDS)
    expected = reference_logprobs(base, IDS, mask)
    before = facts(policy)
    assert torch.equal(reference_logprobs(reference, IDS, mask), expected)
    assert facts(policy) == before


def refusal(function, *arguments):
    with pytest.raises(ValueError, match=r"\.$") as caught:
        function(*arguments)
    return str(caught.value)


def enter(policy):
    with reference_context(policy):
        pass


def test_what_can_not_be_its_own_reference_is_refused():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert "Neither a reference nor a policy" in refusal(prepare_reference_model, None, accelerator)
    plain = make_base()
    for function, arguments in (
        (enter, (plain,)),
        (add_reference_adapter, (plain,)),
        (prepare_reference_model, (None, accelerator, plain)),
    ):
        assert "LlamaForCausalLM is no PEFT model" in refusal(function, *arguments)
    merged = make_policy()
    merged.merge_adapter()
    assert "call unmerge_adapter first" in refusal(enter, merged)
    biased = make_policy(LoraConfig(target_modules=["q_proj"], bias="lora_only"))
    before = facts(biased)
    for function in (enter, add_reference_adapter):
        assert "bias='lora_only'" in refusal(function, biased)
    assert facts(biased) == before


def test_a_reference_adapter_is_refused_where_it_comes_too_late_or_twice():
    policy = make_policy()
    names = [name for name, _ in policy.named_parameters()]
    assert "before preparing it" in refusal(add_reference_adapter, torch.compile(policy))
    assert [name for name, _ in policy.named_parameters()] == names
    add_reference_adapter(policy)
    assert "adapter named 'ref' already" in refusal(add_reference_adapter, policy)
    several = make_policy(LoraConfig(target_modules=["q_proj"]))
    several.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    several.base_model.set_adapter(["default", "other"])
    assert "['default', 'other']" in refusal(add_reference_adapter, several)
    assert list(several.peft_config) == ["default", "other"]


def test_a_failure_while_copying_takes_the_adapter_back(monkeypatch):
    policy = make_policy()
    before = facts(policy)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add_reference_adapter(policy)
    monkeypatch.undo()
    assert list(policy.peft_config) == ["default"]
    assert facts(policy) == before


def test_a_reference_on_one_device_is_frozen_and_not_saved_with_the_accelerator():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    policy = make_base(1)
    policy = accelerator.prepare(policy)
    model = make_base().train()
    reference = prepare_reference_model(model, accelerator, policy=policy)
    assert reference is model
    assert not any(module.training for module in reference.modules())
    assert not any(p.requires_grad for p in reference.parameters())
    assert accelerator._models == [policy]
    assert prepare_reference_model(reference, accelerator) is reference
    assert "is the policy itself" in refusal(prepare_reference_model, policy, accelerator, policy)
    assert all(p.requires_grad for p in policy.parameters())


def test_a_reference_computes_in_the_policys_mixed_precision():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        reference = prepare_reference_model(make_base(), accelerator)
        twin = accelerator.prepare(make_base()).eval()
        with torch.no_grad():
            expected = twin(input_ids=IDS).logits
            logits = reference(input_ids=IDS).logits
        assert torch.equal(logits, expected)
        assert not torch.equal(logits, logits_of(make_base().eval()))
        assert accelerator._models == [twin]
        forward = reference.forward
        assert prepare_reference_model(reference, accelerator).forward == forward
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
