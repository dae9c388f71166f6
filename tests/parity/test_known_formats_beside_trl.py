"""The formats of Llama 3, Gemma and Qwen 3 write what TRL 1.16's templates write."""

import itertools

import pytest

from tools.rails.real_tokenizers import trl_template
from trl_chatformat import FORMAT_MAPPING, render_chat

TEXTS = ["Hi", "  spaced \n", "", "a\nb\r\n", "{{ x }} 'quoted' 你好 🙂", "<b>&amp;</b>", "\n\nx"]


def make_conversations(with_system):
    numbers = itertools.count()
    for turns in range(1, 6):
        for text in TEXTS:
            texts = [text if i % 2 else TEXTS[next(numbers) % len(TEXTS)] for i in range(turns)]
            chat = [
                {"role": "assistant" if i % 2 else "user", "content": content}
                for i, content in enumerate(texts)
            ]
            yield chat
            if with_system:
                yield [{"role": "system", "content": text}, *chat]


@pytest.mark.parametrize("name", ["llama3", "gemma", "qwen3"])
def test_plain_conversations_are_written_alike(name):
    made = FORMAT_MAPPING[name]()
    reference = trl_template(name)
    names = {"bos_token": made.bos_token, "eos_token": made.eos_token}
    compared = 0
    for chat in make_conversations(with_system=name != "gemma"):
        for prompt in (False, True):
            ours = render_chat(made.chat_template, chat, add_generation_prompt=prompt, **names)
            theirs = render_chat(reference, chat, add_generation_prompt=prompt, **names)
            assert ours.text == theirs.text
            compared += 1
    assert compared >= 70


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_thoughts_of_qwen3_are_written_alike(enable_thinking):
    made = FORMAT_MAPPING["qwen3"]()
    user = {"role": "user", "content": "Why?"}
    answers = [
        {"role": "assistant", "content": "<think>\nBecause\n</think>\n\nSo."},
        {"role": "assistant", "content": "So.", "reasoning_content": "\nBecause\n"},
        {"role": "assistant", "content": "\n\nSo.", "reasoning_content": ""},
        {"role": "assistant", "content": "no opening</think>So."},
    ]
    for first, second in itertools.product(answers, repeat=2):
        for chat in ([user, first], [user, first, second], [user, first, user, second], [first]):
            for prompt in (False, True):
                ours, theirs = (
                    render_chat(
                        template,
                        chat,
                        add_generation_prompt=prompt,
                        enable_thinking=enable_thinking,
                    ).text
                    for template in (made.chat_template, trl_template("qwen3"))
                )
                assert ours == theirs
