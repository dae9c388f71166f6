"""Text that knows where each of its characters came from, whatever is done to it.

`Text` is a `str` with a trace: runs of characters, each with a tag. A tag is None for what a
template wrote itself. Plain `str` counts as written by the template, so that all that comes from
elsewhere must be made a `Text` when it enters, and every operation here returns one again.
Operations are done by `str`; where they don't say by themselves what became of each character, the
result is built once more from traced pieces, and if that gives another text, all of it has the
first tag of its data: nothing that may be data is ever said to be the template's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex


@dataclass(frozen=True, slots=True)
class Origin:
    """What characters are derived from.

    `kind` is "message", "tool", "document", "setting" (a variable of the template) or "unknown";
    `message` the message's number, or None; `field` the message's field, such as "content", or
    the name of the variable, or, where the origin is unknown, the template's expression.
    """

    kind: str
    message: int | None = None
    field: str | None = None


class Tag(NamedTuple):
    """Where characters came from, and the number of the `{% generation %}` block around them."""

    origin: Origin | None
    block: int | None = None


Run = tuple[int, Tag | None]
"""How many characters, and their tag."""


class Rope(NamedTuple):
    """Two traces one after the other, so that adding text takes no longer for a long text."""

    left: "Trace"
    right: "Trace"


Trace = list[Run] | Rope

STRANGE = Tag(Origin("unknown", None, "a kind of text that can't be followed"))


def trace_of(text: str) -> Trace:
    """Says where a text's characters came from; plain text is the template's."""
    if type(text) is str:
        return [(len(text), None)] if text else []
    trace = getattr(text, "_trace", None)
    return [(len(text), STRANGE)] if trace is None else trace


def runs_of(text: str) -> list[Run]:
    """Says the same as a list of runs."""
    trace = trace_of(text)
    if isinstance(trace, Rope):
        trace = flatten([trace])
        if isinstance(text, Text):
            text._trace = trace
    return trace


def flatten(traces: Iterable[Trace]) -> list[Run]:
    """Puts traces one after the other into one list of runs, in which neighbours differ."""
    runs: list[Run] = []
    length = 0
    last: Tag | None = None
    stack = list(traces)[::-1]
    while stack:
        trace = stack.pop()
        if isinstance(trace, Rope):
            stack += (trace.right, trace.left)
            continue
        for count, tag in trace:
            if tag is last or tag == last:
                length += count
            else:
                if length:
                    runs.append((length, last))
                length, last = count, tag
    if length:
        runs.append((length, last))
    return runs


def make(text: str, trace: Trace) -> "Text":
    """Makes a traced text."""
    result = str.__new__(Text, text)
    result._trace = trace
    return result


def tagged(text: str, tag: Tag | None) -> str:
    """Gives a whole text one tag."""
    return make(text, [(len(text), tag)] if text else [])


def is_plain(text: str) -> bool:
    """Says whether all of a text is the template's."""
    return type(text) is str or all(tag is None for _, tag in runs_of(text))


def blend(texts: Iterable[str]) -> Tag | None:
    """Chooses one tag for what is made of several texts: the first of their data."""
    for text in texts:
        if type(text) is not str:
            for _, tag in runs_of(text):
                if tag is not None and tag.origin is not None:
                    return tag
    return None


def concat(pieces: Sequence[str]) -> str:
    """Joins texts; the result is traced if one of them is."""
    whole = "".join(pieces)
    if all(type(piece) is str for piece in pieces):
        return whole
    return make(whole, flatten(map(trace_of, pieces)))


def rebuilt(plain: str, sources: Iterable[str], build: Callable[[], Iterable[str]]) -> str:
    """Traces a text by building it from pieces; or all of it blends its sources."""
    whole = concat(list(build()))
    if str.__eq__(whole, plain):
        return make(whole, trace_of(whole))
    return tagged(plain, blend(sources))


def mapped(plain: str, source: str, change: Callable[[str], str]) -> str:
    """Traces a text whose characters each became one or more others."""
    if len(plain) == len(source):
        return make(plain, runs_of(source))
    return rebuilt(plain, [source], lambda: (_retagged(change(c), c) for c in split_up(source)))


def split_up(text: str) -> Iterator[str]:
    """Takes a text apart into its characters."""
    return iter(text if isinstance(text, Text) else make(text, trace_of(text)))


def _retagged(text: str, source: str) -> str:
    return tagged(str.__str__(text), runs_of(source)[0][1])


class Text(str):
    """A `str` that knows where each of its characters came from; it is used as any other.

    Example:
        >>> name = tagged("Hi ", Tag(Origin("message", 0, "content")))
        >>> text = "<" + name.strip().upper() + ">"
        >>> print(text, [(count, tag and tag.origin.message) for count, tag in runs_of(text)])
        <HI> [(1, None), (2, 0), (1, None)]
    """

    __slots__ = ("_trace",)
    _trace: Trace

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return make(str.__add__(self, other), Rope(self._trace, trace_of(other)))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return make(str.__add__(other, self), Rope(trace_of(other), self._trace))

    def __mul__(self, count: SupportsIndex) -> str:
        whole = str.__mul__(self, count)
        return make(whole, flatten([self._trace] * (len(whole) // len(self) if self else 0)))

    __rmul__ = __mul__

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        part = str.__getitem__(self, index)
        if not isinstance(index, slice):
            position = index.__index__()
            return self._part(position + (len(self) if position < 0 else 0), part)
        start, _, step = index.indices(len(self))
        if step == 1:
            return self._part(start, part)
        tags = [tag for count, tag in runs_of(self) for _ in range(count)]
        return make(part, flatten([[(1, tag)] for tag in tags[index]]))

    def __iter__(self) -> Iterator[str]:
        characters = str.__iter__(self)
        for count, tag in runs_of(self):
            trace: Trace = [(1, tag)]
            for _ in range(count):
                yield make(next(characters), trace)

    def _part(self, start: int, text: str) -> str:
        runs = runs_of(self)
        length = len(text)
        if len(runs) == 1:
            return make(text, [(length, runs[0][1])] if text else [])
        found: list[Run] = []
        position = 0
        for count, tag in runs:
            if position >= start + length:
                break
            low, high = max(position, start), min(position + count, start + length)
            if low < high:
                found.append((high - low, tag))
            position += count
        return make(text, found)

    def _parts(self, parts: Sequence[str], gap: int | None) -> list[str]:
        found: list[str] = []
        position = 0
        for part in parts:
            # Between words there is white space, with which no word begins.
            start = str.find(self, part, position) if gap is None else position
            found.append(self._part(start, part))
            position = start + len(part) + (gap or 0)
        return found

    def strip(self, chars: str | None = None) -> str:
        return self._part(len(self) - len(str.lstrip(self, chars)), str.strip(self, chars))

    def lstrip(self, chars: str | None = None) -> str:
        text = str.lstrip(self, chars)
        return self._part(len(self) - len(text), text)

    def rstrip(self, chars: str | None = None) -> str:
        return self._part(0, str.rstrip(self, chars))

    def removeprefix(self, prefix: str) -> str:
        text = str.removeprefix(self, prefix)
        return self._part(len(self) - len(text), text)

    def removesuffix(self, suffix: str) -> str:
        return self._part(0, str.removesuffix(self, suffix))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._parts(str.splitlines(self, True), 0)
        if keepends:
            return lines
        ends = map(len, str.splitlines(self))
        return [line[:end] for line, end in zip(lines, ends, strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        first, second, third = self._parts(str.partition(self, sep), 0)
        return first, second, third

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        first, second, third = self._parts(str.rpartition(self, sep), 0)
        return first, second, third

    def join(self, pieces: Iterable[str], /) -> str:
        items = list(pieces)
        plain = str.join(self, items)
        between = [piece for item in items for piece in (self, item)][1:]
        return rebuilt(plain, [self, *items], lambda: between)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        plain = str.replace(self, old, new, count)
        return rebuilt(plain, [self, new], lambda: self._replaced(old, new, count.__index__()))

    def _replaced(self, old: str, new: str, count: int) -> Iterator[str]:
        if old:
            for number, part in enumerate(self.split(old, count)):
                if number:
                    yield new
                yield part
            return
        for position in range(len(self) + 1):
            if count < 0 or position < count:
                yield new
            yield self[position : position + 1]

    def _padded(self, plain: str, left: int, fill: str) -> str:
        right = len(plain) - len(self) - left
        return rebuilt(plain, [self, fill], lambda: [fill * left, self, fill * right])

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        plain = str.center(self, width, fillchar)
        room = len(plain) - len(self)
        return self._padded(plain, room // 2 + (room & width.__index__() & 1), fillchar)

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        return self._padded(str.ljust(self, width, fillchar), 0, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> str:
        plain = str.rjust(self, width, fillchar)
        return self._padded(plain, len(plain) - len(self), fillchar)

    def zfill(self, width: SupportsIndex, /) -> str:
        plain = str.zfill(self, width)
        zeros = "0" * (len(plain) - len(self))
        sign = int(str.startswith(self, ("+", "-")))
        return rebuilt(plain, [self], lambda: [self[:sign], zeros, self[sign:]])

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        plain = str.expandtabs(self, tabsize)
        return rebuilt(plain, [self], lambda: self._expanded(tabsize.__index__()))

    def _expanded(self, size: int) -> Iterator[str]:
        column = 0
        for character in self:
            if character == "\t":
                spaces = size - column % size if size > 0 else 0
                column += spaces
                yield _retagged(" " * spaces, character)
            else:
                column = 0 if character in "\n\r" else column + 1
                yield character

    def translate(self, table: Any, /) -> str:
        values = table.values() if isinstance(table, Mapping) else table
        texts = [value for value in values if isinstance(value, str)]
        plain = str.translate(self, table)
        return rebuilt(plain, [self, *texts], lambda: self._translated(table))

    def _translated(self, table: Any) -> Iterator[str]:
        for character in self:
            try:
                value = table[ord(character)]
            except LookupError:
                value = character
            if isinstance(value, int):
                value = _retagged(chr(value), character)
            if value is not None:
                yield value

    def upper(self) -> str:
        return mapped(str.upper(self), self, str.upper)

    def lower(self) -> str:
        return mapped(str.lower(self), self, str.lower)

    def casefold(self) -> str:
        return mapped(str.casefold(self), self, str.casefold)

    def swapcase(self) -> str:
        return mapped(str.swapcase(self), self, str.swapcase)

    def title(self) -> str:
        return mapped(str.title(self), self, str.title)

    def capitalize(self) -> str:
        return mapped(str.capitalize(self), self, str.capitalize)
