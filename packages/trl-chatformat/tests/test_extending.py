"""Going on with ids that are there already."""

from dataclasses import replace

import pytest

from trl_chatformat import ChatTokenizer, encode_chat, extend_chat, is_prefix_stable

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<tool>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<tool>assistant\n' }}{% endif %}"
)
# As Qwen3: what the assistant thought is left out once the user goes on.
FORGETFUL = (
    "{% for message in messages %}{{ '<tool>' + message['role'] + '\n' }}"
    "{% if message.thought and loop.last %}{{ message.thought }}{% endif %}"
    "{{ message['content'] + eos_token + '\n' }}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "row 1"},
    {"role": "assistant", "content": " row 2\n", "thought": "dog"},
    {"role": "user", "content": "\n<|endoftext|>"},
    {"role": "assistant", "content": ""},
]


@pytest.fixture
def tokenizer(any_tokenizer):
    any_tokenizer.chat_template = TEMPLATE
    if "<tool>" not in any_tokenizer.get_vocab():
        any_tokenizer.add_tokens(["<tool>"], special_tokens=True)
    return any_tokenizer


def test_an_extended_chat_is_what_it_would_be_encoded_whole(tokenizer):
    whole = encode_chat(tokenizer, CHAT)
    for count in range(1, len(CHAT)):
        start = encode_chat(tokenizer, CHAT[:count])
        assert extend_chat(tokenizer, start, CHAT[count:]) == whole
        assert start == encode_chat(tokenizer, CHAT[:count])


def test_step_by_step_and_with_a_prompt_for_the_next_turn(tokenizer):
    chat = encode_chat(tokenizer, CHAT[:1], add_generation_prompt=True)
    chat = extend_chat(tokenizer, chat, CHAT[1:2])
    chat = extend_chat(tokenizer, chat, CHAT[2:3], add_generation_prompt=True)
    assert chat == encode_chat(tokenizer, CHAT[:3], add_generation_prompt=True)


def test_ids_that_a_model_wrote_are_kept(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, TEMPLATE)
    start = encode_chat(tokenizer, CHAT[:2])
    letters = [i for c in " row 2\n" for i in tokenizer.encode(c)]
    own = [i for i, message in enumerate(start.message_ids) if message == 1][:-1]
    ids = [*start.input_ids[: own[0]], *letters, *start.input_ids[own[-1] + 1 :]]
    assert ids != start.input_ids
    assert tokenizer.decode(ids) == start.text
    marks = [1] * len(ids)
    written = replace(
        start, input_ids=ids, attention_mask=marks, assistant_masks=marks, message_ids=marks
    )
    extended = extend_chat(tokenizer, written, CHAT[2:])
    assert extended.input_ids[: len(ids)] == ids
    whole = encode_chat(tokenizer, CHAT)
    assert extended.input_ids[len(ids) :] == whole.input_ids[len(start.input_ids) :]
    assert extended.text == whole.text
    assert all(len(column) == len(extended.input_ids) for column in extended.values())


def test_a_template_that_rewrites_earlier_turns_cannot_go_on(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, FORGETFUL)
    start = encode_chat(tokenizer, CHAT[:2])
    assert extend_chat(tokenizer, start, CHAT[2:]) is None
    assert not is_prefix_stable(tokenizer, CHAT)
    tokenizer.chat_template = TEMPLATE
    assert is_prefix_stable(tokenizer, CHAT)


def test_what_follows_may_merge_with_the_last_token(byte_level):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = ChatTokenizer(byte_level, chat_template=template)
    chat = [{"role": "user", "content": text} for text in ("qui", "ck")]
    start = encode_chat(tokenizer, chat[:1])
    assert extend_chat(tokenizer, start, chat[1:]) is None
    assert not is_prefix_stable(tokenizer, chat)
    chat[1]["content"] = " quick"
    assert extend_chat(tokenizer, start, chat[1:]) == encode_chat(tokenizer, chat)


def test_beginnings_that_the_template_refuses_are_passed_over(byte_level):
    template = "{% if messages | length < 2 %}{{ raise_exception('more') }}{% endif %}" + TEMPLATE
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, template)
    assert is_prefix_stable(tokenizer, CHAT)
    with pytest.raises(ValueError, match="more"):
        is_prefix_stable(tokenizer, CHAT[:1])


def test_a_truncated_chat_cannot_go_on(byte_level):
    tokenizer = ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, TEMPLATE)
    start = encode_chat(tokenizer, CHAT[:2], max_length=9)
    with pytest.raises(ValueError, match=f"{start.truncated} tokens of this chat were cut off"):
        extend_chat(tokenizer, start, CHAT[2:])
