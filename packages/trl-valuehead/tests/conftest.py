"""Tiny random language models of several architectures."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(**changes):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | TOKENS | changes)))


def gpt2(**changes):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**(sizes | TOKENS | changes)))


def opt():
    """As OPT-350m: the last hidden state is projected down to the embeddings' width."""
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=16,
            word_embed_proj_dim=8,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            do_layer_norm_before=False,
            **TOKENS,
        )
    )


def mamba():
    return MambaForCausalLM(
        MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, **TOKENS)
    )


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
            max_position_embeddings=64,
            **TOKENS,
        )
    )


def t5(**changes):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**(sizes | TOKENS | {"decoder_start_token_id": 0} | changes))
    )


def bart():
    return BartForConditionalGeneration(
        BartConfig(
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=64,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            **TOKENS,
        )
    )


def bert_to_bert():
    """A composite: its decoder is a causal language model, wider than its encoder."""
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    } | TOKENS
    encoder = BertModel(BertConfig(hidden_size=16, **sizes))
    decoder = BertLMHeadModel(
        BertConfig(hidden_size=24, is_decoder=True, add_cross_attention=True, **sizes)
    )
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id = 1
    model.config.pad_token_id = 0
    return model


CAUSAL = {"llama": llama, "gpt2": gpt2, "opt": opt, "mamba": mamba, "mixtral": mixtral}
SEQ2SEQ = {"t5": t5, "bart": bart, "bert_to_bert": bert_to_bert}


@pytest.fixture
def build():
    """Builds a model by its name here, the same weights each time, in eval mode."""

    def build(name, **changes):
        torch.manual_seed(0)
        return (CAUSAL | SEQ2SEQ)[name](**changes).eval()

    return build


@pytest.fixture
def input_ids():
    return torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 3, 4]])


@pytest.fixture
def labels():
    return torch.tensor([[20, 21, 22], [23, 24, 25]])
