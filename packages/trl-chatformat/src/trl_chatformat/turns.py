"""Which characters of a rendered conversation a model is trained on: the assistant's turns."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from trl_chatformat.rendering import RenderedChat

TrainOn = Literal["all", "last"] | Callable[[int, Mapping[str, Any]], bool]


class Turn(NamedTuple):
    """What a turn covers: from where to where, and whether the template marks its end."""

    start: int
    end: int
    ended: bool = True


def find_turns(
    chat: RenderedChat,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    stops: Sequence[tuple[int, int]],
    openings: Sequence[int],
    *,
    train_on: TrainOn = "all",
    include_trailing: bool = False,
) -> list[Turn]:
    """Finds what a model is trained on.

    Where the template has `{% generation %}` blocks, these are it. Elsewhere a turn begins after
    what the rendered turn and the generation prompt have in common, and ends with the stop token
    that follows the message, or where the next turn opens.

    Args:
        chat: The rendered conversation.
        messages: Its messages.
        prompt: What the template writes for `add_generation_prompt`.
        stops: The stop tokens that the template wrote, in order: from where to where.
        openings: Where any control token that the template wrote begins, in order.
        train_on: Of the assistant's messages "all", the "last", or those for which a function of
            the message's number and the message is true.
        include_trailing: Whether what the template writes after the stop token belongs to a turn.

    Returns:
        The turns, in order; those that the template does not end are not `ended`.

    Raises:
        ValueError: `train_on` is something else.
    """
    own = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = _choose(own, messages, train_on)
    if chat.generation is not None:
        return _marked(chat, own, chosen)
    bounds = _bounds(chat, len(messages))
    turns = []
    for number in own:
        before = max((end for _, end in bounds[:number] if end >= 0), default=0)
        after = next((start for start, _ in bounds[number + 1 :] if start >= 0), len(chat.text))
        first, last = bounds[number]
        start = _begin(chat.text, prompt, before, first if first >= 0 else after)
        if start is None:
            if first < 0:
                continue  # the template writes nothing of this turn
            start = first
        last = max(last, start)
        turns.append((number, _end(start, last, after, len(chat.text), stops, openings)))
    if include_trailing:
        turns = [(n, _trail(turn, bounds, n, chat.text, openings)) for n, turn in turns]
    return [turn for number, turn in turns if number in chosen]


def _choose(
    own: Sequence[int], messages: Sequence[Mapping[str, Any]], train_on: TrainOn
) -> set[int]:
    if train_on == "all":
        return set(own)
    if train_on == "last":
        return set(own[-1:])
    if callable(train_on):
        return {number for number in own if train_on(number, messages[number])}
    raise ValueError(f"train_on={train_on!r} must be 'all', 'last' or a function.")


def _marked(chat: RenderedChat, own: Sequence[int], chosen: set[int]) -> list[Turn]:
    blocks = chat.generation or ()
    if chosen == set(own):
        return [Turn(*block) for block in blocks]
    turns = []
    for index, (start, end) in enumerate(blocks):
        inside = (s.origin for s in chat.spans if s.start < end and s.end > start)
        named = [o.message for o in inside if o is not None and o.message in own]
        # A block in which no message shows is the one of its place.
        number = named[0] if named else own[index] if len(blocks) == len(own) else None
        if number in chosen:
            turns.append(Turn(start, end))
    return turns


def _bounds(chat: RenderedChat, count: int) -> list[tuple[int, int]]:
    """Say where each message's own characters begin and end; -1 where it has none."""
    bounds = [(-1, -1)] * count
    for span in chat.spans:
        number = span.origin.message if span.origin is not None else None
        if number is not None:
            start = bounds[number][0]
            bounds[number] = (span.start if start < 0 else start, span.end)
    return bounds


def _begin(text: str, prompt: str, low: int, high: int) -> int | None:
    """Find the longest beginning of the prompt that the template writes between two positions."""
    best, at = 0, low
    begin = None
    while prompt and (at := text.find(prompt[0], at, high)) >= 0:
        length = _common(text, at, prompt)
        if length >= max(best, 1):
            best, begin = length, at + length
        at += 1
    # One or two letters in common are no opening of a turn.
    return begin if best >= min(len(prompt), 3) else None


def _common(text: str, at: int, prompt: str) -> int:
    length = 0
    for letter in prompt:
        if at + length >= len(text) or text[at + length] != letter:
            break
        length += 1
    return length


def _end(
    start: int,
    last: int,
    after: int,
    length: int,
    stops: Sequence[tuple[int, int]],
    openings: Sequence[int],
) -> Turn:
    stop = bisect_left(stops, (last, -1))
    if stop < len(stops) and stops[stop][0] < max(after, last + 1):
        return Turn(start, stops[stop][1])
    opening = bisect_left(openings, last)
    if opening < len(openings) and openings[opening] < after:
        return Turn(start, openings[opening])
    return Turn(start, after if after < length else length, after < length)


def _trail(
    turn: Turn,
    bounds: Sequence[tuple[int, int]],
    number: int,
    text: str,
    openings: Sequence[int],
) -> Turn:
    after = next((start for start, _ in bounds[number + 1 :] if start >= 0), len(text))
    opening = bisect_left(openings, turn.end)
    if opening < len(openings) and openings[opening] < after:
        return turn._replace(end=openings[opening])
    return turn._replace(end=len(text)) if after == len(text) else turn
