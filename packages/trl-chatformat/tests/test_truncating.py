"""Cutting encoded conversations between turns, or inside where that is asked for."""

import pytest

from trl_chatformat import ChatTokenizer, encode_chat, encode_chats

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<tool>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
)
CHAT = [
    {"role": role, "content": f"{role} row {number}"}
    for number, role in enumerate(["user", "assistant"] * 3)
]


@pytest.fixture
def tokenizer(byte_level):
    return ChatTokenizer(byte_level, {"eos_token": "<|endoftext|>"}, TEMPLATE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_whole_turns_are_kept_from_either_side(tokenizer, side):
    whole = encode_chat(tokenizer, CHAT)
    kept_messages = set()
    for length in range(1, len(whole.input_ids) + 2):
        part = encode_chat(tokenizer, CHAT, max_length=length, truncation_side=side)
        size = len(part.input_ids)
        assert size <= length
        assert part.truncated == len(whole.input_ids) - size
        cut = slice(0, size) if side == "right" else slice(len(whole.input_ids) - size, None)
        for column in ("input_ids", "attention_mask", "assistant_masks", "message_ids"):
            assert part[column] == whole[column][cut]
        messages = set(part.message_ids) - {-1}
        kept_messages.add(len(messages))
        kept = CHAT[: len(messages)] if side == "right" else CHAT[len(CHAT) - len(messages) :]
        if kept:
            assert part.input_ids == encode_chat(tokenizer, kept).input_ids
    assert kept_messages == set(range(7))


@pytest.mark.parametrize("side", ["left-inside", "right-inside"])
def test_half_a_message_is_left_where_that_is_asked_for(tokenizer, side):
    whole = encode_chat(tokenizer, CHAT)
    for length in range(1, len(whole.input_ids)):
        part = encode_chat(tokenizer, CHAT, max_length=length, truncation_side=side)
        cut = slice(0, length) if side == "right-inside" else slice(-length, None)
        for column in ("input_ids", "attention_mask", "assistant_masks", "message_ids"):
            assert part[column] == whole[column][cut]


def test_the_tokenizers_own_side_is_used(fast):
    fast.chat_template = TEMPLATE
    lengths = {}
    for side in ("left", "right"):
        fast.truncation_side = side
        lengths[side] = encode_chat(fast, CHAT, max_length=30).input_ids
        assert (
            lengths[side] == encode_chat(fast, CHAT, max_length=30, truncation_side=side).input_ids
        )
    assert lengths["left"] != lengths["right"]


def test_columns_say_what_was_cut(tokenizer):
    lengths = [len(encode_chat(tokenizer, chat).input_ids) for chat in (CHAT, CHAT[:2])]
    columns = encode_chats(tokenizer, [CHAT, CHAT[:2]], max_length=lengths[1])
    assert columns["truncated"] == [lengths[0] - lengths[1], 0]
    assert columns["input_ids"][0] == columns["input_ids"][1]


def test_turns_without_control_tokens_are_cut_after_their_characters(byte_level):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = ChatTokenizer(byte_level, chat_template=template)
    chat = [{"role": "user", "content": "row"}, {"role": "assistant", "content": "dog"}]
    with pytest.warns(UserWarning, match="no stop token"):
        length = len(encode_chat(tokenizer, chat).input_ids)
    with pytest.warns(UserWarning, match="no stop token"):
        part = encode_chat(tokenizer, chat, max_length=length - 1)
    assert tokenizer.decode(part.input_ids) == "user: row"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": True}, "max_length=True"),
        ({"max_length": 5, "truncation_side": "top"}, "truncation_side='top'"),
        ({"truncation_side": "left"}, "has no effect without max_length"),
    ],
)
def test_settings_without_a_meaning_are_refused(tokenizer, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        encode_chat(tokenizer, CHAT, **arguments)
    with pytest.raises(ValueError, match=complaint):
        encode_chats(tokenizer, [CHAT], **arguments)
