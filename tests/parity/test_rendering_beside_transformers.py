"""All 72 chat templates that TRL 1.16 ships: their texts and blocks beside transformers'."""

from datetime import datetime

import pytest
import real_data
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tools.rails.chat_shapes import SHAPES, with_arguments, with_text_for_parts
from trl_chatformat import render_chat
from trl_chatformat.rendering import render_text

TEMPLATES = {
    path.stem: path.read_bytes().decode() for path in sorted(real_data.fetch("trl").glob("*.jinja"))
}
THEN = datetime(2031, 2, 3, 4, 5, 6)
# A template that prints a list of parts as Python writes it takes it for text.
PRINTED_PARTS = "{'type': 'text'"


def make_tokenizer(template):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def pinned(monkeypatch):
    class Pinned(datetime):
        @classmethod
        def now(cls, tz=None):
            return THEN

    monkeypatch.setattr(chat_template_utils, "datetime", Pinned)


def as_transformers_5(messages):
    """What transformers 5 makes of messages, for whichever version is here."""
    kept = [{k: v for k, v in message.items() if v is not None} for message in messages]
    names = ("reasoning_content", "thinking", "reasoning")
    reasons = [next((m[name] for name in names if name in m), None) for m in kept]
    return [
        message if reason is None else message | {"thinking": reason, "reasoning_content": reason}
        for message, reason in zip(kept, reasons, strict=True)
    ]


def forms(messages):
    """What a template may take a conversation as; transformers gives the first."""
    messages = with_arguments(messages, as_text=False)
    yield messages
    yield with_arguments(messages, as_text=True)
    yield with_text_for_parts(messages)
    yield with_arguments(with_text_for_parts(messages), as_text=True)


def render_theirs(tokenizer, messages, settings):
    settings = settings | {"tools": settings.get("tools") or None}
    for form in forms(messages):
        try:
            text = tokenizer.apply_chat_template(
                as_transformers_5(form), tokenize=False, **settings
            )
        except Exception:  # whatever a template does wrong
            continue
        if PRINTED_PARTS not in text:
            return text
    return None


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers_and_spans_cover_them(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    rendered = 0
    for shape, messages, settings in SHAPES:
        theirs = render_theirs(tokenizer, messages, settings)
        if theirs is None:
            with pytest.raises(ValueError, match="chat template refuses"):
                render_chat(tokenizer, messages, clock=THEN, **settings)
            continue
        ours = render_chat(tokenizer, messages, clock=THEN, **settings)
        assert ours.text == theirs, shape
        assert render_text(tokenizer, messages, clock=THEN, **settings) == theirs, shape
        ends = [span.end for span in ours.spans]
        assert [span.start for span in ours.spans] == [0, *ends[:-1]][: len(ends)], shape
        assert ends[-1:] == [len(theirs)] or theirs == "", shape
        rendered += 1
    assert rendered >= 5


def test_there_are_seventy_two_templates_and_forty_shapes():
    assert len(TEMPLATES) == 72
    assert len(SHAPES) == len({shape.name for shape in SHAPES}) >= 40


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("name", [name for name in TEMPLATES if "generation %}" in TEMPLATES[name]])
def test_generation_blocks_are_where_transformers_says(name):
    template = TEMPLATES[name]
    compared = 0
    for shape, messages, settings in SHAPES:
        settings = settings | {"tools": settings.get("tools") or None}
        try:
            text, blocks = chat_template_utils._render_with_assistant_indices(
                chat_template_utils._compile_jinja_template(template),
                as_transformers_5(messages),
                settings.get("tools"),
                settings.get("documents"),
                **{"add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}
                | {k: v for k, v in settings.items() if k not in ("tools", "documents")},
            )
        except Exception:  # whatever a template does wrong
            continue
        ours = render_chat(
            template, messages, clock=THEN, bos_token="<s>", eos_token="</s>", **settings
        )
        if ours.text == text:
            found = [block for block in blocks if block[0] < block[1]]
            assert list(ours.generation) == found, shape
            compared += 1
    assert compared >= 5


def letters_of(number):
    return "".join(chr(0xAC00 + 100 * number + i) for i in range(12))


def as_parts(messages):
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_letter_of_a_message_is_said_to_be_its_own(name):
    seen = 0
    for shape, messages, settings in SHAPES:
        if len(messages) > 20:
            continue
        words = [f" {letters_of(i)}\n{letters_of(i)} " for i in range(len(messages))]
        own = [m | {"content": word} for m, word in zip(messages, words, strict=True)]
        for form in (own, as_parts(own)):
            try:
                chat = render_chat(
                    TEMPLATES[name], form, bos_token="<s>", eos_token="</s>", **settings
                )
            except ValueError:
                continue  # as transformers does: see above
            for span in chat.spans:
                text = chat.text[span.start : span.end]
                found = {(ord(c) - 0xAC00) // 100 for c in text if "\uac00" <= c < "\ud7a4"}
                expected = set() if span.origin is None else {span.origin.message}
                assert found <= expected, (shape, span, text)
                seen += len(found)
    assert seen >= 20
