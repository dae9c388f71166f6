"""Which characters are trained on, from templates that mark them and from those that don't."""

import re

import pytest

from trl_chatformat import render_chat
from trl_chatformat.rendering import render_text
from trl_chatformat.turns import find_turns, read_prompt

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_STOP = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}U:{{ m.content }};{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]


def find(template, messages, stop="<|im_end|>", **settings):
    chat = render_chat(template, messages)
    without = render_text(template, messages[:1])
    prompt = read_prompt(without, render_text(template, messages[:1], add_generation_prompt=True))
    # What the template wrote alone is a token.
    written = [
        match.span()
        for match in re.finditer(r"<\|\w+\|>", chat.text)
        if all(
            s.origin is None for s in chat.spans if s.start < match.end() and s.end > match.start()
        )
    ]
    stops = [span for span in written if chat.text[slice(*span)] == stop]
    turns = find_turns(chat, messages, prompt, stops, written, **settings)
    return [chat.text[turn.start : turn.end] for turn in turns], [turn.ended for turn in turns]


def test_a_turn_is_what_follows_the_prompt_up_to_its_stop_token():
    assert find(CHATML, CHAT) == (["a1<|im_end|>", "a2<|im_end|>"], [True, True])
    assert find(CHATML, CHAT, include_trailing=True)[0] == ["a1<|im_end|>\n", "a2<|im_end|>\n"]


def test_without_a_stop_token_a_turn_ends_where_the_next_opens_or_is_open():
    assert find(NO_STOP, CHAT, stop=None) == (["a1", "a2"], [True, False])


def test_a_stop_token_that_a_message_spells_ends_nothing():
    messages = [CHAT[0], {"role": "assistant", "content": "<|im_end|>\n<|im_start|>assistant\nx"}]
    assert find(CHATML, messages)[0] == [messages[1]["content"] + "<|im_end|>"]


@pytest.mark.parametrize("content", ["", " ", "\n", "assistant\n", "<|im_start|>assistant\n"])
def test_a_turn_of_any_content_is_whole(content):
    messages = [CHAT[0], {"role": "assistant", "content": content}, *CHAT[2:]]
    assert find(CHATML, messages)[0] == [content + "<|im_end|>", "a2<|im_end|>"]


def test_marked_spans_are_the_authors():
    assert find(MARKED, CHAT)[0] == ["a1;", "a2;"]
    assert find(MARKED, CHAT, include_trailing=True)[0] == ["a1;", "a2;"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_train_on_chooses_among_the_assistants_messages(template):
    both = find(template, CHAT)[0]
    assert find(template, CHAT, train_on="all")[0] == both
    assert find(template, CHAT, train_on="last")[0] == both[1:]
    assert find(template, CHAT, train_on=lambda number, message: number == 1)[0] == both[:1]
    asked = []
    find(template, CHAT, train_on=lambda number, message: asked.append((number, message)))
    assert asked == [(1, CHAT[1]), (3, CHAT[3])]
    with pytest.raises(ValueError, match="train_on='first' must be"):
        find(template, CHAT, train_on="first")


def test_without_an_assistant_nothing_is_trained_on():
    assert find(CHATML, CHAT[:1]) == find(MARKED, CHAT[:1]) == ([], [])


def test_messages_in_a_row_have_turns_of_their_own():
    messages = [CHAT[0], CHAT[1], CHAT[3], CHAT[2]]
    assert find(CHATML, messages)[0] == ["a1<|im_end|>", "a2<|im_end|>"]
    assert find(CHATML, CHAT[1:])[0] == ["a1<|im_end|>", "a2<|im_end|>"]


def test_of_a_message_that_the_template_leaves_out_nothing_is_trained_on():
    template = CHATML.replace("messages %}", "messages if m.content != 'a1' %}", 1)
    assert [text for text in find(template, CHAT)[0] if text] == ["a2<|im_end|>"]
