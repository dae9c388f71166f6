"""Logits, losses and values, against transformers' own hidden states."""

import copy
import threading
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BioGptForCausalLM,
    GPT2Config,
    ReformerModelWithLMHead,
    RobertaPreLayerNormForCausalLM,
    T5Config,
)

from trl_valuehead import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ValueHead,
)


def wrap(base, **options):
    cls = (
        AutoModelForSeq2SeqLMWithValueHead
        if base.config.is_encoder_decoder
        else AutoModelForCausalLMWithValueHead
    )
    torch.manual_seed(1)
    return cls(base, **options)


def hooks(model):
    return {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks)
        for name, module in model.named_modules()
    }


def last_hidden_state(output):
    states = output.get("decoder_hidden_states") or output.hidden_states
    return states[-1]


@pytest.fixture
def arguments(any_model, input_ids, labels):
    seq2seq = any_model.config.is_encoder_decoder
    return {"input_ids": input_ids, "labels": labels if seq2seq else input_ids}


@pytest.mark.parametrize("train", [False, True])
def test_everything_equals_the_language_models_own(any_model, arguments, train):
    model = wrap(any_model).train(train)
    torch.manual_seed(2)
    logits, loss, value = model(**arguments)
    torch.manual_seed(2)
    expected = any_model(**arguments, output_hidden_states=True)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(value, model.v_head(last_hidden_state(expected)).squeeze(-1))
    assert value.shape == arguments["labels"].shape


def without_labels(model, arguments):
    """The same input without labels, from which an encoder-decoder makes its decoder's input."""
    inputs = dict(arguments)
    labels = inputs.pop("labels")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    return inputs


def test_values_alone_are_the_same_values_without_any_logits(any_model, arguments):
    model = wrap(any_model)
    inputs = without_labels(any_model, arguments)
    sizes = []
    head = any_model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    expected = model(**arguments)[2]
    assert sizes.pop() > 0
    logits, loss, value = model(**inputs, values_only=True)
    assert (logits, loss) == (None, None)
    assert torch.equal(value, expected)
    assert sizes == [0]
    handle.remove()
    twin = copy.deepcopy(model)
    value.pow(2).mean().backward()
    twin(**inputs)[2].pow(2).mean().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("option", ["labels", "logits_to_keep", "upcast_logits"])
def test_values_alone_refuse_what_is_for_logits(build, input_ids, option):
    with pytest.raises(ValueError, match="values_only computes no logits"):
        wrap(build("llama"))(input_ids, values_only=True, **{option: 1})


REFORMER = {
    "feed_forward_size": 32,
    "attention_head_size": 8,
    "attn_layers": ["local", "local"],
    "local_attn_chunk_length": 4,
    "axial_pos_shape": (8, 8),
    "axial_pos_embds_dim": (8, 8),
}


@pytest.mark.parametrize(
    ("model_class", "settings"),
    [
        (BioGptForCausalLM, {"num_hidden_layers": 2}),
        (RobertaPreLayerNormForCausalLM, {"num_hidden_layers": 2}),
        (ReformerModelWithLMHead, REFORMER),
    ],
)
def test_values_are_read_where_the_lm_head_reads_also_where_hidden_states_end_before(
    input_ids, model_class, settings
):
    """The last norm is missing in `hidden_states[-1]`: of the first two on transformers 4 alone."""
    config = model_class.config_class(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        max_position_embeddings=64,
        is_decoder=True,
        **settings,
    )
    base = model_class(config).eval()
    model = wrap(base)
    state = base.base_model(input_ids)[0]
    value = model(input_ids)[2]
    assert torch.equal(value, model.v_head(state).squeeze(-1))
    assert torch.equal(model(input_ids, values_only=True)[2], value)
    hidden_states = base(input_ids, output_hidden_states=True).hidden_states
    five = int(transformers.__version__.partition(".")[0]) >= 5
    same = five and model_class is not ReformerModelWithLMHead
    assert torch.equal(hidden_states[-1], state) == same


def test_the_backbone_receives_the_value_loss_gradient(any_model, arguments):
    twin = copy.deepcopy(any_model)
    model = wrap(any_model)
    model(**arguments)[2].pow(2).mean().backward()
    state = last_hidden_state(twin(**arguments, output_hidden_states=True))
    copy.deepcopy(model.v_head)(state).pow(2).mean().backward()
    checked = 0
    for parameter, expected in zip(any_model.parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad)
            checked += bool(expected.grad.abs().sum() > 0)
    assert checked > 5


def test_images_count_for_values_too(build):
    base = build("gemma3")
    for parameter in base.parameters():  # an image's projection starts as zeros
        nn.init.normal_(parameter, std=0.1)
    model = wrap(base)
    inputs = {
        "input_ids": torch.tensor([[61, 60, 60, 60, 60, 62, 5, 6]]),
        "pixel_values": torch.ones(1, 3, 28, 28),
    }
    inputs["token_type_ids"] = (inputs["input_ids"] == 60).long()
    output = base(**inputs, output_hidden_states=True)
    value = model(**inputs)[2]
    assert torch.equal(value, model.v_head(output.hidden_states[-1]).squeeze(-1))
    inputs["pixel_values"] = -inputs["pixel_values"]
    assert not torch.equal(model(**inputs)[2], value)


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


@pytest.mark.parametrize("configured", [False, True])
def test_only_the_last_hidden_state_is_kept_without_gradients(build, input_ids, configured):
    base = build("llama", num_hidden_layers=6)
    base.config.output_hidden_states = configured
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
    for values_only in (False, True):
        model(input_ids, values_only=values_only)
        assert hooks(model) == before
        with pytest.raises(IndexError):
            model(input_ids + 1000, values_only=values_only)
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
