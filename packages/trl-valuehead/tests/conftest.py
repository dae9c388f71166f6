"""Tiny random language models of several architectures."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    EncoderDecoderModel,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


BART_SIZES = TOKENS | {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def like_llama(config_class, model_class, **changes):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return model_class(config_class(**(sizes | TOKENS | changes)))


def llama(**changes):
    return like_llama(LlamaConfig, LlamaForCausalLM, num_key_value_heads=1, **changes)


def mixtral():
    return like_llama(MixtralConfig, MixtralForCausalLM, num_key_value_heads=1, num_local_experts=2)


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


def t5(**changes):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**(sizes | TOKENS | {"decoder_start_token_id": 0} | changes))
    )


def bart():
    return BartForConditionalGeneration(BartConfig(**BART_SIZES))


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


def bart_decoder():
    """The decoder alone, without cross-attention: transformers 4 runs it without its body."""
    return BartForCausalLM(BartConfig(**BART_SIZES, is_decoder=True, is_encoder_decoder=False))


def gemma3():
    """Text beside images: the width of the language model is in the configuration's text_config."""
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text | TOKENS,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=60,
            boi_token_index=61,
            eoi_token_index=62,
        )
    )


def falcon():
    return FalconForCausalLM(
        FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **TOKENS)
    )


def bloom():
    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=2, **TOKENS))


def gpt_neox():
    return like_llama(GPTNeoXConfig, GPTNeoXForCausalLM)


def phi():
    return like_llama(PhiConfig, PhiForCausalLM)


def qwen2():
    return like_llama(
        Qwen2Config, Qwen2ForCausalLM, num_key_value_heads=1, tie_word_embeddings=True
    )


def gemma2():
    """Scales its embeddings and caps its logits."""
    return like_llama(Gemma2Config, Gemma2ForCausalLM, num_key_value_heads=1, head_dim=8)


CAUSAL = {
    builder.__name__: builder
    for builder in (
        *(llama, gpt2, opt, mamba, mixtral),
        *(falcon, bloom, gpt_neox, phi, qwen2, gemma2, gemma3, bart_decoder),
    )
}
SEQ2SEQ = {"t5": t5, "bart": bart, "bert_to_bert": bert_to_bert}


def build_model(name, **changes):
    """Build a model by its name here, the same weights each time, in eval mode."""
    torch.manual_seed(0)
    return (CAUSAL | SEQ2SEQ)[name](**changes).eval()


@pytest.fixture
def build():
    return build_model


@pytest.fixture(params=CAUSAL | SEQ2SEQ)
def any_model(request):
    return build_model(request.param)


@pytest.fixture
def input_ids():
    return torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 3, 4]])


@pytest.fixture
def labels():
    return torch.tensor([[20, 21, 22], [23, 24, 25]])
