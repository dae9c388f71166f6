"""`clone_chat_template` beside TRL 1.16's, on the same model and tokenizers."""

import importlib

import pytest

from tools.rails.models import random_llama
from tools.rails.peers import run_both

TEXTS = ["Hello, world", " two  spaces", "<|im_start|>user\nHi<|im_end|>\n", "<think>x</think>"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
MODULES = {"ours": "trl_chatformat", "trl": "trl"}


def make_tokenizer(texts, **names):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(dict.fromkeys(names.values())),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def clone(library, folder, tied, multiple):
    """Return what a model and a tokenizer are after the call."""
    import torch
    from tokenizers import AddedToken

    source = make_tokenizer(TEXTS, eos_token="<|im_end|>", pad_token="<|pad|>")
    source.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<think>")])
    source.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    source.save_pretrained(folder)
    tokenizer = make_tokenizer(TEXTS[:2], eos_token="</s>")
    model = random_llama(vocab_size=len(tokenizer), tie_word_embeddings=tied)
    old = model.get_input_embeddings().weight.detach().clone()
    function = importlib.import_module(MODULES[library]).clone_chat_template
    model, tokenizer, added = function(model, tokenizer, folder, resize_to_multiple_of=multiple)
    rows = model.get_input_embeddings().weight
    written = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return {
        "template": tokenizer.chat_template,
        "ids": [tokenizer(text)["input_ids"] for text in [*TEXTS, written]],
        "written": written,
        "eos": (
            tokenizer.eos_token,
            model.config.eos_token_id,
            model.generation_config.eos_token_id,
        ),
        "added": list(added),
        "rows": len(rows),
        "old rows kept": torch.equal(rows[: len(old)], old),
        "tied": model.lm_head.weight is rows,
        "pad": tokenizer.pad_token,
    }


@pytest.mark.full
@pytest.mark.parametrize("multiple", [None, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_templates_ids_and_rows_are_the_same(tmp_path, tied, multiple):
    ours, theirs = run_both(
        clone,
        environment="peer-new",
        folder=str(tmp_path / "source"),
        tied=tied,
        multiple=multiple,
    )
    for key in ("template", "ids", "written", "eos", "rows", "old rows kept", "tied"):
        assert ours[key] == theirs[key], key
    assert ours["old rows kept"]
    assert len(ours["added"]) == 4
    # TRL gives padded rows tokens too, and doesn't take the pad token over.
    assert theirs["added"][:4] == ours["added"]
    assert (ours["pad"], theirs["pad"]) == ("<|pad|>", None)
