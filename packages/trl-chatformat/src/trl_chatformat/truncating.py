"""Cutting encoded chats to a length, between turns unless asked otherwise."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

Side = Literal["left", "right", "left-inside", "right-inside"]
SIDES: tuple[str, ...] = get_args(Side)


def check_truncation(max_length: Any, side: Any) -> None:
    """Refuses a length or a side that means nothing.

    Raises:
        ValueError: The length isn't a positive int, or the side isn't one of `SIDES`.
    """
    is_int = isinstance(max_length, int) and not isinstance(max_length, bool)
    if max_length is not None and not (is_int and max_length > 0):
        raise ValueError(f"max_length={max_length!r}: a positive int was expected, or None.")
    if side is not None and side not in SIDES:
        raise ValueError(f"truncation_side={side!r}: one of {', '.join(SIDES)} was expected.")
    if side is not None and max_length is None:
        raise ValueError(f"truncation_side={side!r} has no effect without max_length: give both.")


def choose_part(
    ids: Sequence[int],
    message_ids: Sequence[int],
    control: Collection[int],
    max_length: int,
    side: str,
) -> slice:
    """Chooses which tokens to keep.

    Args:
        ids: The tokens.
        message_ids: The message that each belongs to, or -1.
        control: The ids of control tokens, with which turns begin where there are any.
        max_length: How many tokens to keep at most.
        side: Where to cut: "left" and "right" keep whole turns, "left-inside" and "right-inside"
            keep as many tokens as fit, though half a message may be among them.

    Returns:
        The part to keep, in one piece.

    Example:
        >>> ids, messages = [8, 1, 1, 9, 8, 2, 9], [-1, 0, 0, 0, -1, 1, 1]
        >>> choose_part(ids, messages, {8, 9}, 5, "right")
        slice(0, 4, None)
        >>> choose_part(ids, messages, {8, 9}, 5, "left")
        slice(4, 7, None)
        >>> choose_part(ids, messages, {8, 9}, 5, "left-inside")
        slice(2, 7, None)
    """
    length = len(ids)
    if length <= max_length:
        return slice(0, length)
    if side.endswith("-inside"):
        return (
            slice(0, max_length) if side == "right-inside" else slice(length - max_length, length)
        )
    between = _find_turn_starts(ids, message_ids, control)
    if side == "right":
        return slice(0, max((cut for cut in between if cut <= max_length), default=0))
    start = min((cut for cut in between if length - cut <= max_length), default=length)
    return slice(start, length)


def _find_turn_starts(
    ids: Sequence[int], message_ids: Sequence[int], control: Collection[int]
) -> list[int]:
    # Where a message's last token is followed by others: what the template writes between two turns
    # belongs to the later one from its first control token on.
    starts = []
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, message in enumerate(message_ids):
        if message >= 0:
            last[message] = index
            first.setdefault(message, index)
    messages = sorted(first)
    reached = -1
    for message, following in pairwise(messages):
        reached = max(reached, last[message])
        if first[following] <= reached:
            continue  # one token holds the end of one and the beginning of the other
        gap = range(reached + 1, first[following] + 1)
        starts.append(next((index for index in gap if ids[index] in control), reached + 1))
    return starts
