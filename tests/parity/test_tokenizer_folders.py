"""Folders that transformers 5 saved, set up file to file, and read by transformers 4.51 and 5."""

import pytest

from tools.rails.ranks import run_on_ranks
from tools.rails.real_tokenizers import smollm2
from trl_chatformat import FORMAT_MAPPING, prepare_tokenizer_files

TEXTS = ["Hello, world", " two  spaces\nIn 2024", "你好 🙂", "<|im_start|>user\nHi<|im_end|>\n"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def read(folder, template):
    """Load a folder with the transformers of this environment; return what it does."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        return str(error)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False) if template else ""
    return {
        "ids": [tokenizer(text)["input_ids"] for text in [*TEXTS, chat]],
        "vocabulary": tokenizer.get_vocab(),
        "special": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token],
    }


@pytest.mark.full
@pytest.mark.parametrize("legacy", [False, True])
def test_both_versions_give_the_same_ids(tmp_path, legacy):
    base = tmp_path / "base"
    smollm2().save_pretrained(base)
    prepared = [base]
    for name in FORMAT_MAPPING:
        prepare_tokenizer_files(base, tmp_path / name, name, legacy=legacy, pad_token="distinct")
        prepared.append(tmp_path / name)
    reused = ["<jupyter_start>", "<issue_start>"]  # and the other three grow
    added = prepare_tokenizer_files(
        base, tmp_path / "reused", "llama3", legacy=legacy, reuse_reserved=reused
    )
    assert sum(i < len(smollm2()) for i in added) == 2
    prepared.append(tmp_path / "reused")
    for folder in prepared:
        new, old = (
            run_on_ranks(
                read,
                engine=None,
                environment=environment,
                folder=str(folder),
                template=folder != base,
            )[0]
            for environment in (None, "oldest")
        )
        if folder == base:
            assert "TokenizersBackend does not exist" in old  # what this is about
        else:
            assert new == old
            assert len(new["ids"][-1]) > 5
