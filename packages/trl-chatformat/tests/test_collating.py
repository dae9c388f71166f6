"""Batches whose labels come from the masks."""

import pytest
import torch

from trl_chatformat import collate_chats

ROWS = [
    {"input_ids": [5, 6, 0], "assistant_masks": [0, 1, 1]},
    {"input_ids": [0], "assistant_masks": [1], "attention_mask": [1], "message_ids": [0]},
]


@pytest.mark.parametrize(
    ("side", "ids", "attention", "labels"),
    [
        ("right", [0, 9, 9, 9], [1, 0, 0, 0], [0, -100, -100, -100]),
        ("left", [9, 9, 9, 0], [0, 0, 0, 1], [-100, -100, -100, 0]),
    ],
)
def test_rows_are_padded_on_either_side_up_to_a_multiple(side, ids, attention, labels):
    batch = collate_chats(ROWS, pad_id=9, padding_side=side, pad_to_multiple_of=4)
    assert {name: rows[1] for name, rows in batch.items()} == {
        "input_ids": ids,
        "attention_mask": attention,
        "labels": labels,
    }


def test_a_pad_token_that_ends_turns_is_learnt_where_it_ends_one():
    batch = collate_chats(ROWS, pad_id=0)
    assert batch["labels"] == [[-100, 6, 0], [0, -100, -100]]


def test_tensors_hold_the_same():
    lists = collate_chats(ROWS, pad_id=9)
    tensors = collate_chats(ROWS, pad_id=9, return_tensors="pt")
    assert {name: value.tolist() for name, value in tensors.items()} == lists
    assert all(value.dtype == torch.long for value in tensors.values())


@pytest.mark.parametrize(
    ("rows", "arguments", "complaint"),
    [
        ([], {}, "no rows"),
        ([{"input_ids": [1]}], {}, "Row 0 has no assistant_masks"),
        ([{"input_ids": [1], "assistant_masks": []}], {}, "Row 0 has columns of different lengths"),
        (ROWS, {"padding_side": "top"}, "padding_side='top'"),
        (ROWS, {"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
        (ROWS, {"return_tensors": "np"}, "return_tensors='np'"),
    ],
)
def test_what_cannot_be_collated_is_refused(rows, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        collate_chats(rows, pad_id=0, **arguments)
