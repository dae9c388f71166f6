"""The private names of transformers that this package relies on."""

import pytest
from transformers import ByT5Tokenizer


@pytest.mark.parametrize(
    "name", ["_added_tokens_decoder", "_added_tokens_encoder", "_update_trie", "tokens_trie"]
)
def test_slow_tokenizers_have(name):
    assert hasattr(ByT5Tokenizer(extra_ids=0), name)
