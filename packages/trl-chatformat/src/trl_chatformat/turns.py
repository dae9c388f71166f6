"""Which characters of a rendered conversation a model is trained on: the assistant's turns."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from trl_chatformat.rendering import RenderedChat

TrainOn = Literal["all", "last"] | Callable[[int, Mapping[str, Any]], bool]

FEWEST = 3  # one or two letters in common with the prompt are no opening of a turn
LONGEST_HEADER = 200
LONGEST_END = 40


class Turn(NamedTuple):
    """What a turn covers: from where to where, and whether the template marks its end."""

    start: int
    end: int
    ended: bool = True


class Own(NamedTuple):
    """Characters in a row of a message: from where to where, its number and field."""

    start: int
    end: int
    message: int
    field: str | None


def find_turns(
    chat: RenderedChat,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    stops: Sequence[tuple[int, int]],
    controls: Sequence[tuple[int, int]],
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
        prompt: What the template writes for `add_generation_prompt`: see `read_prompt`.
        stops: The stop tokens that the template wrote, in order: from where to where.
        controls: All control tokens that the template wrote, in order, the same way.
        train_on: Of the assistant's messages "all", the "last", or those for which a function of
            the message's number and the message is true.
        include_trailing: Whether what the template writes after the stop token belongs to a turn.

    Returns:
        The turns, in order; those that the template does not end are not `ended`.

    Raises:
        ValueError: `train_on` is something else.

    Example:
        >>> from trl_chatformat import render_chat
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        >>> messages = [
        ...     {"role": "user", "content": "Hi"},
        ...     {"role": "assistant", "content": "Hello"},
        ... ]
        >>> chat = render_chat(template, messages)
        >>> stops = [(8, 12), (28, 32)]
        >>> [turn] = find_turns(chat, messages, "<assistant>", stops, stops)
        >>> chat.text[turn.start : turn.end]
        'Hello</s>'
    """
    assistants = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = _choose(assistants, messages, train_on)
    if chat.generation is not None:
        return _marked(chat, assistants, chosen)
    search = _Search(chat, messages, prompt, stops, controls, include_trailing)
    turns = [(number, search.find(number)) for number in assistants]
    return [turn for number, turn in turns if turn and turn.start < turn.end and number in chosen]


def read_prompt(without: str, with_prompt: str) -> str:
    """Reads the generation prompt off a text that was rendered without and with it.

    Args:
        without: The text with `add_generation_prompt=False`.
        with_prompt: The same conversation's text with `add_generation_prompt=True`.

    Returns:
        The prompt, or "" if there is none. It is whole where the template writes something else in
        its place, such as an end of text, that begins with the same marks.

    Example:
        >>> read_prompt("<|user|>Hi</s>", "<|user|>Hi<|assistant|>")
        '<|assistant|>'
    """
    start = _count_shared(without, with_prompt)
    if len(without) - start > LONGEST_END:
        return ""  # what differs is more than how the text ends
    if start < len(without):
        while start and with_prompt[start - 1] in "<[|":
            start -= 1
    return with_prompt[start:]


def _choose(
    assistants: Sequence[int], messages: Sequence[Mapping[str, Any]], train_on: TrainOn
) -> set[int]:
    if train_on == "all":
        return set(assistants)
    if train_on == "last":
        return set(assistants[-1:])
    if callable(train_on):
        return {number for number in assistants if train_on(number, messages[number])}
    raise ValueError(f"train_on={train_on!r} must be 'all', 'last' or a function.")


def _marked(chat: RenderedChat, assistants: Sequence[int], chosen: set[int]) -> list[Turn]:
    blocks = chat.generation or ()
    if chosen == set(assistants):
        return [Turn(*block) for block in blocks]
    turns = []
    starts = [span.start for span in chat.spans]
    known = set(assistants)
    for index, (start, end) in enumerate(blocks):
        inside = chat.spans[bisect_left(starts, start + 1) - 1 : bisect_left(starts, end)]
        named = [s.origin.message for s in inside if s.origin and s.origin.message in known]
        # A block in which no message shows is the one of its place.
        if named or len(blocks) == len(assistants):
            number = named[0] if named else assistants[index]
            if number in chosen:
                turns.append(Turn(start, end))
    return turns


def _count_shared(first: str, second: str) -> int:
    return len(commonprefix([first, second]))  # noqa: RUF071 (letter by letter it is)


class _Search:
    """Looks for the turns of one conversation, from the first to the last."""

    def __init__(
        self,
        chat: RenderedChat,
        messages: Sequence[Mapping[str, Any]],
        prompt: str,
        stops: Sequence[tuple[int, int]],
        controls: Sequence[tuple[int, int]],
        include_trailing: bool,
    ) -> None:
        self._text = chat.text
        self._prompt = prompt
        self._stops = stops
        self._controls = controls
        self._openings = [start for start, _ in controls]
        self._trailing = include_trailing
        self._roles = [message["role"] for message in messages]
        self._own = [
            Own(span.start, span.end, span.origin.message, span.origin.field)
            for span in chat.spans
            if span.origin is not None and span.origin.message is not None
        ]
        self._starts = [own.start for own in self._own]
        self._first = [-1] * len(messages)
        for index in range(len(self._own) - 1, -1, -1):
            self._first[self._own[index].message] = index
        # The first message that shows, from each one on.
        self._shown = [-1] * (len(messages) + 1)
        for number in range(len(messages) - 1, -1, -1):
            shows = self._first[number] >= 0
            self._shown[number] = number if shows else self._shown[number + 1]
        self._opened = len(prompt)  # how much of the prompt begins the turn that is looked at
        self._done = 0

    def find(self, number: int) -> Turn | None:
        """Find a message's turn, after those of earlier messages."""
        index = self._first[number]
        if index < 0:
            found = self._find_empty(number)
        else:
            first = self._own[index].start
            before = self._own[index - 1].end if index else 0
            begins = self._begins(max(before, min(self._done, first)), first)
            start = begins[0] if begins else first
            last, following = self._read_own(index)
            found = self._close(number, start, max(last, start), following)
        if found is not None:
            self._done = max(self._done, found.end)
        return found

    def _find_empty(self, number: int) -> Turn | None:
        # Nothing of the message shows: its turn is the first opening up to the next message.
        following = self._shown[number + 1]
        low = high = len(self._text)
        if following >= 0:
            high = max(self._own[self._first[following]].start, self._done)
        before = bisect_left(self._starts, high) - 1
        low = max(self._done, self._own[before].end if before >= 0 else 0)
        begins = self._begins(min(low, high), high)
        if following >= 0 and self._roles[following] == "assistant":
            begins = begins[:-1]
        elif following < 0 and len(begins) > 1 and begins[-1] == len(self._text):
            begins = begins[:-1]  # the generation prompt
        if not begins:
            return None  # the template writes nothing of it
        start = begins[0]
        return self._close(number, start, start, bisect_left(self._starts, start))

    def _begins(self, low: int, high: int) -> list[int]:
        """List where the longest beginning of the prompt ends that stands between two places."""
        best = min(len(self._prompt), FEWEST)
        found: list[int] = []
        position = low
        while self._prompt:
            position = self._text.find(self._prompt[:FEWEST], position, high)
            if position < 0:
                break
            length = self._in_common(position)
            if length > best:
                best = length
                found.clear()
            if length == best:
                found.append(self._leave_whole(position + length))
            position += 1
        self._opened = best if found else len(self._prompt)
        return found

    def _leave_whole(self, position: int) -> int:
        """Move a position out of a control token, to where it begins."""
        before = bisect_left(self._openings, position) - 1
        if before >= 0 and self._controls[before][1] > position:
            return self._controls[before][0]
        return position

    def _in_common(self, position: int) -> int:
        length = len(self._prompt)
        return _count_shared(self._text[position : position + length], self._prompt)

    def _read_own(self, index: int) -> tuple[int, int]:
        """Say where a message's characters end that are in its turn, and which come next."""
        number = self._own[index].message
        kept = [self._own[index]]
        index += 1
        while index < len(self._own) and self._own[index].message == number:
            if self._is_closed(kept[-1].end, self._own[index].start):
                break
            kept.append(self._own[index])
            index += 1
        if index < len(self._own) and self._roles[self._own[index].message] != "assistant":
            # Some templates name the tool that was called again where its answer begins.
            while len(kept) > 1 and kept[-1].field == "tool_calls" and self._repeats(kept):
                kept.pop()
        return kept[-1].end, index

    def _is_closed(self, low: int, high: int) -> bool:
        stop = bisect_left(self._stops, (low, -1))
        if stop == len(self._stops) or self._stops[stop][0] >= high:
            return False
        # An assistant's turn may have parts that each open as a turn does.
        return not self._prompt or self._text.find(self._prompt, self._stops[stop][1], high) < 0

    def _repeats(self, kept: Sequence[Own]) -> bool:
        last = self._text[kept[-1].start : kept[-1].end]
        return any(last in self._text[own.start : own.end] for own in kept[:-1])

    def _close(self, number: int, start: int, last: int, following: int) -> Turn:
        """Find a turn's end after the message's last character."""
        after = len(self._text)
        if following < len(self._own):
            after = max(last, self._own[following].start)
        opening = self._find_opening(number, last, after, following)
        end = self._find_stop(last, after if opening is None else opening + 1)
        if end is None:
            if opening is not None:
                return Turn(start, opening)
            whole = after == len(self._text)
            return Turn(start, after if whole else last, ended=False)
        if self._trailing and opening is not None:
            end = max(end, opening)
        elif self._trailing and number + 1 == len(self._roles):
            end = after
        elif self._trailing:
            rest = self._text[end:after]
            end += len(rest) - len(rest.lstrip())
        return Turn(start, end)

    def _find_stop(self, low: int, high: int) -> int | None:
        end = None
        for stop in range(bisect_left(self._stops, (low, -1)), len(self._stops)):
            begin = self._stops[stop][0]
            if begin >= high or (end is not None and self._text[end:begin].strip()):
                break
            end = self._stops[stop][1]
        return end

    def _find_opening(self, number: int, low: int, high: int, following: int) -> int | None:
        """Find where the next turn opens, between two places: the token most like the prompt's."""
        if number + 1 == len(self._roles):  # what else could open is the prompt itself
            start = high - len(self._prompt)
            at_end = self._prompt and self._text.endswith(self._prompt) and low <= start
            return start if at_end and high == len(self._text) else None
        span = slice(bisect_left(self._openings, low), bisect_left(self._openings, high))
        likely = [(self._in_common(position), position) for position in self._openings[span]]
        others = [(length, position) for length, position in likely if length < self._opened]
        if self._roles[number + 1] != "assistant" and others and max(others)[0]:
            # The next turn isn't the assistant's, though nothing of it may show.
            end = self._find_stop(low, high)
            places = [position for length, position in others if length == max(others)[0]]
            after = [position for position in places if end is not None and position >= end]
            if after:
                return after[0]
            if end is None or len(others) == len(likely):
                return places[0 if len(others) < len(likely) else -1]
        most, place = max(likely, key=lambda found: found[0], default=(0, 0))
        return place if most else self._find_header(low, high, following)

    def _find_header(self, low: int, high: int, following: int) -> int | None:
        # Without tokens, a header is what stands before other messages of the same role too.
        if following == len(self._own):
            return None
        number = self._own[following].message
        for other, index in enumerate(self._first):
            if other != number and index >= 0 and self._roles[other] == self._roles[number]:
                end = self._own[index].start
                header = self._text[max(0, end - LONGEST_HEADER) : end][::-1]
                return high - _count_shared(self._text[low:high][::-1], header)
        return None
