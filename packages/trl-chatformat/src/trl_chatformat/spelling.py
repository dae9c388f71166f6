"""How values are spelled as traced text: printed, as JSON, and in format strings.

What a value is printed as is left to Python; here each piece of the result finds its source.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from trl_chatformat.provenance import Tag, blend, concat, is_plain, make, runs_of, tagged

MOST_PADDING = 1_000_000
JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
PERCENT = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?P<width>\*|\d+)?(?:\.(?P<most>\*|\d*))?[hlL]?(?P<kind>.)",
    re.DOTALL,
)
ALIGNED = re.compile(r"(?:.?[<>=^])?0?\d*(?:\.(?P<most>\d+))?s?", re.DOTALL)

Unknown = Callable[[str], str]
"""Tags text whose origin nobody knows."""


class Items(list[Any]):
    """A list that knows what it is data of."""

    _tag: Tag | None = None


class Fields(dict[Any, Any]):
    """A dict that knows what it is data of."""

    _tag: Tag | None = None


class Int(int):
    """An int that knows what it is data of."""

    _tag: Tag | None = None


class Float(float):
    """A float that knows what it is data of."""

    _tag: Tag | None = None


def find_texts(value: Any) -> Iterator[str]:
    """Lists the texts in a value, and one for each number or container that knows its tag."""
    tag = getattr(value, "_tag", None)
    if tag is not None:
        yield tagged("?", tag)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_texts(key)
            yield from find_texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_texts(item)


def has_others(value: Any) -> bool:
    """Says whether a value is, or holds, something else than text."""
    if isinstance(value, Mapping):
        return any(has_others(key) or has_others(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(map(has_others, value))
    return not isinstance(value, str)


def spell_mixed(plain: str, value: Any, unknown: Unknown) -> str:
    """Gives all of a text made of a value one tag."""
    tag = blend(find_texts(value))
    if tag is not None:
        return tagged(plain, tag)
    return unknown(plain) if has_others(value) else plain


def spell(value: Any, unknown: Unknown) -> str:
    """Prints a value."""
    if isinstance(value, str):
        if type(value) is str or hasattr(value, "_trace"):
            return value
        return unknown(value)
    plain = str(value)
    if not plain or type(plain) is not str:
        return plain
    tag = getattr(value, "_tag", None)
    if type(value) in (list, tuple, dict, Items, Fields):
        whole = concat(list(_repr(value, tag, unknown)))
        return whole if str.__eq__(whole, plain) else spell_mixed(plain, value, unknown)
    return unknown(plain) if tag is None else tagged(plain, tag)


def _repr(value: Any, around: Tag | None, unknown: Unknown) -> Iterator[str]:
    tag = getattr(value, "_tag", around)
    kind = type(value)
    if kind in (dict, Fields):
        yield tagged("{", tag)
        for number, (key, item) in enumerate(value.items()):
            if number:
                yield tagged(", ", tag)
            yield from _repr(key, tag, unknown)
            yield tagged(": ", tag)
            yield from _repr(item, tag, unknown)
        yield tagged("}", tag)
    elif kind in (list, tuple, Items):
        yield tagged("(" if kind is tuple else "[", tag)
        for number, item in enumerate(value):
            if number:
                yield tagged(", ", tag)
            yield from _repr(item, tag, unknown)
        end = ",)" if len(value) == 1 else ")"
        yield tagged(end if kind is tuple else "]", tag)
    elif isinstance(value, str):
        plain = str.__repr__(value)
        whole = concat(list(_quote(value, plain)))
        yield whole if str.__eq__(whole, plain) else tagged(plain, blend([value]))
    else:
        plain = repr(value)
        yield unknown(plain) if tag is None else tagged(plain, tag)


def _quote(value: str, plain: str) -> Iterator[str]:
    # A text with this in it is quoted as the whole is.
    other = "'" if plain[0] == '"' else '"'
    tag = blend([value])
    yield tagged(plain[0], tag)
    position = 0
    for count, run_tag in runs_of(value):
        part = str.__getitem__(value, slice(position, position + count))
        yield tagged(repr(other + part)[2:-1], run_tag)
        position += count
    yield tagged(plain[-1], tag)


def spell_json(value: Any, plain: str, options: Mapping[str, Any], unknown: Unknown) -> str:
    """Finds the sources of a value's JSON.

    Args:
        value: The value.
        plain: Its JSON.
        options: Those of `json.dumps`.
        unknown: Tags text whose origin nobody knows.

    Returns:
        The JSON: its strings have their own tags, all between them the first tag of the data.
    """
    around = spell_mixed("?", value, unknown)
    if is_plain(around):
        return plain
    tag = runs_of(around)[0][1]
    texts = list(_json_texts(value, bool(options.get("sort_keys"))))
    tokens = list(JSON_STRING.finditer(plain))
    if len(tokens) != len(texts):
        return tagged(plain, tag)
    runs: list[tuple[int, Tag | None]] = []
    position = 0
    for token, text in zip(tokens, texts, strict=True):
        start, end = token.start() + 1, token.end() - 1
        runs.append((start - position, tag))
        own = [(end - start, tag)] if text is None else _escaped_runs(text, end - start, options)
        if own is None:
            return tagged(plain, tag)
        runs += own
        position = end
    runs.append((len(plain) - position, tag))
    return make(plain, runs)


def _json_texts(value: Any, sort: bool) -> Iterator[str | None]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in sorted(value.items()) if sort else value.items():
            yield key if isinstance(key, str) else None
            yield from _json_texts(item, sort)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _json_texts(item, sort)


def _escaped_runs(
    text: str, length: int, options: Mapping[str, Any]
) -> list[tuple[int, Tag | None]] | None:
    runs = runs_of(text)
    if length == len(text):
        return runs
    if len(runs) == 1:
        return [(length, runs[0][1])]
    found: list[tuple[int, Tag | None]] = []
    position = 0
    for count, tag in runs:
        part = str.__getitem__(text, slice(position, position + count))
        escaped = json.dumps(part, ensure_ascii=options.get("ensure_ascii", False))
        found.append((len(escaped) - 2, tag))
        position += count
    return found if sum(count for count, _ in found) == length else None


def spell_percent(template: str, values: Any, unknown: Unknown) -> str:
    """Does `template % values`.

    Raises:
        OverflowError: A padding is too wide.
    """
    _check_padding(template, values)
    plain = str.__mod__(template, values)
    try:
        whole = concat(list(_fill_percent(template, values, unknown)))
    except (LookupError, TypeError, ValueError):
        whole = None
    if whole is not None and str.__eq__(whole, plain):
        return whole
    return spell_mixed(plain, [template, values], unknown)


def _check_padding(template: str, values: Any) -> None:
    numbers = (
        [value for value in values if isinstance(value, int)] if isinstance(values, tuple) else []
    )
    for match in PERCENT.finditer(template):
        for width in (match["width"], match["most"]):
            widths = numbers if width == "*" else [int(width[:20])] if width else []
            if any(abs(number) > MOST_PADDING for number in widths):
                raise OverflowError("A format string of the template pads too widely.")


def _fill_percent(template: str, values: Any, unknown: Unknown) -> Iterator[str]:
    left = iter(values if isinstance(values, tuple) else (values,))
    position = 0
    for match in PERCENT.finditer(template):
        yield template[position : match.start()]
        position = match.end()
        if match["kind"] == "%":
            yield tagged("%", blend([template]))
            continue
        stars = tuple(next(left) for part in ("width", "most") if match[part] == "*")
        value = next(left) if match["key"] is None else values[match["key"]]
        spec = re.sub(r"\([^)]*\)", "", str.__str__(match[0]), count=1)
        plain = spec % (*stars, value)
        core = spell(value, unknown)
        if match["kind"] == "s":
            most = stars[-1] if match["most"] == "*" else match["most"] and int(match["most"])
            core = core if match["most"] is None else core[: most or 0]
        elif match["kind"] in "ra":
            core = spell_mixed(plain, value, unknown)
        else:
            core = (
                unknown(plain)
                if getattr(value, "_tag", None) is None
                else tagged(plain, value._tag)
            )
        yield from _surround(plain, core, blend([template]))
    yield template[position:]


def _surround(plain: str, core: str, tag: Tag | None) -> Iterator[str]:
    start = plain.find(core)
    if start < 0:
        yield tagged(plain, blend([core]) or tag)
        return
    yield tagged(plain[:start], tag)
    yield core
    yield tagged(plain[start + len(core) :], tag)


class TracedFormatter(SandboxedFormatter):
    """Fills format strings as the sandbox does, and keeps the pieces.

    Args:
        environment: The sandbox.
        unknown: Tags text whose origin nobody knows.
    """

    def __init__(self, environment: SandboxedEnvironment, unknown: Unknown) -> None:
        super().__init__(environment)
        self._unknown = unknown
        self._pieces: list[str] = []
        self._depth = 0

    def fill(self, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Fills a format string.

        Raises:
            OverflowError: A padding is too wide.
        """
        self._tag = blend([template])
        self._pieces = []
        self._depth = 0
        plain = self.vformat(str.__str__(template), args, kwargs)
        whole = concat(self._pieces)
        if str.__eq__(whole, plain):
            return whole
        return spell_mixed(plain, [template, list(args), dict(kwargs)], self._unknown)

    def parse(self, format_string: Any) -> Iterable[Any]:
        """Parses a format string, or the specification in one."""
        self._depth += 1
        for literal, *field in super().parse(str(format_string)):
            if self._depth == 1:
                self._pieces.append(tagged(literal, self._tag))
            yield (literal, *field)
        self._depth -= 1

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Converts a value as `!s`, `!r` and `!a` say."""
        if conversion == "s":
            return spell(value, self._unknown)
        if conversion is None:
            return value
        return spell_mixed(super().convert_field(value, conversion), value, self._unknown)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Formats a value as the specification says."""
        if any(len(digits) > 6 for digits in re.findall(r"\d+", format_spec)):
            raise OverflowError("A format string of the template pads too widely.")
        plain = super().format_field(value, format_spec)
        if self._depth == 1:
            self._pieces += self._trace_field(value, plain, format_spec)
        return plain

    def _trace_field(self, value: Any, plain: str, format_spec: str) -> Iterable[str]:
        core = spell(value, self._unknown)
        if not isinstance(value, str):
            return [core if core == plain else spell_mixed(plain, value, self._unknown)]
        aligned = ALIGNED.fullmatch(format_spec)
        if aligned and aligned["most"]:
            core = core[: int(aligned["most"])]
        return _surround(str.__str__(plain), core, self._tag)
