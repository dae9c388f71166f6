"""Fourteen architectures are set up, tied and untied, in full and in padded vocabularies."""

import pytest
import torch
import transformers

from trl_chatformat import setup_chat_format

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "Llama": SMALL,
    "Mistral": SMALL,
    "Mixtral": SMALL | {"num_local_experts": 2},
    "Qwen2": SMALL,
    "Qwen3": SMALL | {"head_dim": 16},
    "Gemma": SMALL | {"head_dim": 16},
    "Gemma2": SMALL | {"head_dim": 16},
    "Phi": SMALL,  # its output layer has a bias
    "Phi3": SMALL,
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "GPTNeoX": SMALL,
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "OPT": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "GPTJ": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 8},
}
CAUSAL = {"GPT2": "GPT2LMHeadModel"}


def make_model(name, tie, rows):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **ARCHITECTURES[name], vocab_size=rows, tie_word_embeddings=tie
    )
    return getattr(transformers, CAUSAL.get(name, f"{name}ForCausalLM"))(config).eval()


@pytest.mark.parametrize("rows", [325, 384])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_old_ids_mean_what_they_did_and_new_ones_are_trainable(fast, tmp_path, name, tie, rows):
    model = make_model(name, tie, rows)
    old_ids = torch.tensor([[5, 6, 7, 300]])
    with torch.no_grad():
        before = model(old_ids).logits[..., :325]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = dict(model.named_parameters())
    _, _, added = setup_chat_format(model, fast, return_added_ids=True)
    assert added == [325, 326]
    assert model.get_input_embeddings() is embedding
    assert model.get_output_embeddings() is head
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert (embedding.weight is head.weight) == tie
    with torch.no_grad():
        torch.testing.assert_close(model(old_ids).logits[..., :325], before)
    ids = torch.tensor([[325, 5, 326, 6]])
    output = model(ids, labels=ids)
    assert output.logits.shape[-1] == max(rows, 327) == model.config.vocab_size
    output.loss.backward()
    for layer in (embedding, head):
        assert layer.weight.grad.shape == layer.weight.shape
        assert layer.weight.grad[325:327].abs().sum() > 0
    model.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
