"""Logits, losses and values, against transformers' own hidden states."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import GPT2Config, T5Config

from trl_valuehead import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ValueHead,
)

CAUSAL = ["llama", "gpt2", "opt", "mamba", "mixtral"]
SEQ2SEQ = ["t5", "bart", "bert_to_bert"]


def wrap(base, **options):
    cls = (
        AutoModelForSeq2SeqLMWithValueHead
        if base.config.is_encoder_decoder
        else AutoModelForCausalLMWithValueHead
    )
    torch.manual_seed(1)
    return cls(base, **options)


def hooks(model):
    return {name: len(module._forward_hooks) for name, module in model.named_modules()}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_equals_the_language_model_and_its_last_hidden_state(build, input_ids, name, train):
    base = build(name)
    model = wrap(base).train(train)
    torch.manual_seed(2)
    logits, loss, value = model(input_ids, labels=input_ids)
    torch.manual_seed(2)
    expected = base(input_ids, labels=input_ids, output_hidden_states=True)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(value, model.v_head(expected.hidden_states[-1]).squeeze(-1))
    assert value.shape == input_ids.shape


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_seq2seq_equals_the_model_and_the_last_decoder_state(build, input_ids, labels, name, train):
    base = build(name)
    model = wrap(base).train(train)
    torch.manual_seed(2)
    logits, loss, value = model(input_ids, labels=labels)
    torch.manual_seed(2)
    expected = base(input_ids, labels=labels, output_hidden_states=True)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(value, model.v_head(expected.decoder_hidden_states[-1]).squeeze(-1))
    assert value.shape == labels.shape


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "t5", "bart"])
def test_the_backbone_receives_the_value_loss_gradient(build, input_ids, labels, name):
    base = build(name)
    twin = copy.deepcopy(base)
    model = wrap(base)
    seq2seq = base.config.is_encoder_decoder
    arguments = {"labels": labels} if seq2seq else {}
    _, _, value = model(input_ids, **arguments)
    value.pow(2).mean().backward()
    output = twin(input_ids, output_hidden_states=True, **arguments)
    states = output.decoder_hidden_states if seq2seq else output.hidden_states
    copy.deepcopy(model.v_head)(states[-1]).pow(2).mean().backward()
    checked = 0
    for parameter, expected in zip(base.parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad)
            checked += bool(expected.grad.abs().sum() > 0)
    assert checked > 5


def test_gradient_checkpointing_keeps_values_and_gradients(build, input_ids):
    plain, checkpointed = wrap(build("llama")).train(), wrap(build("llama")).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    assert checkpointed.is_gradient_checkpointing
    values = [model(input_ids)[2] for model in (plain, checkpointed)]
    assert torch.equal(*values)
    for value in values:
        value.sum().backward()
    gradients = [model.get_input_embeddings().weight.grad for model in (plain, checkpointed)]
    torch.testing.assert_close(*gradients)
    checkpointed.gradient_checkpointing_disable()
    assert not checkpointed.is_gradient_checkpointing


def test_only_the_last_hidden_state_is_kept_without_gradients(build, input_ids):
    base = build("llama", num_hidden_layers=6)
    model = wrap(base)
    states, alive = [], []

    def note(module, args, output):
        states.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

    for layer in base.model.layers:
        layer.register_forward_hook(note)
    base.lm_head.register_forward_hook(
        lambda *_: alive.extend(state() is not None for state in states)
    )
    with torch.no_grad():
        model(input_ids)
    assert len(alive) == 6
    assert not any(alive[:-1])


def test_no_hook_is_left(build, input_ids):
    base = build("llama")
    model = wrap(base)
    before = hooks(model)
    model(input_ids)
    assert hooks(model) == before
    with pytest.raises(IndexError):
        model(input_ids + 1000)
    assert hooks(model) == before


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_half_precision_logits_are_copied_to_fp32_only_on_request(build, input_ids, labels, name):
    model = wrap(build(name).to(torch.bfloat16))
    arguments = {"labels": labels} if name == "t5" else {}
    assert model.v_head.summary.weight.dtype == torch.float32
    logits, _, value = model(input_ids, **arguments)
    assert logits.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    upcast = model(input_ids, upcast_logits=True, **arguments)[0]
    assert upcast.dtype == torch.float32
    assert torch.equal(upcast, logits.float())


@pytest.mark.parametrize("return_dict", [False, True])
def test_return_dict_makes_no_difference(build, input_ids, labels, return_dict):
    for name, arguments in (("llama", {}), ("gpt2", {}), ("t5", {"labels": labels})):
        model = wrap(build(name))
        expected = model(input_ids, **arguments)
        result = model(input_ids, return_dict=return_dict, output_hidden_states=True, **arguments)
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[2], expected[2])


def test_inputs_embeds_give_the_same(build, input_ids):
    model = wrap(build("llama"))
    expected = model(input_ids)
    result = model(inputs_embeds=model.get_input_embeddings()(input_ids))
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[2], expected[2])


def test_past_key_values_continue_where_they_end(build, input_ids):
    model = wrap(build("llama"))
    logits, _, value = model(input_ids)
    first = model(input_ids[:, :3], return_past_key_values=True, use_cache=True)
    assert len(first) == 4
    rest = model(
        input_ids[:, 3:],
        past_key_values=first[3],
        attention_mask=torch.ones_like(input_ids),
    )
    torch.testing.assert_close(torch.cat([first[0], rest[0]], 1), logits)
    torch.testing.assert_close(torch.cat([first[2], rest[2]], 1), value)


def test_logits_to_keep_slices_logits_and_not_values(build, input_ids):
    model = wrap(build("llama"))
    logits, _, value = model(input_ids)
    kept, _, whole = model(input_ids, logits_to_keep=1)
    torch.testing.assert_close(kept, logits[:, -1:])
    assert torch.equal(whole, value)


def test_padding_on_the_left_is_masked(build, input_ids):
    model = wrap(build("gpt2"))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    changed = input_ids.clone()
    changed[0, :2] = 33
    first, second = (model(ids, attention_mask=mask)[2] for ids in (input_ids, changed))
    torch.testing.assert_close(first[0, 2:], second[0, 2:])


def test_values_are_the_same_twice_in_train_mode(build, input_ids):
    model = wrap(build("llama")).train()
    assert torch.equal(model(input_ids)[2], model(input_ids)[2])
    assert isinstance(model.v_head.dropout, nn.Identity)


def test_dropout_comes_from_the_keyword_then_the_configuration():
    config = GPT2Config(n_embd=8)
    assert isinstance(ValueHead(config).dropout, nn.Identity)
    assert ValueHead(config, summary_dropout_prob=0.3).dropout.p == 0.3
    config.summary_dropout_prob = 0.2
    assert ValueHead(config).dropout.p == 0.2
    assert isinstance(ValueHead(config, summary_dropout_prob=0.0).dropout, nn.Identity)


def test_normal_initialisation_has_the_range_that_was_asked_for():
    torch.manual_seed(0)
    config = T5Config(d_model=4096)
    head = ValueHead(config, v_head_init_strategy="normal", v_head_initializer_range=0.05)
    assert head.summary.weight.std().item() == pytest.approx(0.05, rel=0.1)
    assert head.summary.bias.item() == 0
    default = ValueHead(config, v_head_init_strategy="normal")
    assert default.summary.weight.std().item() == pytest.approx(0.2, rel=0.1)
    with pytest.raises(ValueError, match="'normal'"):
        ValueHead(config, v_head_init_strategy="uniform")


def test_threads_that_share_a_model_get_their_own_values(build):
    model = wrap(build("llama"))
    inputs = [torch.full((1, length), length) for length in range(2, 10)]
    expected = [model(ids)[2] for ids in inputs]
    results = {}

    def work(number):
        for _ in range(10):
            results[number] = model(inputs[number])[2]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, value in enumerate(expected):
        assert torch.equal(results[number], value)


def test_compiled_wrapper_gives_the_same(build, input_ids):
    model = wrap(build("llama"))
    expected = model(input_ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        result = compiled(input_ids)
        torch.testing.assert_close(result[0], expected[0])
        torch.testing.assert_close(result[2], expected[2])
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_is_the_language_models_own(build, input_ids, name):
    base = build(name)
    model = wrap(base)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(input_ids, **options), base.generate(input_ids, **options))
