"""New special tokens in the place of names that a vocabulary keeps in reserve."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from trl_chatformat._transformers_private import rename_slow_tokens, replace_backend
from trl_chatformat.tokenizer_files import ChatTokenizer

# Llama 3, Gemma, BERT, Phi-3 and -4, DeepSeek, Baichuan, InternLM and fairseq name them so.
RESERVED = re.compile(
    r"\W+(?:reserved|unused|dummy|placeholder|place▁holder|madeupword)[\W_a-z]*\d+\W+",
    re.IGNORECASE,
)


def check_reserved(asked: Any) -> None:
    """Refuses what doesn't say which reserved names to reuse with a ValueError."""
    listed = isinstance(asked, Sequence) and not isinstance(asked, str)
    if not isinstance(asked, bool) and not (
        listed and asked and all(isinstance(name, str) for name in asked)
    ):
        raise ValueError(
            f"reuse_reserved={asked!r}: True, False, or a list of the tokenizer's names for "
            "tokens that it doesn't use was expected."
        )


def reuse_reserved_tokens(
    tokenizer: Any, asked: bool | Sequence[str], wanted: Collection[str]
) -> None:
    """Gives tokens that a tokenizer lacks the ids of reserved ones, whose names it loses.

    Args:
        tokenizer: A transformers tokenizer, fast or slow, or a `ChatTokenizer`.
        asked: Whether to take whatever has a reserved name, in the order of ids, or names.
        wanted: The texts of special tokens. Those beyond the reserved ones are left to be added.

    Raises:
        ValueError: There is no reserved name, or one that is asked for is missing or in use.
    """
    vocab = tokenizer.get_vocab()
    missing = [token for token in dict.fromkeys(wanted) if token not in vocab]
    if not asked or not missing:
        return
    used = _find_used(tokenizer) | set(wanted)
    if isinstance(asked, bool):
        found = (name for name in vocab if RESERVED.fullmatch(name) and name not in used)
        names = sorted(found, key=vocab.__getitem__)
        if not names:
            raise ValueError(
                "reuse_reserved=True: no token of this tokenizer has a name such as "
                "`<|reserved_special_token_0|>` or `[unused0]`. List the names to reuse, or leave "
                "it out."
            )
    else:
        names = list(dict.fromkeys(asked))
        for name in names:
            if name not in vocab or name in used:
                state = "is in use" if name in vocab else "is not in the vocabulary"
                raise ValueError(
                    f"reuse_reserved: {name!r} {state}. List names of tokens that the tokenizer "
                    "has and doesn't use."
                )
    new = {
        old: AddedToken(token, special=True, normalized=False)
        for old, token in zip(names, missing, strict=False)
    }
    if isinstance(tokenizer, ChatTokenizer):
        tokenizer.backend_tokenizer = _rename(tokenizer.backend_tokenizer, new)
    elif tokenizer.is_fast:
        replace_backend(tokenizer, _rename(tokenizer.backend_tokenizer, new))
    else:
        rename_slow_tokens(tokenizer, new)
    _rename_listed(tokenizer, {old: token.content for old, token in new.items()})


def _find_used(tokenizer: Any) -> set[str]:
    """Find the names that have a part in how a tokenizer works."""
    if isinstance(tokenizer, ChatTokenizer):
        roles = [value for key, value in tokenizer.config.items() if key.endswith("_token")]
    else:
        roles = list(tokenizer.special_tokens_map.values())
    used = {
        role["content"] if isinstance(role, Mapping) else str(role)
        for role in roles
        if not isinstance(role, list)
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # What a slow tokenizer's own vocabulary holds can't be given another name.
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        return used | (set(tokenizer.get_vocab()) - added)
    state = json.loads(backend.to_str())
    del state["added_tokens"], state["model"]["vocab"]
    for merge in state["model"].pop("merges", []):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        used.update(parts, ["".join(parts)])
    return used.union(_strings(state))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from _strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


def _rename(backend: Tokenizer, new: Mapping[str, AddedToken]) -> Tokenizer:
    def name(text: str) -> str:
        return new[text].content if text in new else text

    state = json.loads(backend.to_str())
    for entry in state["added_tokens"]:
        if entry["content"] in new:
            entry.update(new[entry["content"]].__getstate__())
    vocab = state["model"]["vocab"]
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {name(text): i for text, i in vocab.items()}
    else:
        state["model"]["vocab"] = [[name(text), score] for text, score in vocab]
    renamed = Tokenizer.from_str(json.dumps(state))
    renamed.encode_special_tokens = backend.encode_special_tokens
    return renamed


def _rename_listed(tokenizer: Any, new: Mapping[str, str]) -> None:
    # transformers 5 calls the list "extra_special_tokens", which in 4 is a mapping of names.
    if isinstance(tokenizer, ChatTokenizer):
        listed = tokenizer.config.get("additional_special_tokens") or []
        texts = [e["content"] if isinstance(e, Mapping) else e for e in listed]
        if not new.keys().isdisjoint(texts):
            tokenizer.config["additional_special_tokens"] = [
                new.get(text, entry) for text, entry in zip(texts, listed, strict=True)
            ]
        return
    for attribute in ("additional_special_tokens", "extra_special_tokens"):
        texts = getattr(tokenizer, attribute, None)
        if isinstance(texts, list) and not new.keys().isdisjoint(texts):
            setattr(tokenizer, attribute, [new.get(text, text) for text in texts])
