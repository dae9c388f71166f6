"""Which tokens are control tokens, and where a text spells them."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models

from trl_chatformat.control_tokens import ControlTokens, choose_control_tokens


def added(*tokens):
    return {i: AddedToken(t) if isinstance(t, str) else t for i, t in enumerate(tokens)}


def chosen(tokens, template=None, named=None, more=()):
    known = added(*tokens)
    ids = choose_control_tokens(known, named or {}, [template] if template else [], more)
    return {known[i].content for i in ids}


def test_special_named_and_given_tokens_are_control_tokens_and_others_are_not():
    tokens = [AddedToken("<s>", special=True), "</s>", "<tool>", "<b>", "\n\n"]
    assert chosen(tokens, named={"eos_token": "</s>", "pad_token": None}) == {"<s>", "</s>"}
    assert chosen(tokens, more=["<tool>"]) == {"<s>", "<tool>"}


@pytest.mark.parametrize(
    "template",
    [
        "a <think> b",
        "{{ '<think>\\n' + messages[0].content }}",
        "{% set opening = '<think>' %}{{ opening }}",
        "{% for m in messages %}{% if m.x %}{{ '<think>' }}{% endif %}{% endfor %}",
        "{%- generation -%}{{ '<think>' }}{%- endgeneration -%}",
        "{% generation %}<think>{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}",
    ],
)
def test_what_the_template_writes_is_a_control_token(template):
    assert chosen(["<think>", "</think>"], template) == {"<think>"}


@pytest.mark.parametrize(
    "template", ["{# <think> #}x", "{{ messages[0]['think'] }}", "<thi{{ 'nk>' }}"]
)
def test_what_the_template_does_not_write_literally_is_none(template):
    assert chosen(["<think>"], template) == set()


def test_tokens_built_around_a_role_are_control_tokens():
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    assert chosen(["<|user|>", "<|assistant|>", "<b>"], template) == {"<|user|>", "<|assistant|>"}


def test_white_space_is_text_wherever_it_stands():
    assert chosen(["\n\n", "  ", "<x>"], "{{ '<x>\n\n' }}\n\n  ") == {"<x>"}


def test_bytes_of_a_vocabulary_are_text_whatever_their_flags():
    assert chosen([AddedToken("<0x0A>", special=True), AddedToken("<s>", special=True)]) == {"<s>"}


@pytest.mark.parametrize(
    ("named", "more", "complaint"),
    [
        ({"eos_token": "!"}, (), "eos_token '!' is not an added token"),
        ({}, ("[INST]",), r"control token '\[INST\]' is not an added token"),
    ],
)
def test_a_token_that_cannot_be_told_from_text_is_refused(named, more, complaint):
    with pytest.raises(ValueError, match=complaint):
        chosen(["<s>"], named=named, more=more)


def reference(tokens, text):
    """What the Rust implementation finds: every other character is an unknown token."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.add_tokens([AddedToken("?"), *tokens])
    encoding = tokenizer.encode(text, add_special_tokens=False)
    pairs = zip(encoding.tokens, encoding.offsets, strict=True)
    return [(*span, token) for token, span in pairs if token != "?"]


def test_tokens_are_found_where_tokenizers_finds_them():
    contents = ["<a>", "<a>b", "<ab", "b<", "ab", "a", "<<", "ba<a"]
    generator = random.Random(0)
    for _ in range(300):
        words = generator.sample(contents, generator.randint(1, 5))
        tokens = [
            AddedToken(word, normalized=False, single_word=generator.random() < 0.3)
            for word in words
        ]
        control = {i for i in range(len(tokens)) if generator.random() < 0.6}
        text = "".join(generator.choices("<>ab ", k=30))
        mine = ControlTokens(dict(enumerate(tokens)), control).find(text)
        wanted = {tokens[i].content for i in control}
        theirs = [hit for hit in reference(tokens, text) if hit[2] in wanted]
        assert [(f.start, f.end, tokens[f.token].content) for f in mine] == theirs, (words, text)


def test_what_goes_beyond_the_end_is_not_found_and_words_are_seen_whole():
    tokens = ControlTokens(added("<ab>", AddedToken("cd", single_word=True)), {0, 1})
    assert tokens.find("<ab><ab>", 0, 7) == tokens.find("<ab>")
    assert tokens.find("xcd", 1) == []
    assert len(tokens.find(" cd ", 1, 3)) == 1
