"""Log-probabilities beside those of the whole logits, for heads and architectures of many kinds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    T5Config,
)

from trl_prepare import reference_logprobs

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "tied llama": LlamaConfig(**TINY, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=99, n_positions=32),
    "opt with projections": OPTConfig(
        vocab_size=99, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, do_layer_norm_before=False,
    ),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "mixture of experts": MixtralConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "soft cap": Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0),
    "scaled": CohereConfig(**TINY, logit_scale=0.0625),
    "divided": GraniteConfig(**TINY, logits_scaling=8.0),
}  # fmt: skip


def make_model(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():  # logits large enough for a cap to matter
        model.get_output_embeddings().weight.mul_(20)
    return model.to(dtype).eval()


def make_batch():
    torch.manual_seed(1)
    ids = torch.randint(3, 99, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids, mask


def naive(model, ids, mask):
    with torch.no_grad():
        logprobs = model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
    chosen = logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen * (mask[:, 1:] * mask[:, :-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_the_whole_logits(name):
    model = make_model(name)
    ids, mask = make_batch()
    for chunk_tokens in (1, 5, 512):
        found = reference_logprobs(model, ids, mask, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(found, naive(model, ids, mask), atol=2e-5, rtol=1e-5)
        assert found.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "soft cap", "scaled"])
def test_they_are_those_of_a_bf16_model(name):
    model = make_model(name, torch.bfloat16)
    ids, mask = make_batch()
    found = reference_logprobs(model, ids, mask)
    torch.testing.assert_close(found, naive(model, ids, mask), atol=0.15, rtol=0.02)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt with projections"])
def test_padding_on_the_left_changes_nothing(name):
    model = make_model(name)
    ids, mask = make_batch()
    expected = reference_logprobs(model, ids, mask)
    left = torch.cat([torch.full((3, 4), 1), ids], dim=1)
    left_mask = torch.cat([torch.zeros(3, 4, dtype=torch.long), mask], dim=1)
    found = reference_logprobs(model, left, left_mask)
    assert (found[:, :4] == 0).all()
    torch.testing.assert_close(found[:, 4:], expected, atol=2e-5, rtol=1e-5)


def test_nothing_of_the_call_remains():
    model = make_model("llama")
    model.train()
    model.model.layers[0].eval()
    ids, mask = make_batch()
    before = [module.training for module in model.modules()]
    found = reference_logprobs(model, ids, mask)
    assert [module.training for module in model.modules()] == before
    head = model.get_output_embeddings()
    assert not head._forward_hooks
    assert not head._forward_pre_hooks
    assert not found.requires_grad
    assert model(ids).logits.shape == (3, 11, 99)

    def fail(*arguments):
        raise KeyError("inside")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        reference_logprobs(model, ids, mask)
    handle.remove()
    assert not head._forward_hooks
    assert [module.training for module in model.modules()] == before


class MostRows(TorchDispatchMode):
    """Notes for how many tokens at once a vocabulary of logits is made."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.shape[-1:] == (5000,):
            self.rows = max(self.rows, made.numel() // 5000)
        return made


def test_logits_exist_for_a_chunk_at_a_time():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY | {"vocab_size": 5000}))
    ids = torch.arange(256).reshape(4, 64)
    with MostRows() as seen:
        reference_logprobs(model, ids, torch.ones_like(ids), chunk_tokens=50)
    assert seen.rows == 50
    with MostRows() as seen:
        model(ids)
    assert seen.rows == 256


def test_a_lora_adapter_on_the_head_is_followed():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(make_model("llama"), config)
    ids, mask = make_batch()
    found = reference_logprobs(model, ids, mask)
    with model.disable_adapter():
        without = reference_logprobs(model, ids, mask)
    model.eval()
    torch.testing.assert_close(found, naive(model, ids, mask), atol=2e-5, rtol=1e-5)
    assert (found - without).abs().max() > 0.01


def test_a_compiled_model_is_run_as_it_was_before():
    model = make_model("llama")
    ids, mask = make_batch()
    expected = reference_logprobs(model, ids, mask)
    assert torch.equal(reference_logprobs(torch.compile(model), ids, mask), expected)


def test_what_does_not_fit_is_refused():
    model = make_model("llama")
    ids, mask = make_batch()
    with pytest.raises(ValueError, match=r"\(3, 11\) and attention_mask is \(3, 10\)"):
        reference_logprobs(model, ids, mask[:, 1:])
    with pytest.raises(ValueError, match="not empty"):
        reference_logprobs(model, ids[:0], mask[:0])
    with pytest.raises(ValueError, match="chunk_tokens must be positive, not 0"):
        reference_logprobs(model, ids, mask, chunk_tokens=0)
    with pytest.raises(ValueError, match="LlamaModel is no causal language model"):
        reference_logprobs(model.model, ids, mask)
    tiny = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=99, **tiny))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is no causal"):
        reference_logprobs(t5, ids, mask)


def test_an_unknown_change_of_logits_is_refused():
    class Biased(type(make_model("llama"))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.linspace(0, 3, 99)
            return output

    model = Biased(CONFIGS["llama"])
    with pytest.raises(ValueError, match="in a way that is not known here"):
        reference_logprobs(model, *make_batch())


def test_a_single_token_has_no_logprob():
    ids = torch.tensor([[5]])
    found = reference_logprobs(make_model("llama"), ids, torch.ones_like(ids))
    assert found.shape == (1, 0)


def test_a_temperature_divides_the_logits():
    model = make_model("llama").eval()
    ids = torch.arange(3, 13).reshape(1, 10)
    with torch.no_grad():
        logits = model(ids).logits / 0.7
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    found = reference_logprobs(model, ids, torch.ones_like(ids), temperature=0.7)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"temperature must be positive, not 0\."):
        reference_logprobs(model, ids, torch.ones_like(ids), temperature=0)
