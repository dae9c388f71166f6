"""Masks from templates that nobody marked, beside what the authors of TRL 1.16 marked by hand."""

import contextlib
import re
from datetime import datetime
from itertools import groupby

import pytest
import real_data
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tools.rails.chat_shapes import SHAPES
from tools.rails.real_tokenizers import smollm2
from trl_chatformat import encode_chat, render_chat
from trl_chatformat.rendering import render_text
from trl_chatformat.turns import find_turns, read_prompt

TEMPLATES = {
    path.stem: path.read_bytes().decode() for path in sorted(real_data.fetch("trl").glob("*.jinja"))
}
TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
MARKED = [name for name, template in TEMPLATES.items() if TAG.search(template)]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "clock": datetime(2031, 2, 3)}
SMOLLM2 = smollm2().backend_tokenizer.to_str()
CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<[a-z_/|]+>|<\w+\|>|<\|\w+>|</s>|<s>"  # noqa: RUF001
)
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],  # noqa: RUF001
    "diffusion_gemma": ["<turn|>"],
    "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "llava_next": ["</s>"],
    "muse_glimmer": ["<|eot|>"],
    "nemotron": ["<|im_end|>"],
    "phi3": ["<|end|>", "</s>"],
    "qwen": ["<|im_end|>"],
    "smolvlm": ["<end_of_utterance>"],
}
# What the prompt writes itself is not trained on here; these authors train on some of it.
PROMPT_INSIDE = {
    "deepseek": "the header",
    "gptoss": "the header",
    "muse_glimmer": "the header",
    "nemotron": "<think>",
    "qwen3_5": "<think>",
    "qwen3_6": "<think>",
    "qwen3_8": "<think>",
    "qwen2_5_training": "the line's end",
    "glm4moe": "an empty <think>, where thinking is off",
    "qwen3_training": "an empty <think>, where thinking is off",
}
# These authors also train on what ends a tool's answer, which no prompt leaves to the model.
TOOLS_INSIDE = {"deepseek": "<｜tool▁outputs▁end｜>"}  # noqa: RUF001
DIFFERENT = {
    ("deepseek_r1", "tool error"): "a line's end before a later tool's answer is trailing",
    ("deepseekv3", "tool error"): "a later tool call has no header that could be found",
    ("diffusion_gemma", "tool call with content"): "what is said after the tool's answer is left",
    ("diffusion_gemma", "tool call last"): "no stop token, so that it goes to the end",
    ("glm4moe", "system in the middle"): "the next turn's opening is no stop token",
    ("glm4moe", "many turns"): "the stop token opens a turn in which nothing shows",
    ("llava_next", "text parts"): "without a generation prompt, the space before is no part of it",
}


def find(table, name):
    """Find the entry of a template's family: the longest beginning of its name."""
    return next((table[key] for key in sorted(table, key=len)[::-1] if name.startswith(key)), None)


def merge(spans):
    merged = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


def leave_out(text, by_hand, found, others):
    """Leave out of what is marked by hand what others write, if it isn't found."""
    marked = {i for span in found for i in range(*span)}
    for start, end in by_hand:
        for is_marked, run in groupby(range(start, end), key=marked.__contains__):
            places = list(run)
            piece = text[places[0] : places[-1] + 1]
            if is_marked or not any(piece in other for other in others):
                yield places[0], places[-1] + 1


def write_prompt(template, messages, settings):
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), None)
    texts = []
    for asks in (False, True):
        asking = settings | {"add_generation_prompt": asks}
        try:
            texts.append(render_text(template, messages[: first or None], **asking))
        except ValueError:
            return ""
    return read_prompt(*texts)


def find_controls(chat):
    data = {i for span in chat.spans if span.origin for i in range(span.start, span.end)}
    return [
        match.span()
        for match in CONTROL.finditer(chat.text)
        if data.isdisjoint(range(*match.span()))
    ]


def find_unmarked(template, stops, messages, settings):
    chat = render_chat(template, messages, **settings)
    controls = find_controls(chat)
    prompt = write_prompt(template, messages, settings)
    stopping = [(start, end) for start, end in controls if chat.text[start:end] in stops]
    turns = find_turns(chat, messages, prompt, stopping, controls, include_trailing=True)
    return chat.text, [turn[:2] for turn in turns], prompt


def unmark(template):
    return TAG.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", template
    )


def render_shapes(template):
    for shape, messages, settings in SHAPES:
        settings = settings | NAMED
        with contextlib.suppress(ValueError):
            yield shape, messages, settings, render_chat(template, messages, **settings)


@pytest.mark.parametrize("name", MARKED)
def test_masks_are_those_of_the_author(name):
    unmarked = unmark(TEMPLATES[name])
    compared = 0
    for shape, messages, settings, chat in render_shapes(TEMPLATES[name]):
        text, spans, prompt = find_unmarked(unmarked, find(STOPS, name), messages, settings)
        assert text == chat.text, shape
        by_hand, found = merge(chat.generation), merge(spans)
        if find(PROMPT_INSIDE, name):
            others = [prompt, find(TOOLS_INSIDE, name) or ""]
            by_hand = merge(leave_out(text, by_hand, found, others))
        if any(name.startswith(family) and shape == other for family, other in DIFFERENT):
            assert by_hand != found, f"{shape} is no exception any more"
        else:
            pieces = [[text[a:b] for a, b in some] for some in (found, by_hand)]
            assert found == by_hand, (shape, *pieces)
        compared += 1
    assert compared >= 5


def add_control_tokens(texts):
    backend = Tokenizer.from_str(SMOLLM2)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in sorted(texts)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", MARKED)
def test_masks_choose_the_tokens_that_the_author_chose(name):
    """By the tokenizer's own offsets; what TRL's authors did differently is as above."""
    shapes = [
        found
        for found in render_shapes(TEMPLATES[name])
        if not any(name.startswith(other) and found[0] == shape for other, shape in DIFFERENT)
    ]
    texts = {chat.text[a:b] for *_, chat in shapes for a, b in find_controls(chat)}
    tokenizer = add_control_tokens(texts | {"<s>", "</s>"})
    for shape, messages, settings, chat in shapes:
        encoded = encode_chat(
            tokenizer,
            messages,
            chat_template=unmark(TEMPLATES[name]),
            stop_tokens=[stop for stop in find(STOPS, name) if stop in texts],
            trust=lambda number, field: True,
            include_trailing=True,
            **settings,
        )
        spans = merge(chat.generation)
        if find(PROMPT_INSIDE, name):
            text, found, prompt = find_unmarked(
                unmark(TEMPLATES[name]), find(STOPS, name), messages, settings
            )
            others = [prompt, find(TOOLS_INSIDE, name) or ""]
            spans = merge(leave_out(text, spans, found, others))
        plain = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded.input_ids == plain["input_ids"], shape
        chosen = [
            int(any(a < end and start < b for start, end in spans))
            for a, b in plain["offset_mapping"]
        ]
        assert encoded.assistant_masks == chosen, shape
