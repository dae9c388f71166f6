"""What setting up a chat format does to models."""

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from trl_chatformat import setup_chat_format
from trl_chatformat.embeddings import sample_rows

OLD_IDS = 325  # of the trained byte-level tokenizer


def weights(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    ("old_rows", "multiple", "rows"),
    [
        (512, None, 512),  # padded: nothing is taken away
        (512, 64, 512),
        (512, 100, 600),
        (325, None, 327),
        (325, 64, 384),
        (326, None, 327),  # one new token lands in a padded row
        (300, None, 327),  # the tokenizer was ahead of the model
    ],
)
def test_rows_grow_to_the_highest_id_and_never_shrink(
    fast, make_llama, tie, old_rows, multiple, rows
):
    model = make_llama(old_rows, tie)
    before = [weight.detach().clone() for weight in weights(model)]
    assert len(fast) == OLD_IDS
    same, _ = setup_chat_format(model, fast, resize_to_multiple_of=multiple)
    assert same is model
    assert max(fast.get_vocab().values()) == OLD_IDS + 1
    new_ids = {OLD_IDS, OLD_IDS + 1}
    kept = [i for i in range(old_rows) if i not in new_ids]
    for old, new in zip(before, weights(model), strict=True):
        assert new.shape == (rows, 32)
        assert torch.equal(new[kept], old[kept])
    assert (weights(model)[0] is weights(model)[1]) == tie
    if rows != old_rows:
        assert model.config.vocab_size == rows
    ids = torch.tensor([fast("The <|im_start|>x<|im_end|>")["input_ids"]])
    output = model(ids, labels=ids)
    assert output.logits.shape[-1] == rows
    assert torch.isfinite(output.loss)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("old_rows", [325, 512])
def test_new_rows_follow_the_trained_ones_and_differ(fast, make_llama, tie, old_rows):
    model = make_llama(old_rows, tie)
    with torch.no_grad():
        for weight in weights(model):
            weight[:OLD_IDS] = 3 + 0.1 * torch.randn(OLD_IDS, 32)
            weight[OLD_IDS:] = 100  # padding that was never trained
    torch.manual_seed(7)
    setup_chat_format(model, fast)
    for weight in weights(model):
        first, second = weight[OLD_IDS], weight[OLD_IDS + 1]
        assert not torch.equal(first, second)
        for row in (first, second):
            assert (row - 3).abs().max() < 0.6
            assert 0.05 < row.std() < 0.2
        assert torch.equal(weight[OLD_IDS + 2 :], torch.full_like(weight[OLD_IDS + 2 :], 100))


def test_rows_are_drawn_with_the_mean_and_covariance_of_the_trained():
    torch.manual_seed(0)
    trained = torch.randn(20_000, 4) @ torch.tensor(
        [[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0, 0.1, 0], [0, 0, 0, 2]]
    ) + torch.tensor([1.0, -2, 0, 5])
    drawn = sample_rows(trained, 4_000)
    assert torch.allclose(drawn.mean(0), trained.mean(0), atol=0.15)
    assert torch.allclose(drawn.T.cov(), trained.T.cov(), atol=0.3)


def test_the_default_dtype_does_not_matter(fast, make_llama):
    model = make_llama(325, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        setup_chat_format(model, fast)
    finally:
        torch.set_default_dtype(torch.float32)
    first, second = weights(model)[0][OLD_IDS:]
    assert not torch.equal(first, second)


def test_new_rows_repeat_with_the_seed(fast, make_llama, byte_level):
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level.to_str()))
    first, second = make_llama(325), make_llama(325)
    torch.manual_seed(5)
    setup_chat_format(first, fast)
    torch.manual_seed(5)
    setup_chat_format(second, other)
    assert torch.equal(weights(first)[0], weights(second)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("old_rows", [325, 512])
def test_modules_parameters_and_dtype_are_kept(fast, make_llama, dtype, old_rows):
    model = make_llama(old_rows, tie=False, dtype=dtype)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = dict(model.named_parameters())
    head.weight.requires_grad_(False)
    calls = []
    head.register_forward_hook(lambda *_: calls.append("head"))
    setup_chat_format(model, fast, resize_to_multiple_of=64)
    assert model.get_input_embeddings() is embedding
    assert model.get_output_embeddings() is head
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {dtype}
    assert not head.weight.requires_grad
    assert embedding.weight.requires_grad
    assert head.out_features == embedding.num_embeddings == head.weight.shape[0]
    model(torch.tensor([[fast.bos_token_id, fast.eos_token_id]]))
    assert calls == ["head"]


def test_an_optimizer_built_before_trains_the_new_rows(fast, make_llama):
    model = make_llama(325, tie=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    setup_chat_format(model, fast)
    before = [weight.detach().clone() for weight in weights(model)]
    ids = torch.tensor([[fast.bos_token_id, 5, fast.eos_token_id]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    for old, new in zip(before, weights(model), strict=True):
        assert not torch.equal(new[fast.bos_token_id], old[fast.bos_token_id])


@pytest.mark.parametrize("tie", [True, False])
def test_gradients_that_are_held_grow_with_their_rows(fast, make_llama, tie):
    model = make_llama(325, tie)
    old_ids = torch.tensor([[5, 6, 7]])
    model(old_ids, labels=old_ids).loss.backward()
    before = [weight.grad.clone() for weight in weights(model)]
    setup_chat_format(model, fast)
    for old, weight in zip(before, weights(model), strict=True):
        assert torch.equal(weight.grad[:325], old)
        assert not weight.grad[325:].any()
    ids = torch.tensor([[fast.bos_token_id, 5, fast.eos_token_id]])
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad[325:].any() for weight in weights(model))


def test_gradients_come_back_after_a_failure(fast, make_llama, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no memory")

    model = make_llama(325, tie=False)
    old_ids = torch.tensor([[5, 6, 7]])
    model(old_ids, labels=old_ids).loss.backward()
    before = [(weight.grad, weight.grad.clone()) for weight in weights(model)]
    monkeypatch.setattr("trl_chatformat.embeddings.make_rows", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        setup_chat_format(model, fast)
    for weight, (gradient, values) in zip(weights(model), before, strict=True):
        assert weight.grad is gradient
        assert torch.equal(weight.grad, values)
        assert weight.shape[0] == 325


def test_an_output_bias_gets_the_mean_for_new_tokens(fast, make_llama):
    model = make_llama(326, tie=False)
    model.lm_head = nn.Linear(32, 326)
    bias = model.lm_head.bias.detach().clone()
    setup_chat_format(model, fast)
    assert model.lm_head.bias.shape == (327,)
    assert torch.equal(model.lm_head.bias[:OLD_IDS], bias[:OLD_IDS])
    assert torch.allclose(model.lm_head.bias[OLD_IDS:], bias[:OLD_IDS].mean())


def test_an_encoder_decoder_model_grows_everywhere_and_stays_tied(fast, encoder_decoder):
    before = encoder_decoder.get_input_embeddings().weight.detach().clone()
    setup_chat_format(encoder_decoder, fast)
    shared = encoder_decoder.get_input_embeddings().weight
    assert shared.shape == (327, 32)
    assert torch.equal(shared[:325], before)
    assert encoder_decoder.get_output_embeddings().weight is shared
    assert encoder_decoder.model.encoder.embed_tokens.weight is shared
    assert encoder_decoder.model.decoder.embed_tokens.weight is shared
    assert encoder_decoder.final_logits_bias.shape == (1, 327)
    ids = torch.tensor([[fast.bos_token_id, 5, fast.eos_token_id]])
    assert torch.isfinite(encoder_decoder(ids, labels=ids).loss)


def test_ids_of_config_and_generation_config_are_set(tokenizer, make_llama):
    model = make_llama(512)
    model.config.eos_token_id = 7
    model.generation_config.eos_token_id = 7
    setup_chat_format(model, tokenizer)
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("times", [1, 2])
def test_of_several_stop_ids_the_new_one_comes_first_and_once(tokenizer, make_llama, times):
    model = make_llama(512)
    model.config.eos_token_id = [9, 7]
    model.generation_config.eos_token_id = [7, 8, 7]
    for _ in range(times):
        tokenizer.chat_template = None
        setup_chat_format(model, tokenizer)
    assert model.config.eos_token_id == [tokenizer.eos_token_id, 9, 7]
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, 7, 8]


def test_a_text_config_inside_gets_ids_and_size(fast):
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 325}
    text |= {"model_type": "llama"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    vision |= {"model_type": "clip_vision_model"}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    model = LlavaForConditionalGeneration(config)
    before = model.get_input_embeddings().weight.detach().clone()
    _, _, added = setup_chat_format(model, fast, return_added_ids=True)
    assert added == [325, 326]
    assert model.config.text_config.vocab_size == 327
    assert model.config.text_config.eos_token_id == model.config.eos_token_id == 326
    assert model.get_input_embeddings().weight.shape[0] == 327
    assert model.get_output_embeddings().weight.shape[0] == 327
    assert torch.equal(model.get_input_embeddings().weight[:325], before)
    ids = torch.tensor([[325, 5, 326]])
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)


def test_rows_of_the_mean(fast, make_llama):
    model = make_llama(512, tie=False)
    setup_chat_format(model, fast, new_rows="mean")
    for weight in weights(model):
        mean = weight[:OLD_IDS].mean(0)
        assert torch.allclose(weight[OLD_IDS : OLD_IDS + 2], mean.expand(2, -1), atol=1e-6)


def test_a_second_set_up_adds_and_changes_nothing(fast, make_llama):
    model = make_llama(325, tie=False)
    setup_chat_format(model, fast)
    storages = [weight.data_ptr() for weight in weights(model)]
    before = [weight.detach().clone() for weight in weights(model)]
    fast.chat_template = None
    _, _, added = setup_chat_format(model, fast, return_added_ids=True)
    assert added == []
    assert [weight.data_ptr() for weight in weights(model)] == storages
    assert all(map(torch.equal, weights(model), before))


def test_a_model_without_a_generation_config_is_set_up(fast, make_llama):
    model = make_llama(325).model
    setup_chat_format(model, fast)
    assert model.get_input_embeddings().weight.shape == (327, 32)
    assert model.config.eos_token_id == fast.eos_token_id


def test_a_vocabulary_with_gaps_is_sized_by_its_highest_id(make_llama):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "d": 9}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    model = make_llama(10)
    setup_chat_format(model, tokenizer)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (10, 11)
    assert model.get_input_embeddings().weight.shape[0] == 12


def test_the_saved_model_loads_with_its_new_rows(fast, make_llama, tmp_path):
    model = make_llama(325, tie=False)
    setup_chat_format(model, fast)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for old, new in zip(weights(model), weights(loaded), strict=True):
        assert torch.equal(old, new)
    assert loaded.config.eos_token_id == fast.eos_token_id
