"""A tokenizer's folder is set up file to file."""

import json
import os

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trl_chatformat import FORMAT_MAPPING, ChatTokenizer, prepare_tokenizer_files

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
TEXTS = ["The quick brown fox", " two  spaces\nand a line", "<|im_start|>user\nHi<|im_end|>\n"]


def read_all(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", sorted(FORMAT_MAPPING))
def test_what_is_written_loads_with_equal_ids(backend_and_names, tmp_path, name):
    backend, names = backend_and_names
    base, chat = tmp_path / "base", tmp_path / "new" / "chat"
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(base)
    before = read_all(base)
    added = prepare_tokenizer_files(str(base), chat, name, pad_token="distinct")
    assert read_all(base) == before
    ours, theirs = ChatTokenizer.from_directory(chat), AutoTokenizer.from_pretrained(chat)
    assert ours.get_vocab() == theirs.get_vocab()
    assert added == sorted(set(theirs.get_vocab().values()) - set(backend.get_vocab().values()))
    assert theirs.pad_token_id not in (None, theirs.eos_token_id)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    written = theirs.apply_chat_template(TURNS, tokenize=False)
    for text in [*TEXTS, written]:
        assert ours.encode(text) == theirs(text)["input_ids"]
    for kept, old in names.items():
        if kept == "unk_token":
            assert theirs.unk_token == old


def test_hostile_template_names_write_nothing_elsewhere(byte_level, tmp_path):
    base = tmp_path / "base"
    names = ["../../escaped", "/tmp/escaped", "a/b", "default"]
    ChatTokenizer(byte_level).save_pretrained(base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": "x"} for name in names]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    prepare_tokenizer_files(base, tmp_path / "out" / "chat")
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]
    assert os.listdir(tmp_path / "out") == ["chat"]
    assert sorted(os.listdir(tmp_path / "out" / "chat")) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    loaded = ChatTokenizer.from_directory(tmp_path / "out" / "chat")
    assert loaded.chat_template == FORMAT_MAPPING["chatml"]().chat_template


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link", "source"])
def test_what_exists_is_never_written_over(byte_level, tmp_path, kind):
    base, out = tmp_path / "base", tmp_path / "out"
    ChatTokenizer(byte_level).save_pretrained(base)
    match kind:
        case "folder":
            out.mkdir()
        case "file":
            out.write_text("mine")
        case "dangling link":
            out.symlink_to(tmp_path / "nowhere")
        case "source":
            out = base
    before = read_all(tmp_path)
    with pytest.raises(FileExistsError, match="exists already"):
        prepare_tokenizer_files(base, out)
    assert read_all(tmp_path) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"format": "none"}, ValueError), ({"pad_token": ""}, ValueError)],
)
def test_after_a_refusal_there_is_no_folder(byte_level, tmp_path, arguments, error):
    ChatTokenizer(byte_level).save_pretrained(tmp_path / "base")
    with pytest.raises(error):
        prepare_tokenizer_files(tmp_path / "base", tmp_path / "out", **arguments)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        prepare_tokenizer_files(tmp_path / "missing", tmp_path / "out")
    assert os.listdir(tmp_path) == ["base"]


def test_a_write_that_fails_leaves_no_folder(byte_level, tmp_path, monkeypatch):
    ChatTokenizer(byte_level).save_pretrained(tmp_path / "base")
    written = []

    def fail_for_the_second_file(path, content):
        if written:
            raise OSError("no space")
        written.append(path)

    monkeypatch.setattr("pathlib.Path.write_bytes", fail_for_the_second_file)
    with pytest.raises(OSError, match="no space"):
        prepare_tokenizer_files(tmp_path / "base", tmp_path / "out")
    assert os.listdir(tmp_path) == ["base"]


def test_the_legacy_form_has_merges_as_texts_and_the_same_ids(backend_and_names, tmp_path):
    backend, names = backend_and_names
    ChatTokenizer(backend, names).save_pretrained(tmp_path / "base")
    for legacy in (False, True):
        prepare_tokenizer_files(tmp_path / "base", tmp_path / str(legacy), legacy=legacy)
    state = json.loads((tmp_path / "True" / "tokenizer.json").read_text())
    merges = state["model"].get("merges", [])
    assert all(isinstance(merge, str) for merge in merges)
    plain, legacy = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("False", "True"))
    assert legacy.get_vocab() == plain.get_vocab()
    for text in TEXTS:
        assert legacy(text)["input_ids"] == plain(text)["input_ids"]


def test_merges_with_spaces_are_refused_in_the_legacy_form(tmp_path):
    backend = Tokenizer(BPE({"a": 0, " ": 1, "a ": 2}, [("a", " ")]))
    ChatTokenizer(backend).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="holds a space, which the legacy form can't write"):
        prepare_tokenizer_files(tmp_path / "base", tmp_path / "out", legacy=True)
    assert os.listdir(tmp_path) == ["base"]
