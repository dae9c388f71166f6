"""Reading and writing tokenizer folders without transformers."""

import json
import os

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from trl_chatformat import ChatTokenizer, setup_chat_format

TEXTS = ["The quick brown fox", " two  spaces\nand a line", "<|im_start|>user\nHi<|im_end|>\n"]


def save_with_transformers(backend, folder, **names):
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return folder


def test_a_folder_of_transformers_is_read_alike(backend_and_names, tmp_path):
    backend, names = backend_and_names
    save_with_transformers(backend, tmp_path, **names, additional_special_tokens=["<tool>"])
    ours = ChatTokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.additional_special_tokens == ["<tool>"]
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_what_is_set_up_and_saved_loads_in_transformers_with_equal_ids(backend_and_names, tmp_path):
    backend, names = backend_and_names
    save_with_transformers(backend, tmp_path / "base", **names)
    ours = ChatTokenizer.from_directory(tmp_path / "base")
    setup_chat_format(None, ours)
    ours.save_pretrained(str(tmp_path / "new" / "chat"))
    for loaded in (
        AutoTokenizer.from_pretrained(tmp_path / "new" / "chat"),
        ChatTokenizer.from_directory(tmp_path / "new" / "chat"),
    ):
        assert loaded.get_vocab() == ours.get_vocab()
        assert loaded.chat_template == ours.chat_template
        assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert loaded.pad_token_id == ours.eos_token_id
        for text in TEXTS:
            assert list(loaded.encode(text)) == ours.encode(text)
    assert sorted(os.listdir(tmp_path / "new" / "chat")) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert os.listdir(tmp_path / "new") == ["chat"]


def test_the_model_specific_class_gives_the_same_ids(llama_like, tmp_path):
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    save_with_transformers(llama_like, tmp_path / "base", **names)
    LlamaTokenizerFast.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "llama")
    ours = ChatTokenizer.from_directory(tmp_path / "llama")
    setup_chat_format(None, ours)
    ours.save_pretrained(tmp_path / "chat")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "chat")
    assert "Llama" in type(loaded).__name__
    for text in TEXTS:
        assert loaded(text)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize("place", ["config", "jinja file"])
def test_line_ends_of_a_template_survive(byte_level, tmp_path, place):
    template = "{% for m in messages %}\r\n{{ m['content'] }}\r\n{% endfor %}\n"
    tokenizer = ChatTokenizer(byte_level, chat_template=template)
    tokenizer.save_pretrained(tmp_path / "a")
    if place == "jinja file":
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "a")
        (tmp_path / "a" / "chat_template.jinja").write_bytes(template.encode())
    loaded = ChatTokenizer.from_directory(tmp_path / "a")
    assert loaded.chat_template == template
    loaded.save_pretrained(tmp_path / "b")
    assert ChatTokenizer.from_directory(tmp_path / "b").chat_template == template
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "b").chat_template == template


@pytest.mark.parametrize(
    "form", ["list in the config", "mapping in the config", "files", "only additional files"]
)
def test_named_templates_are_read_and_written(byte_level, tmp_path, form):
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    if form == "only additional files":
        del templates["default"]
    ChatTokenizer(byte_level).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    if form == "list in the config":
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    elif form == "mapping in the config":
        config["chat_template"] = templates
    else:
        config["chat_template"] = "{{ 'files go before this' }}"
        (tmp_path / "a" / "additional_chat_templates").mkdir()
        (tmp_path / "a" / "additional_chat_templates" / "tool_use.jinja").write_text(
            templates["tool_use"]
        )
        if "default" in templates:
            (tmp_path / "a" / "chat_template.jinja").write_text(templates["default"])
    file.write_text(json.dumps(config))
    tokenizer = ChatTokenizer.from_directory(tmp_path / "a")
    assert tokenizer.chat_template == templates
    tokenizer.save_pretrained(tmp_path / "a")
    assert ChatTokenizer.from_directory(tmp_path / "a").chat_template == templates
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "a").chat_template == templates


def test_a_template_set_to_none_is_gone_after_saving_in_place(byte_level, tmp_path):
    ChatTokenizer(byte_level, chat_template="{{ messages }}").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    assert tokenizer.chat_template == "{{ messages }}"
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert ChatTokenizer.from_directory(tmp_path).chat_template is None


def test_unknown_config_entries_and_other_files_are_kept(byte_level, tmp_path):
    entries = {"model_max_length": 10**30, "späße": ["☃", {"x": None, "y": 1e-05}], "legacy": True}
    ChatTokenizer(byte_level, entries).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    setup_chat_format(None, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert entries.items() <= config.items()
    assert list(config)[:3] == list(entries)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_padding_and_truncation_are_off_while_encoding_and_kept_in_the_file(byte_level, tmp_path):
    plain = byte_level.encode("The quick brown fox jumps").ids
    byte_level.enable_padding(length=64, pad_token="<|endoftext|>")
    byte_level.enable_truncation(2)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    before = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    assert tokenizer.encode("The quick brown fox jumps") == plain
    tokenizer.save_pretrained(tmp_path)
    after = json.loads((tmp_path / "tokenizer.json").read_text())
    assert after == before
    assert before["truncation"]["max_length"] == 2
    assert tokenizer.encode("The quick brown fox jumps") == plain


def test_tokens_that_only_the_config_lists_get_the_ids_of_transformers(byte_level, tmp_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": {"content": "<pad>", "__type": "AddedToken", "special": True},
        "bos_token": "<bos>",
        "additional_special_tokens": ["<extra>", "<bos>"],
        "added_tokens_decoder": {
            "326": AddedToken("<b>", normalized=False).__getstate__(),
            "325": AddedToken("<a>", special=True).__getstate__(),
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = ChatTokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.pad_token == "<pad>"
    assert ours.pad_token_id == theirs.pad_token_id
    ours.save_pretrained(tmp_path / "b")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "b").get_vocab() == ours.get_vocab()


def test_a_special_tokens_map_is_read_as_transformers_reads_it(byte_level, tmp_path):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|endoftext|>", "lstrip": False},
                "pad_token": "!",
                "unk_token": {"content": "<unk>"},
            }
        )
    )
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "!")
    tokenizer.save_pretrained(tmp_path)
    assert not (tmp_path / "special_tokens_map.json").exists()
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.pad_token) == ("<|endoftext|>", "!")
    assert loaded.get_vocab() == theirs.get_vocab() == tokenizer.get_vocab()


def test_what_transformers_5_writes_is_written_for_4_too(byte_level, tmp_path):
    config = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<tool>"]}
    tokenizer = ChatTokenizer(byte_level, config)
    assert tokenizer.additional_special_tokens == ["<tool>"]
    tokenizer.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<tool>"]
    assert "extra_special_tokens" not in written
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast)


def picture(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_saving_that_fails_halfway_leaves_the_folder_as_it_was(byte_level, tmp_path, monkeypatch):
    ChatTokenizer(byte_level).save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "additional_chat_templates").mkdir()
    (tmp_path / "out" / "additional_chat_templates" / "x.jinja").write_text("x")
    before = picture(tmp_path)
    tokenizer = ChatTokenizer.from_directory(tmp_path / "out")
    tokenizer.chat_template = None
    setup_chat_format(None, tokenizer)
    replace, moves = os.replace, []

    def fail_late(source, target):
        moves.append(target)
        if len(moves) == 5:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_late)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save_pretrained(tmp_path / "out")
    assert len(moves) > 5  # some were made, and taken back
    assert picture(tmp_path) == before


def test_what_cannot_be_written_makes_no_folder(byte_level, tmp_path):
    tokenizer = ChatTokenizer(byte_level, {"custom": object()})
    with pytest.raises(TypeError):
        tokenizer.save_pretrained(tmp_path / "out")
    assert picture(tmp_path) == {}


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere has no tokenizer\.json"):
        ChatTokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json holds a list"),
    ],
)
def test_a_broken_file_is_named(byte_level, tmp_path, name, text, complaint):
    ChatTokenizer(byte_level).save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=complaint):
        ChatTokenizer.from_directory(tmp_path)


def test_named_tokens_can_be_set(byte_level):
    tokenizer = ChatTokenizer(byte_level)
    assert tokenizer.eos_token is None
    assert tokenizer.eos_token_id is None
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.eos_token_id == byte_level.token_to_id("<|endoftext|>")
    tokenizer.eos_token = None
    assert tokenizer.eos_token_id is None


def test_added_special_tokens_are_listed_once(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"additional_special_tokens": ["<tool>"]})
    size = len(tokenizer)
    tokenizer.add_special_tokens(["<x>", "<tool>", "<x>"])
    assert tokenizer.additional_special_tokens == ["<tool>", "<x>"]
    assert tokenizer.encode("<x>") == [size]
    assert len(tokenizer) == size + 1
    assert Tokenizer.from_str(byte_level.to_str()).token_to_id("<x>") == size
