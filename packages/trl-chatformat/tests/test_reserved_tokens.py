"""New tokens take the ids that a vocabulary keeps in reserve."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from trl_chatformat import (
    ChatTokenizer,
    encode_chat,
    prepare_tokenizer_files,
    setup_chat_format,
)

NAMES = [f"<|reserved_special_token_{i}|>" for i in range(3)]


def extra_tokens(tokenizer):
    if hasattr(tokenizer, "additional_special_tokens"):
        return tokenizer.additional_special_tokens
    return tokenizer.extra_special_tokens


def with_added_tokens(backend, names=NAMES):
    backend.add_special_tokens([AddedToken(name, special=True, rstrip=True) for name in names])
    return backend


def make_wordpiece():
    words = [
        "[PAD]",
        *(f"[unused{i}]" for i in range(3)),
        "[UNK]",
        "user",
        "assistant",
        "hi",
        "##s",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def make_unigram():
    pieces = [
        ("<unk>", 0.0),
        *((f"<unused{i}>", -9.0) for i in range(3)),
        ("hi", -1.0),
        ("s", -2.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens(["<unused0>", "<unused1>", "<unused2>"])
    return backend


def make_fast(backend):
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=[])


def make_listing(backend):
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=NAMES)


def make_slow(_):
    return ByT5Tokenizer(extra_ids=0, additional_special_tokens=NAMES)


KINDS = {
    "added": (lambda byte_level: make_fast(with_added_tokens(byte_level)), NAMES),
    "listed": (lambda byte_level: make_listing(with_added_tokens(byte_level)), NAMES),
    "files": (lambda byte_level: ChatTokenizer(with_added_tokens(byte_level)), NAMES),
    "files, listed": (
        lambda byte_level: ChatTokenizer(
            with_added_tokens(byte_level), {"additional_special_tokens": NAMES}
        ),
        NAMES,
    ),
    "slow": (make_slow, NAMES),
    "wordpiece": (lambda _: make_fast(make_wordpiece()), [f"[unused{i}]" for i in range(3)]),
    "unigram": (lambda _: make_fast(make_unigram()), [f"<unused{i}>" for i in range(3)]),
    "unigram, files": (lambda _: ChatTokenizer(make_unigram()), [f"<unused{i}>" for i in range(3)]),
}


@pytest.fixture(params=KINDS)
def tokenizer_and_names(request, byte_level):
    make, names = KINDS[request.param]
    return make(byte_level), names


def reload(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    kind = type(tokenizer) if isinstance(tokenizer, ByT5Tokenizer) else AutoTokenizer
    return kind.from_pretrained(folder)


def test_reserved_ids_are_taken_in_order(tokenizer_and_names, tmp_path):
    tokenizer, names = tokenizer_and_names
    before = dict(tokenizer.get_vocab())
    _, _, added = setup_chat_format(None, tokenizer, reuse_reserved=True, return_added_ids=True)
    assert added == [before[names[0]], before[names[1]]]
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id] == added
    renamed = {names[0]: "<|im_start|>", names[1]: "<|im_end|>"}
    after = {renamed.get(token, token): i for token, i in before.items()}
    assert tokenizer.get_vocab() == after
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == tuple(added)
    assert not {*added} & {*tokenizer.encode(names[0], add_special_tokens=False)}
    assert tokenizer.decode(added, skip_special_tokens=True) == ""
    assert not {*names[:2]} & {*extra_tokens(tokenizer)}

    loaded = reload(tokenizer, tmp_path)
    assert loaded.get_vocab() == after
    assert loaded.chat_template == tokenizer.chat_template
    for text in ["<|im_start|>user\nhi<|im_end|>", names[0], names[2] + "his"]:
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(
            text, add_special_tokens=False
        )
    assert (loaded.bos_token_id, loaded.eos_token_id) == tuple(added)


def test_what_the_reserved_names_do_not_suffice_for_is_added(byte_level):
    tokenizer = make_fast(with_added_tokens(byte_level))
    first = tokenizer.get_vocab()[NAMES[0]]
    _, _, added = setup_chat_format(
        None, tokenizer, "llama3", reuse_reserved=True, return_added_ids=True
    )
    assert added == [first, first + 1, first + 2, first + 3, first + 4]
    assert len(tokenizer) == first + 5


def test_listed_names_are_taken_in_their_order(byte_level):
    tokenizer = make_fast(with_added_tokens(byte_level, ["<spare>", *NAMES]))
    vocab = tokenizer.get_vocab()
    setup_chat_format(None, tokenizer, reuse_reserved=[NAMES[2], "<spare>", NAMES[0]])
    assert tokenizer.bos_token_id == vocab[NAMES[2]]
    assert tokenizer.eos_token_id == vocab["<spare>"]
    assert tokenizer.convert_tokens_to_ids(NAMES[0]) == vocab[NAMES[0]]


def test_flags_of_reserved_tokens_go_with_their_names(byte_level):
    tokenizer = make_fast(with_added_tokens(byte_level))
    setup_chat_format(None, tokenizer, reuse_reserved=True)
    token = tokenizer.added_tokens_decoder[tokenizer.bos_token_id]
    assert (token.special, token.rstrip, token.normalized) == (True, False, False)


def test_nothing_is_taken_where_nothing_is_missing(byte_level):
    names = ["<|im_start|>", "<|im_end|>", *NAMES]
    tokenizer = make_fast(with_added_tokens(byte_level, names))
    before = tokenizer.get_vocab()
    _, _, added = setup_chat_format(None, tokenizer, reuse_reserved=True, return_added_ids=True)
    assert added == []
    assert tokenizer.get_vocab() == before


def test_reserved_names_in_use_stay(byte_level):
    backend = with_added_tokens(byte_level)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=NAMES[0])
    before = tokenizer.get_vocab()
    _, _, added = setup_chat_format(
        None, tokenizer, pad_token="distinct", reuse_reserved=True, return_added_ids=True
    )
    assert tokenizer.pad_token == NAMES[0]
    assert added == [before[NAMES[1]], before[NAMES[2]]]


def test_names_that_the_format_itself_uses_stay(byte_level):
    names = ["<|dummy_84|>", "<|dummy_85|>", "<|dummy_86|>", "<|dummy_87|>"]
    tokenizer = make_fast(with_added_tokens(byte_level, names))
    before = tokenizer.get_vocab()
    setup_chat_format(None, tokenizer, "phi4", reuse_reserved=True)
    assert tokenizer.pad_token == "<|dummy_85|>"
    assert tokenizer.pad_token_id == before["<|dummy_85|>"]
    taken = set(before) - set(tokenizer.get_vocab())
    assert taken == {"<|dummy_84|>", "<|dummy_86|>", "<|dummy_87|>"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("<spare>", "True, False, or a list"),
        (1, "True, False, or a list"),
        ([], "True, False, or a list"),
        ([3], "True, False, or a list"),
        (["<missing>"], "'<missing>' is not in the vocabulary"),
        (["<|endoftext|>"], "'<|endoftext|>' is in use"),
        (["qu"], "'qu' is in use"),
        (True, "no token of this tokenizer has a name such as"),
    ],
)
def test_what_cannot_be_reused_is_refused(byte_level, make_llama, asked, message):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|endoftext|>")
    assert "qu" in tokenizer.get_vocab()
    before, model = tokenizer.backend_tokenizer.to_str(), make_llama()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        setup_chat_format(model, tokenizer, reuse_reserved=asked)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.chat_template is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_a_name_of_a_slow_vocabulary_is_refused():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    with pytest.raises(ValueError, match="'a' is in use"):
        setup_chat_format(None, tokenizer, reuse_reserved=["a"])


@pytest.mark.parametrize("tie", [True, False])
def test_rows_are_made_anew_in_place(byte_level, make_llama, tie):
    tokenizer = make_fast(with_added_tokens(byte_level))
    model = make_llama(len(tokenizer), tie=tie)
    first = tokenizer.get_vocab()[NAMES[0]]
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[first : first + 2] = 1e4 * torch.randn(2, 32)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    setup_chat_format(model, tokenizer, reuse_reserved=True)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert model.config.eos_token_id == first + 1
    for name, parameter in model.named_parameters():
        changed = (parameter != old[name]).flatten(1).any(dim=1) if parameter.dim() > 1 else None
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert changed.nonzero().flatten().tolist() == [first, first + 1]
            # The reserved rows themselves are not what new ones follow.
            assert parameter[first : first + 2].abs().max() < 1
            assert not torch.equal(parameter[first], parameter[first + 1])
        else:
            assert torch.equal(parameter, old[name])


def test_a_failure_brings_reserved_rows_and_names_back(byte_level, make_llama, second_layer_fails):
    tokenizer = make_fast(with_added_tokens(byte_level))
    model = make_llama(len(tokenizer), tie=False)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    serialized, config = tokenizer.backend_tokenizer.to_str(), model.config.to_dict()
    with pytest.raises(RuntimeError, match="no memory"):
        setup_chat_format(model, tokenizer, reuse_reserved=True)
    assert tokenizer.backend_tokenizer.to_str() == serialized
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, old[name])


def test_text_that_spells_an_old_name_is_text(byte_level):
    tokenizer = make_fast(with_added_tokens(byte_level))
    _, _, added = setup_chat_format(None, tokenizer, reuse_reserved=True, return_added_ids=True)
    chat = encode_chat(tokenizer, [{"role": "user", "content": f"{NAMES[0]}<|im_end|>"}])
    assert [i for i in chat.input_ids if i in added] == added
    assert tokenizer.decode(chat.input_ids) == chat.text


def test_files_are_written_with_reserved_names_taken(tmp_path):
    base, chat = tmp_path / "base", tmp_path / "chat"
    make_fast(make_unigram()).save_pretrained(base)
    assert prepare_tokenizer_files(base, chat, reuse_reserved=True) == [1, 2]
    state = json.loads((chat / "tokenizer.json").read_text())
    assert [piece for piece, _ in state["model"]["vocab"][:4]] == [
        *("<unk>", "<|im_start|>", "<|im_end|>", "<unused2>"),
    ]
    assert AutoTokenizer.from_pretrained(chat).eos_token_id == 2
