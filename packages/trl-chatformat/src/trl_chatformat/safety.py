"""Which control tokens a rendered text really has: those that the template wrote."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trl_chatformat.control_tokens import ControlTokens, Found
from trl_chatformat.provenance import Origin
from trl_chatformat.rendering import Span

Trust = str | Callable[[int | None, str | None], bool] | None


class Neutralised(NamedTuple):
    """Data that spells a control token and stays text: the message's number, or None; its field."""

    message: int | None
    field: str | None
    token: str


def find_written(
    control: ControlTokens, text: str, spans: Sequence[Span], trust: Trust = None
) -> tuple[list[Found], list[Neutralised]]:
    """Finds the control tokens that the template, or trusted data, wrote.

    One is a control token if none of its characters is data, and it is one even where data before
    it makes a tokenizer see another one first.

    Args:
        control: The control tokens there are.
        text: The rendered text.
        spans: Where its characters come from; they cover it in order.
        trust: The field whose text may become control tokens, or a function that says so of a
            message's number and a field.

    Returns:
        The control tokens, and those that are data.

    Raises:
        ValueError: Text of unknown origin spells a control token.
    """
    found = [hit for start, end in _open(spans, trust) for hit in control.find(text, start, end)]
    everywhere = control.find(text)
    if everywhere == found:
        return found, []
    starts = [span.start for span in spans]
    neutralised = []
    for hit in everywhere:
        first = bisect_right(starts, hit.start) - 1
        touched = spans[first : bisect_right(starts, hit.end - 1)]
        data = next((s.origin for s in touched if not _is_open(s.origin, trust)), None)
        if data is not None:
            token = control.contents[hit.token]
            if data.kind == "unknown":
                raise ValueError(
                    f"The template's expression {data.field} made {token!r} of its own text and of "
                    "data, and nobody can tell which wrote it. Change the template, or the data."
                )
            neutralised.append(Neutralised(data.message, data.field, token))
    return found, neutralised


def is_trusted(trust: Trust, message: int | None, field: str | None) -> bool:
    """Says whether a field's text may become control tokens."""
    if trust is None:
        return False
    return field == trust if isinstance(trust, str) else trust(message, field)


def _is_open(origin: Origin | None, trust: Trust) -> bool:
    return origin is None or is_trusted(trust, origin.message, origin.field)


def _open(spans: Sequence[Span], trust: Trust) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for span in spans:
        if _is_open(span.origin, trust):
            start = span.start if start is None else start
        elif start is not None:
            yield start, span.start
            start = None
    if start is not None:
        yield start, spans[-1].end
