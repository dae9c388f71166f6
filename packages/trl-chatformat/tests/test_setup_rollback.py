"""Setting up a chat format happens whole or not at all."""

import copy

import pytest
import torch
from torch import nn

from trl_chatformat import ChatTokenizer, setup_chat_format


def picture_tokenizer(tokenizer):
    names = ("bos", "eos", "pad", "unk")
    tokens = [
        (getattr(tokenizer, f"{n}_token"), getattr(tokenizer, f"{n}_token_id")) for n in names
    ]
    if isinstance(tokenizer, ChatTokenizer):
        special = copy.deepcopy(tokenizer.config)
    else:
        special = tokenizer.all_special_tokens
    return (
        tokens,
        special,
        tokenizer.chat_template,
        tokenizer.get_vocab(),
        len(tokenizer),
        tokenizer.encode("<|im_start|>user <tool>"),
        sorted(vars(tokenizer)),
    )


def picture_model(model):
    return {
        "modules": [
            (name, id(module), dict(vars(module)).keys()) for name, module in model.named_modules()
        ],
        "parameters": [
            (name, id(p), p.data_ptr(), tuple(p.shape), p.requires_grad)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "sizes": [
            (m.num_embeddings, m.padding_idx) if isinstance(m, nn.Embedding) else m.out_features
            for m in (model.get_input_embeddings(), model.get_output_embeddings())
        ],
    }


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_untouched(model, tokenizer, act):
    tokens, picture, state = picture_tokenizer(tokenizer), picture_model(model), values(model)
    act()
    assert picture_tokenizer(tokenizer) == tokens
    assert picture_model(model) == picture
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)


def fail_before(original):
    def resize(*args, **keywords):
        raise RuntimeError("no memory")

    return resize


def fail_after(original):
    def resize(*args, **keywords):
        original(*args, **keywords)
        raise RuntimeError("no memory")

    return resize


def fail_halfway(original):
    def resize(*args, **keywords):
        # What transformers does up to the output layer.
        embedding = original.__self__.get_input_embeddings()
        embedding.weight.data = torch.zeros(400, 32)
        embedding.num_embeddings = 400
        embedding.register_forward_hook(lambda *_: None)
        original.__self__.config.vocab_size = 400
        raise KeyboardInterrupt

    return resize


def do_nothing(original):
    return lambda *args, **keywords: None


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("fault", [fail_before, fail_after, fail_halfway, do_nothing])
def test_a_resize_that_fails_changes_nothing(tokenizer, make_llama, monkeypatch, tie, fault):
    model = make_llama(255, tie)
    monkeypatch.setattr(model, "resize_token_embeddings", fault(model.resize_token_embeddings))

    def act():
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            setup_chat_format(model, tokenizer, resize_to_multiple_of=64)

    check_untouched(model, tokenizer, act)


def test_rows_written_before_a_failure_are_put_back(tokenizer, make_llama, second_layer_fails):
    model = make_llama(512, tie=False)

    def act():
        with pytest.raises(RuntimeError, match="no memory"):
            setup_chat_format(model, tokenizer)
        assert second_layer_fails == [2]

    check_untouched(model, tokenizer, act)


def test_a_config_that_refuses_an_id_changes_nothing(tokenizer, make_llama):
    model = make_llama(512)

    class Strict(type(model.generation_config)):
        def __setattr__(self, name, value):
            if name == "eos_token_id" and value != 2:
                raise TypeError("read-only")
            super().__setattr__(name, value)

    model.generation_config = Strict(bos_token_id=1, eos_token_id=2)

    def act():
        with pytest.raises(TypeError, match="read-only"):
            setup_chat_format(model, tokenizer)

    check_untouched(model, tokenizer, act)


def test_after_a_failure_it_can_be_tried_again(tokenizer, make_llama, monkeypatch):
    model = make_llama(255)
    with monkeypatch.context() as patch:
        patch.setattr(model, "resize_token_embeddings", fail_after(model.resize_token_embeddings))
        with pytest.raises(RuntimeError):
            setup_chat_format(model, tokenizer)
    setup_chat_format(model, tokenizer)
    highest = max(tokenizer.get_vocab().values())
    assert model.get_input_embeddings().weight.shape[0] == highest + 1
    assert tokenizer.eos_token_id == highest


def put_on_meta(model):
    model.to("meta")


def quantize(model):
    weight = model.get_input_embeddings().weight
    quantized = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    model.get_input_embeddings().weight = quantized


def shard(model):
    # As a process that holds no part of the embeddings sees them.
    model.get_input_embeddings().weight = nn.Parameter(torch.empty(0))


def adapt(model):
    model.peft_config = {"default": object()}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put_on_meta, "not loaded"),
        (quantize, "quantized"),
        (shard, "sharded"),
        (adapt, "PEFT.*first"),
    ],
)
def test_models_that_cannot_be_grown_are_refused_untouched(fast, make_llama, change, complaint):
    model = make_llama(512)
    change(model)
    tokens = picture_tokenizer(fast)
    with pytest.raises(ValueError, match=complaint):
        setup_chat_format(model, fast)
    assert picture_tokenizer(fast) == tokens


def test_separate_encoder_and_decoder_embeddings_are_refused(fast, encoder_decoder):
    decoder = encoder_decoder.model.decoder
    decoder.embed_tokens = copy.deepcopy(decoder.embed_tokens)
    tokens, state = picture_tokenizer(fast), values(encoder_decoder)
    with pytest.raises(ValueError, match="tie them first"):
        setup_chat_format(encoder_decoder, fast)
    assert picture_tokenizer(fast) == tokens
    assert all(
        torch.equal(value, state[name]) for name, value in encoder_decoder.state_dict().items()
    )


def test_a_wrapped_model_is_refused_by_name(fast, make_llama):
    tokens = picture_tokenizer(fast)
    with pytest.raises(TypeError, match="DataParallel"):
        setup_chat_format(nn.DataParallel(make_llama(512)), fast)
    assert picture_tokenizer(fast) == tokens
