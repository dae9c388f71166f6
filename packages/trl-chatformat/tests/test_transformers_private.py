"""The private names of transformers that this package relies on."""

import pytest
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast


@pytest.mark.parametrize(
    "name", ["_added_tokens_decoder", "_added_tokens_encoder", "_update_trie", "tokens_trie"]
)
def test_slow_tokenizers_have(name):
    assert hasattr(ByT5Tokenizer(extra_ids=0), name)


def test_fast_tokenizers_have_their_backend_in():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    assert tokenizer._tokenizer is tokenizer.backend_tokenizer
