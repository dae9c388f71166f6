"""Small real tokenizers, trained on the spot, and tiny models."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from trl_chatformat import ChatTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "user asks, assistant answers; the system says how.",
    "Numbers 1 2 3 and words in a row, row, row.",
] * 20


def make_byte_level_backend() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=325,
        special_tokens=["<|endoftext|>", "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def make_llama_like_backend() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def make_unigram_backend() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return backend


BACKENDS = {
    "byte-level": (make_byte_level_backend, {"eos_token": "<|endoftext|>"}),
    "llama-like": (
        make_llama_like_backend,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "unigram": (
        make_unigram_backend,
        {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
}


@pytest.fixture(params=sorted(BACKENDS))
def backend_and_names(request):
    """A trained `tokenizers.Tokenizer` of each kind, and its named special tokens."""
    make, names = BACKENDS[request.param]
    return make(), dict(names)


@pytest.fixture(params=[*sorted(BACKENDS), "slow"])
def any_tokenizer(request):
    """A transformers tokenizer of each kind."""
    if request.param == "slow":
        return ByT5Tokenizer(extra_ids=3)
    make, names = BACKENDS[request.param]
    return PreTrainedTokenizerFast(tokenizer_object=make(), **names)


@pytest.fixture
def byte_level():
    return make_byte_level_backend()


@pytest.fixture
def llama_like():
    return make_llama_like_backend()


def make_fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<tool>"],
    )


def make_files_alone(backend: Tokenizer) -> ChatTokenizer:
    names = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<tool>"]}
    return ChatTokenizer(backend, names)


def make_slow(backend: Tokenizer) -> ByT5Tokenizer:
    # Written in Python, with no vocabulary file and no `.vocab`.
    return ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<tool>"])


@pytest.fixture(params=[make_fast, make_slow, make_files_alone])
def tokenizer(request, byte_level):
    """A tokenizer of each kind with the extra special token <tool>."""
    return request.param(byte_level)


@pytest.fixture
def fast(byte_level):
    return make_fast(byte_level)


@pytest.fixture
def make_llama():
    """Makes a tiny Llama model."""

    def make(vocab_size=512, tie=True, dtype=torch.float32):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
        return LlamaForCausalLM(config).to(dtype)

    return make


@pytest.fixture(
    params=[
        (BartConfig, BartForConditionalGeneration),
        (PegasusConfig, PegasusForConditionalGeneration),
    ]
)
def encoder_decoder(request):
    """A tiny encoder-decoder model with tied embeddings and a bias on its logits."""
    torch.manual_seed(0)
    make_config, make_model = request.param
    config = make_config(
        vocab_size=325,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    return make_model(config)


@pytest.fixture
def second_layer_fails(monkeypatch):
    """Rows are made for the first layer, and there is no memory for those of the second."""
    drawn = []

    def sample(trained, count):
        if drawn:
            raise RuntimeError("no memory")
        drawn.append(count)
        return torch.full((count, trained.shape[1]), 9.0)

    monkeypatch.setattr("trl_chatformat.embeddings.sample_rows", sample)
    return drawn
