"""What setting up a chat format does to tokenizers of every kind."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import ByT5Tokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from trl_chatformat import (
    FORMAT_MAPPING,
    ChatMlSpecialTokens,
    ChatTokenizer,
    setup_chat_format,
)

TEMPLATE = ChatMlSpecialTokens().chat_template


def extra_tokens(tokenizer):
    if hasattr(tokenizer, "additional_special_tokens"):
        return tokenizer.additional_special_tokens
    return tokenizer.extra_special_tokens


def test_tokens_ids_and_template_are_set(tokenizer):
    highest = max(tokenizer.get_vocab().values())
    model, same = setup_chat_format(None, tokenizer)
    assert model is None
    assert same is tokenizer
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.bos_token_id == highest + 1
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == highest + 2
    assert len(tokenizer) == highest + 3


def test_control_tokens_are_single_ids_and_special(tokenizer):
    setup_chat_format(None, tokenizer)
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"
    # A slow tokenizer of transformers 4 writes spaces around special tokens.
    assert tokenizer.decode(ids).replace(" ", "") == "<|im_start|>user\nHi<|im_end|>"


def test_special_tokens_that_were_there_are_kept(tokenizer):
    before = tokenizer.get_vocab()
    setup_chat_format(None, tokenizer)
    assert extra_tokens(tokenizer)[0] == "<tool>"
    assert before.items() <= tokenizer.get_vocab().items()
    ids = tokenizer.encode("<tool>", add_special_tokens=False)
    assert ids == [before["<tool>"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""


def test_tokens_that_are_there_keep_their_ids_and_flags(byte_level):
    byte_level.add_special_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)])
    known = byte_level.token_to_id("<|im_end|>")
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    setup_chat_format(None, fast)
    assert fast.eos_token_id == known
    assert fast.added_tokens_decoder[known].rstrip
    assert fast.bos_token_id == known + 1


def test_a_token_of_the_model_becomes_special(byte_level):
    vocab = byte_level.get_vocab()
    state_tokens = {"<|im_start|>": len(vocab), "<|im_end|>": len(vocab) + 1}
    backend = Tokenizer(models.WordLevel({**vocab, **state_tokens}, unk_token="!"))
    tokenizer = ChatTokenizer(backend)
    setup_chat_format(None, tokenizer)
    assert tokenizer.bos_token_id == len(vocab)
    assert len(tokenizer) == len(vocab) + 2
    assert tokenizer.encode("<|im_start|><|im_end|>") == [len(vocab), len(vocab) + 1]


def test_a_distinct_pad_token_is_added_too(tokenizer, monkeypatch):
    monkeypatch.setitem(FORMAT_MAPPING, "padded", lambda: ChatMlSpecialTokens(pad_token="<|pad|>"))
    highest = max(tokenizer.get_vocab().values())
    setup_chat_format(None, tokenizer, format="padded")
    assert tokenizer.pad_token_id == highest + 3
    assert tokenizer.encode("<|pad|>", add_special_tokens=False) == [highest + 3]


def gapped(kind):
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "d": 4}, []))
    if kind == "fast":
        return PreTrainedTokenizerFast(tokenizer_object=backend)
    if kind == "files alone":
        return ChatTokenizer(backend)
    return ByT5Tokenizer(extra_ids=0, added_tokens_decoder={262: AddedToken("<far>")})


@pytest.mark.parametrize("kind", ["fast", "files alone", "slow"])
def test_ids_with_gaps_never_collide(kind, tmp_path):
    tokenizer = gapped(kind)
    before = tokenizer.get_vocab()
    setup_chat_format(None, tokenizer)
    added = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert added == [max(before.values()) + 1, max(before.values()) + 2]
    assert before.items() <= tokenizer.get_vocab().items()
    assert tokenizer.encode("<|im_start|>d<|im_end|>", add_special_tokens=False) == [
        added[0],
        *tokenizer.encode("d", add_special_tokens=False),
        added[1],
    ]
    tokenizer.save_pretrained(tmp_path)
    load = (
        ChatTokenizer.from_directory if kind == "files alone" else type(tokenizer).from_pretrained
    )
    assert load(tmp_path).get_vocab() == tokenizer.get_vocab()


LLAMA_TEXT = "<|im_start|>user\nThe fox<|im_end|>\n"


@pytest.mark.parametrize("make", [PreTrainedTokenizerFast, LlamaTokenizerFast])
def test_a_fast_llama_like_tokenizer_stops_adding_its_beginning_token(make, llama_like, tmp_path):
    PreTrainedTokenizerFast(
        tokenizer_object=llama_like, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "base")
    tokenizer = make.from_pretrained(tmp_path / "base")
    assert tokenizer("The fox")["input_ids"][0] == 1
    setup_chat_format(None, tokenizer)
    check_one_beginning_token(tokenizer)
    tokenizer.save_pretrained(tmp_path / "chat")
    check_one_beginning_token(make.from_pretrained(tmp_path / "chat"))


def test_a_llama_like_tokenizer_of_files_stops_adding_its_beginning_token(llama_like, tmp_path):
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    tokenizer = ChatTokenizer(llama_like, names)
    assert tokenizer.encode("The fox")[0] == 1
    setup_chat_format(None, tokenizer)
    assert tokenizer.encode(LLAMA_TEXT).count(tokenizer.bos_token_id) == 1
    assert 1 not in tokenizer.encode(LLAMA_TEXT)
    tokenizer.save_pretrained(tmp_path)
    loaded = LlamaTokenizerFast.from_pretrained(tmp_path)
    check_one_beginning_token(loaded)
    assert loaded(LLAMA_TEXT)["input_ids"] == tokenizer.encode(LLAMA_TEXT)


def check_one_beginning_token(tokenizer):
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The fox"}], tokenize=False
    )
    assert written == LLAMA_TEXT
    ids = tokenizer(written)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.convert_tokens_to_ids("<s>") not in ids
    direct = tokenizer.apply_chat_template([{"role": "user", "content": "The fox"}])
    assert list(direct["input_ids"] if hasattr(direct, "keys") else direct) == ids
    pair = tokenizer("The", "fox")["input_ids"]
    assert pair == [
        *tokenizer("The", add_special_tokens=False)["input_ids"],
        *tokenizer("fox", add_special_tokens=False)["input_ids"],
    ]


def test_a_byte_level_post_processor_beside_the_beginning_token_is_kept(byte_level):
    byte_level.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            ),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<|endoftext|>")
    plain = tokenizer("The fox", add_special_tokens=False)["input_ids"]
    setup_chat_format(None, tokenizer)
    assert tokenizer("The fox")["input_ids"] == plain
    assert b'"ByteLevel"' in tokenizer.backend_tokenizer.post_processor.__getstate__()


def test_what_comes_after_a_text_is_kept(tmp_path, backend_and_names):
    backend, names = backend_and_names
    tokenizer = ChatTokenizer(backend, names)
    plain = tokenizer.encode("The fox", add_special_tokens=False)
    whole = tokenizer.encode("The fox")
    end = whole[whole.index(plain[0]) + len(plain) :]
    setup_chat_format(None, tokenizer)
    assert tokenizer.encode("The fox") == plain + end


@pytest.mark.parametrize("kind", ["fast", "files alone"])
def test_a_beginning_token_without_a_switch_is_refused(kind, byte_level):
    byte_level.post_processor = processors.RobertaProcessing(
        ("<|endoftext|>", 0), ("<|endoftext|>", 0)
    )
    if kind == "fast":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    else:
        tokenizer = ChatTokenizer(byte_level)
    before = tokenizer.get_vocab()
    with pytest.raises(ValueError, match="before every text"):
        setup_chat_format(None, tokenizer)
    assert tokenizer.get_vocab() == before
    assert tokenizer.chat_template is None


class BeginningByT5Tokenizer(ByT5Tokenizer):
    """A slow tokenizer that puts its beginning token before a text, with a switch as Llama's."""

    def __init__(self, add_bos_token=True, **keywords):
        self.add_bos_token = add_bos_token
        super().__init__(add_bos_token=add_bos_token, **keywords)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.bos_token_id] * bool(self.add_bos_token) + token_ids_0


class StubbornByT5Tokenizer(ByT5Tokenizer):
    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.eos_token_id, *token_ids_0]


def test_a_slow_tokenizer_is_told_to_add_no_beginning_token():
    tokenizer = BeginningByT5Tokenizer(bos_token="<s>")
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    setup_chat_format(None, tokenizer)
    ids = tokenizer("<|im_start|>a")["input_ids"]
    assert ids == [tokenizer.bos_token_id, *tokenizer("a", add_special_tokens=False)["input_ids"]]


def test_a_slow_tokenizer_that_cannot_be_told_is_refused():
    tokenizer = StubbornByT5Tokenizer()
    before = tokenizer.get_vocab()
    with pytest.raises(ValueError, match="before every text"):
        setup_chat_format(None, tokenizer)
    assert tokenizer.get_vocab() == before
    assert tokenizer.eos_token == "</s>"


def test_a_chat_template_is_not_overwritten_unasked(tokenizer):
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(ValueError, match="chat_template = None"):
        setup_chat_format(None, tokenizer)
    assert tokenizer.chat_template == "{{ messages }}"
    tokenizer.chat_template = None
    setup_chat_format(None, tokenizer)
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("name", ["chatmle", None])
def test_an_unknown_format_is_named_beside_the_known(tokenizer, name):
    with pytest.raises(ValueError, match=rf"{name!r}.*chatml"):
        setup_chat_format(None, tokenizer, format=name)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("multiple", [-1, 0, 2.5, True, "64"])
def test_a_multiple_that_is_no_positive_int_is_refused_first(multiple):
    with pytest.raises(ValueError, match="resize_to_multiple_of"):
        setup_chat_format(None, object(), format="unknown", resize_to_multiple_of=multiple)


def test_something_that_is_no_tokenizer_is_refused(byte_level):
    with pytest.raises(TypeError, match="ChatTokenizer"):
        setup_chat_format(None, byte_level)


def test_setting_up_twice_after_clearing_the_template_changes_nothing_more(tokenizer):
    setup_chat_format(None, tokenizer)
    vocab, extra = tokenizer.get_vocab(), extra_tokens(tokenizer)
    tokenizer.chat_template = None
    setup_chat_format(None, tokenizer)
    assert tokenizer.get_vocab() == vocab
    assert extra_tokens(tokenizer) == extra


def test_metaspace_and_unigram_tokenizers_agree_with_transformers(backend_and_names, tmp_path):
    backend, names = backend_and_names
    ours = ChatTokenizer(Tokenizer.from_str(backend.to_str()), names)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    setup_chat_format(None, ours)
    setup_chat_format(None, theirs)
    text = "<|im_start|>user\nThe quick fox<|im_end|>\n"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.get_vocab() == theirs.get_vocab()


def test_a_distinct_pad_is_new_where_the_own_one_ends_texts(tokenizer):
    eos = tokenizer.eos_token
    tokenizer.pad_token = eos
    _, _, added = setup_chat_format(None, tokenizer, pad_token="distinct", return_added_ids=True)
    assert tokenizer.pad_token == "<|pad|>"
    assert added == [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert len(set(added)) == 3
    ids = tokenizer.encode("a<|pad|>b", add_special_tokens=False)
    assert ids.count(tokenizer.pad_token_id) == 1


def test_a_distinct_pad_is_the_tokenizers_own_where_it_has_one(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>", "pad_token": "<tool>"})
    _, _, added = setup_chat_format(None, tokenizer, pad_token="distinct", return_added_ids=True)
    assert tokenizer.pad_token == "<tool>"
    assert added == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_a_pad_of_any_text(tokenizer):
    setup_chat_format(None, tokenizer, pad_token="<fill>")
    assert tokenizer.pad_token == "<fill>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    "arguments", [{"pad_token": ""}, {"pad_token": 3}, {"new_rows": "zeros"}, {"new_rows": None}]
)
def test_arguments_of_no_sense_are_refused_first(tokenizer, arguments):
    size = len(tokenizer)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        setup_chat_format(None, tokenizer, **arguments)
    assert len(tokenizer) == size
    assert tokenizer.chat_template is None
