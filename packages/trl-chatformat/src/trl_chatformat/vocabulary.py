"""Where special tokens go in a vocabulary: kept where they are, else above every id in use."""

import json
from collections.abc import Collection
from typing import Any

from tokenizers import AddedToken, Tokenizer


def get_highest_id(tokenizer: Any) -> int:
    """Finds the highest id that a tokenizer uses, which `len(tokenizer)` doesn't tell.

    Args:
        tokenizer: Anything with `get_vocab()`.

    Returns:
        The highest id, or -1 for an empty vocabulary.

    Example:
        >>> from tokenizers.models import BPE
        >>> get_highest_id(Tokenizer(BPE({"a": 0, "b": 1, "c": 4}, [])))
        4
    """
    return max(tokenizer.get_vocab().values(), default=-1)


def add_special_tokens(backend: Tokenizer, tokens: Collection[str]) -> None:
    """Makes tokens special; those that the tokenizer lacks get ids above all others.

    Args:
        backend: The tokenizer to change.
        tokens: The texts of the tokens.

    Raises:
        ValueError: The vocabulary leaves no way to give a token an id of its own.

    Example:
        >>> from tokenizers.models import BPE
        >>> tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "c": 4}, []))
        >>> add_special_tokens(tokenizer, ["<s>", "a"])
        >>> tokenizer.token_to_id("<s>"), tokenizer.token_to_id("a")
        (5, 0)
    """
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}  # these keep their other flags
    new = [token for token in dict.fromkeys(tokens) if token not in special]
    add_tokens(backend, [AddedToken(token, special=True, normalized=False) for token in new])


def add_tokens(backend: Tokenizer, tokens: Collection[AddedToken]) -> None:
    """Adds tokens with their flags; those that the tokenizer lacks get ids above all others.

    Args:
        backend: The tokenizer to change.
        tokens: The tokens, each text once.

    Raises:
        ValueError: The vocabulary leaves no way to give a token an id of its own.

    Example:
        >>> from tokenizers.models import BPE
        >>> tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "c": 4}, []))
        >>> add_tokens(tokenizer, [AddedToken("<think>", special=False)])
        >>> tokenizer.token_to_id("<think>")
        5
    """
    vocab = backend.get_vocab()
    highest = max(vocab.values(), default=-1)
    missing = [token.content for token in tokens if token.content not in vocab]
    if missing and len(vocab) <= highest:
        _give_ids_in_model(backend, missing, highest + 1)
    backend.add_tokens(list(tokens))
    ids = {backend.token_to_id(token) for token in missing}
    if len(ids) < len(missing) or any(i is None or i <= highest for i in ids):
        raise ValueError(
            f"The tokens {missing} got ids that other tokens have: the vocabulary has gaps or "
            "duplicates. Give the tokenizer ids without gaps first."
        )


def _give_ids_in_model(backend: Tokenizer, tokens: list[str], first_id: int) -> None:
    # tokenizers numbers added tokens by the vocabulary's length, which is an id in use where the
    # ids have gaps. A token that the model already holds keeps its id when it is added.
    state = json.loads(backend.to_str())
    vocab = state["model"].get("vocab")
    if not isinstance(vocab, dict):
        return  # a Unigram vocabulary is a list: its length is above every id
    vocab.update({token: first_id + i for i, token in enumerate(tokens)})
    backend.model = Tokenizer.from_str(json.dumps(state | {"added_tokens": []})).model


def reserve_slow_ids(tokenizer: Any, tokens: Collection[AddedToken]) -> None:
    """Gives tokens that a slow transformers tokenizer lacks ids above all others.

    Left to itself it numbers them by the vocabulary's length, which may be an id in use.

    Args:
        tokenizer: A transformers tokenizer written in Python.
        tokens: The tokens with their flags.
    """
    vocab = tokenizer.get_vocab()
    next_id = max([*vocab.values(), *tokenizer.added_tokens_decoder], default=-1) + 1
    missing = {token.content: token for token in tokens if token.content not in vocab}
    tokenizer.added_tokens_decoder = {
        next_id + i: token for i, token in enumerate(missing.values())
    }
