"""Private names of transformers: 4.51 to 5.24 have all of them."""

import copy
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer


def respell(tokenizer: Any, tokens: Mapping[int, AddedToken]) -> Any:
    """Copies a slow transformers tokenizer with other spellings of its added tokens.

    Args:
        tokenizer: A transformers tokenizer written in Python.
        tokens: All added tokens by id, as the copy shall spell them.

    Returns:
        The copy, which shares the vocabulary with the original.
    """
    spelled = {token.content: tokens[i].content for i, token in _added_tokens(tokenizer).items()}
    known = {
        # Some classes let whatever is on this list through their pre-tokenization in one piece.
        "all_special_tokens": [spelled.get(text, text) for text in tokenizer.all_special_tokens],
        # Looked up by the old spelling otherwise.
        "unk_token_id": tokenizer.unk_token_id,
    }
    result = copy.copy(tokenizer)
    kind = type(tokenizer)
    result.__class__ = type(kind.__name__, (kind,), known)
    result._added_tokens_decoder = dict(tokens)
    result._added_tokens_encoder = {token.content: i for i, token in tokens.items()}
    result.tokens_trie = type(tokenizer.tokens_trie)()
    result._update_trie()
    return result


def rename_slow_tokens(tokenizer: Any, new: Mapping[str, AddedToken]) -> None:
    """Gives added tokens of a slow transformers tokenizer other names and flags, in place.

    Args:
        tokenizer: A transformers tokenizer written in Python.
        new: The tokens by the names that they replace.
    """
    tokens = {i: new.get(t.content, t) for i, t in _added_tokens(tokenizer).items()}
    tokenizer._added_tokens_decoder = tokens
    tokenizer._added_tokens_encoder = {token.content: i for i, token in tokens.items()}
    tokenizer.tokens_trie = type(tokenizer.tokens_trie)()
    tokenizer._update_trie()


def replace_backend(tokenizer: Any, backend: Tokenizer) -> None:
    """Puts another tokenizer inside a fast transformers tokenizer."""
    tokenizer._tokenizer = backend


def _added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    return tokenizer._added_tokens_decoder


def grows_plainly(model: Any) -> bool:
    """Tells whether a model's embeddings and output layer are all that grows with a vocabulary.

    Args:
        model: A transformers model.

    Returns:
        False where its class has a way of its own, or layers of kinds of their own.
    """
    from torch import nn

    methods = (model.resize_token_embeddings, model._resize_token_embeddings)
    own = any(m.__module__ != "transformers.modeling_utils" for m in methods)
    head = model.get_output_embeddings()
    plain_head = head is None or isinstance(head, nn.Linear)
    return not own and plain_head and isinstance(model.get_input_embeddings(), nn.Embedding)
