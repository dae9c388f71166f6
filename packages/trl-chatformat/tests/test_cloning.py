"""A chat template is taken over from another tokenizer, with what it needs and no more."""

import os
import subprocess
import sys

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trl_chatformat import ChatTokenizer, clone_chat_template, encode_chat, setup_chat_format

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


@pytest.fixture
def source(llama_like):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=llama_like, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    setup_chat_format(None, tokenizer, format="llama3")
    return tokenizer


def test_template_tokens_and_flags_are_taken(any_tokenizer, source):
    before = any_tokenizer.get_vocab()
    _, same, added = clone_chat_template(None, any_tokenizer, source)
    assert same is any_tokenizer
    vocab = any_tokenizer.get_vocab()
    assert added == sorted(set(vocab.values()) - set(before.values()))
    assert all(vocab[token] == i for token, i in before.items())
    assert any_tokenizer.chat_template == source.chat_template
    for name in ("bos_token", "eos_token", "pad_token"):
        assert getattr(any_tokenizer, name) == getattr(source, name)
    assert "<|start_header_id|>" in any_tokenizer.all_special_tokens
    assert "<think>" not in any_tokenizer.all_special_tokens
    thought = any_tokenizer.encode("a<think>b", add_special_tokens=False)
    assert vocab["<think>"] in thought
    assert any_tokenizer.bos_token_id not in any_tokenizer("Hi")["input_ids"]
    ids = encode_chat(any_tokenizer, TURNS).input_ids
    assert ids.count(any_tokenizer.bos_token_id) == 1
    assert ids.count(any_tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_grows_and_gets_ids(fast, make_llama, source, tie):
    model = make_llama(325, tie)
    old = model.get_input_embeddings().weight.detach().clone()
    same, _, added = clone_chat_template(model, fast, source)
    assert same is model
    weight = model.get_input_embeddings().weight
    assert weight.shape[0] == -(-(max(added) + 1) // 64) * 64
    assert model.config.vocab_size == weight.shape[0]
    assert torch.equal(weight[:325], old)
    assert len(torch.unique(weight[325:], dim=0)) == weight.shape[0] - 325
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == fast.eos_token_id
        assert config.pad_token_id == fast.pad_token_id


def test_a_source_can_be_a_name_on_the_hub(fast, source, tmp_path):
    # As if it had been fetched before: a hub's cache holds each commit's files in a folder.
    cached = tmp_path / "home" / "hub" / "models--somebody--chatty"
    source.save_pretrained(cached / "snapshots" / "0123abcd")
    (cached / "snapshots" / "0123abcd" / "config.json").write_text('{"model_type": "gpt_neox"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    fast.save_pretrained(tmp_path / "base")
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        "from trl_chatformat import clone_chat_template\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "_, tokenizer, added = clone_chat_template(None, tokenizer, 'somebody/chatty')\n"
        "print(tokenizer.eos_token, *added)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "base"],
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, added = clone_chat_template(None, fast, source)
    assert done.stdout.split() == [source.eos_token, *map(str, added)], done.stderr


def test_only_what_the_source_has_is_set(fast, make_llama, caplog):
    model = make_llama(325)
    model.config.bos_token_id = 3
    source = ChatTokenizer(Tokenizer(models.BPE({"x": 0}, [])), {"pad_token": "<fill>"}, "{{ 1 }}")
    eos, ids = fast.eos_token, (model.config.eos_token_id, model.generation_config.eos_token_id)
    with caplog.at_level("INFO"):
        clone_chat_template(model, fast, source, None)
    assert (fast.eos_token, fast.bos_token, fast.pad_token) == (eos, None, "<fill>")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == ids
    assert model.config.bos_token_id == 3
    assert model.config.pad_token_id == fast.pad_token_id
    assert "set pad_token." in caplog.text


def test_folders_and_templates_by_name(fast, source, tmp_path):
    template = source.chat_template
    source.chat_template = {"default": template, "tool_use": "x"}
    source.save_pretrained(tmp_path)
    files = ChatTokenizer(Tokenizer(models.BPE({"a": 0}, [])))
    for tokenizer in (fast, files):
        clone_chat_template(None, tokenizer, tmp_path)
        assert tokenizer.chat_template.strip() == template.strip()
        assert tokenizer.eos_token == "<|eot_id|>"


@pytest.mark.parametrize("template", [None, {"tool_use": "x"}])
def test_a_source_without_a_template_changes_nothing(fast, source, make_llama, template):
    source.chat_template = template
    model, size = make_llama(325), len(fast)
    with pytest.raises(ValueError, match="no chat template"):
        clone_chat_template(model, fast, source)
    with pytest.raises(ValueError, match="resize_to_multiple_of"):
        clone_chat_template(model, fast, source, 0)
    with pytest.raises(TypeError, match="chat_template"):
        clone_chat_template(model, "text", source)
    assert len(fast) == size
    assert fast.chat_template is None
    assert model.get_input_embeddings().weight.shape[0] == 325
