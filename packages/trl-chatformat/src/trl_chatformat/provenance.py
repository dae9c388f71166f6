"""Strings that know where each of their characters comes from."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex


@dataclass(frozen=True, slots=True)
class Origin:
    """Where characters come from that the template did not write.

    Args:
        kind: "message", "tool", "document" or "setting"; "unknown" if a template made them of its
            own text and of data, in a way that can't be followed.
        message: The number of the message.
        field: The field of the message, or the template's expression where the kind is unknown.
    """

    kind: str
    message: int | None = None
    field: str | None = None


class Source(NamedTuple):
    """Where a run of characters comes from, and whether it is inside of a generation block."""

    origin: Origin | None
    generation: bool = False


TEMPLATE = Source(None)
Runs = tuple[tuple[int, Source], ...]
_WORD = re.compile(r"\S+")


class Traced(str):
    """A string whose characters have sources; what is made of it has them too.

    Args:
        text: The text.
        runs: How many characters in a row have which source; they cover the text.

    Example:
        >>> name = trace("Ada", Origin("message", 0, "content"))
        >>> greeting = "Hello " + name.upper() + "!"
        >>> [(length, source.origin is None) for length, source in greeting.runs]
        [(6, True), (3, False), (1, True)]
    """

    __slots__ = ("runs",)
    runs: Runs

    def __new__(cls, text: str, runs: Runs = ()) -> "Traced":
        self = super().__new__(cls, text)
        self.runs = runs
        return self

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Traced, (str.__str__(self), self.runs)

    def __add__(self, other: str) -> str:
        return join_traced([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_traced([other, self]) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return join_traced([self] * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return derive(str.__mod__(self, values), "%", self, values)

    def __rmod__(self, pattern: str) -> str:
        return derive(str.__mod__(pattern, self), "%", pattern, self)

    def __getitem__(self, key: Any) -> str:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return _make(text, _cut(self.runs, start, max(start, stop)))
            sources = list(_each(self.runs))[key]
        else:
            sources = [list(_each(self.runs))[key]]
        return _make(text, tuple((1, source) for source in sources))

    def __iter__(self) -> Iterator[str]:
        for letter, source in zip(str.__iter__(self), _each(self.runs), strict=True):
            yield _make(letter, ((1, source),))

    def strip(self, chars: str | None = None) -> str:
        return traced(self.lstrip(chars)).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> str:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find_in_order(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._find_in_order(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, start = [], 0
        whole = str.splitlines(self, True)
        for line, kept in zip(str.splitlines(self, keepends), whole, strict=True):
            lines.append(self[start : start + len(line)])
            start += len(kept)
        return lines

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._three(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        parts: list[str] = []
        at = 0
        left = count.__index__() if count.__index__() >= 0 else len(self) + 1
        if old == "":
            for letter in self:
                if not left:
                    break
                parts += [new, letter]
                at += 1
                left -= 1
            return join_traced([*parts, self[at:], *([new] if left else [])])
        while left and (found := self.find(old, at)) >= 0:
            parts += [self[at:found], new]
            at = found + len(old)
            left -= 1
        return join_traced([*parts, self[at:]])

    def join(self, parts: Iterable[str]) -> str:
        between: list[str] = []
        for part in parts:
            between += [self, part]
        return join_traced(between[1:])

    def _find_in_order(self, parts: list[str], gap: int) -> list[str]:
        found, start = [], 0
        for part in parts:
            if not gap:
                start = self.find(part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + gap
        return found

    def _three(self, parts: Sequence[str]) -> tuple[str, str, str]:
        first, second, third = self._find_in_order(list(parts), 0) if all(parts) else parts
        if not all(parts):
            ends = [0, len(parts[0]), len(parts[0]) + len(parts[1]), len(self)]
            first, second, third = (self[a:b] for a, b in zip(ends, ends[1:], strict=False))
        return first, second, third


def _same_length(name: str) -> Callable[..., str]:
    plain = getattr(str, name)

    def method(self: Traced, *args: Any) -> str:
        return derive(plain(self, *args), name, self)

    method.__name__ = name
    return method


for _name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
    setattr(Traced, _name, _same_length(_name))


def _padded(name: str) -> Callable[..., str]:
    plain = getattr(str, name)

    def method(self: Traced, *args: Any) -> str:
        return derive(plain(self, *args), name, self, *args)

    method.__name__ = name
    return method


for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
    setattr(Traced, _name, _padded(_name))


def trace(text: str, origin: Origin | None, generation: bool = False) -> str:
    """Gives all characters of a text one source."""
    return _make(str.__str__(text), ((len(text), Source(origin, generation)),))


def traced(text: str) -> Traced:
    """Makes a text one whose methods follow its characters, the template's own too."""
    return text if isinstance(text, Traced) else Traced(text, runs_of(text))


def runs_of(text: str) -> Runs:
    """Tells the sources of a text's characters, which are the template's unless known."""
    if isinstance(text, Traced):
        return text.runs
    return ((len(text), TEMPLATE),) if text else ()


def join_traced(parts: Iterable[str]) -> str:
    """Joins texts, and their sources.

    Example:
        >>> type(join_traced(["a", "b"])), type(join_traced(["a", trace("b", Origin("tool"))]))
        (<class 'str'>, <class 'trl_chatformat.provenance.Traced'>)
    """
    parts = list(parts)
    text = "".join(parts)
    if not any(type(part) is Traced for part in parts):
        return text
    runs: list[tuple[int, Source]] = []
    for part in parts:
        for length, source in runs_of(part):
            if runs and runs[-1][1] == source:
                runs[-1] = (runs[-1][0] + length, source)
            else:
                runs.append((length, source))
    return Traced(text, tuple(runs))


def in_generation(text: str) -> str:
    """Marks a text as the inside of a generation block."""
    return Traced(
        text, tuple((length, Source(source.origin, True)) for length, source in runs_of(text))
    )


def derive(text: str, expression: str, *given: Any) -> str:
    """Gives a text the source of what it was made of, where that can't be followed by letters.

    Args:
        text: The text.
        expression: How it was made, for an error.
        given: What it was made of.

    Returns:
        The text: letter by letter like the first of `given` if it is as long, else data of their
        one origin, or of unknown origin if they have several or if template text is among them.
    """
    sources = [source for value in given for source in sources_of(value)]
    if not text or all(source.origin is None for source in sources):
        return str.__str__(text)
    first = given[0]
    if isinstance(first, Traced) and len(given) == 1 and len(first) == len(text):
        return _make(text, first.runs)
    origins = {source.origin for source in sources}
    known = origins.pop() if len(origins) == 1 else None
    return trace(text, known or Origin("unknown", None, expression))


def sources_of(value: Any) -> Iterator[Source]:
    """Lists the sources of all characters in a value, and in what it holds."""
    if isinstance(value, str):
        yield from (source for _, source in runs_of(value))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from sources_of(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from sources_of(item)


def is_data(value: Any) -> bool:
    """Says whether some character in a value is not the template's."""
    return any(source.origin is not None for source in sources_of(value))


def _make(text: str, runs: Runs) -> str:
    if all(source == TEMPLATE for _, source in runs):
        return str.__str__(text)
    return Traced(text, runs)


def _each(runs: Runs) -> Iterator[Source]:
    for length, source in runs:
        for _ in range(length):
            yield source


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    kept = []
    at = 0
    for length, source in runs:
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            kept.append((high - low, source))
        at += length
        if at >= stop:
            break
    return tuple(kept)
