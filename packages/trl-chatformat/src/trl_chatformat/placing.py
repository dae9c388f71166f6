"""Which token belongs to which message, and which ones are trained on."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from trl_chatformat.control_tokens import Found


class Mark(NamedTuple):
    """What holds for a piece of text: its message, or -1, and whether it is trained on."""

    message: int
    trained: bool


NOTHING = Mark(-1, False)


class Piece(NamedTuple):
    """Text of one mark: a control token if `token` is an id; data if `source` says of what."""

    text: str
    token: int | None
    mark: Mark
    source: Any = None


class Run(NamedTuple):
    """Characters of one origin: from where to where, the message or -1, and what it is data of."""

    start: int
    end: int
    message: int
    source: Any = None


def cut(
    text: str,
    runs: Sequence[Run],
    trained: Sequence[tuple[int, int]],
    found: Sequence[Found],
    stops: Sequence[tuple[int, int]] = (),
) -> list[Piece]:
    """Cuts a text into pieces of one mark, with its control tokens whole.

    Args:
        text: The text.
        runs: Where its characters come from; they cover it in order.
        trained: What is trained on, in order, from where to where.
        found: The control tokens, in order.
        stops: For messages, where the token begins that ends the turn: (position, message).

    Returns:
        The pieces, in order.

    Example:
        >>> runs = [Run(0, 4, -1), Run(4, 6, 0), Run(6, 9, -1)]
        >>> [(p.text, *p.mark) for p in cut("<u>:hi<e>", runs, [(4, 9)], [], [])]
        [('<u>:', -1, False), ('hi', 0, True), ('<e>', -1, True)]
    """
    inside = {i for f in found for i in range(f.start + 1, f.end)}
    cuts = {0, len(text)}
    cuts.update(run.end for run in runs)
    cuts.update(edge for span in trained for edge in span)
    cuts.update(edge for f in found for edge in (f.start, f.end))
    edges = sorted(cuts - inside)
    tokens = {f.start: f.token for f in found}
    ends_turn = dict(stops)
    starts = [run.start for run in runs]
    train_starts = [start for start, _ in trained]
    pieces: list[Piece] = []
    for start, end in pairwise(edges):
        run = runs[bisect_right(starts, start) - 1]
        span = bisect_right(train_starts, start) - 1
        mark = Mark(ends_turn.get(start, run.message), span >= 0 and start < trained[span][1])
        piece = Piece(text[start:end], tokens.get(start), mark, run.source)
        last = pieces[-1] if pieces else None
        if last and last.token is None is piece.token and last[2:] == piece[2:]:
            pieces[-1] = last._replace(text=last.text + piece.text)
        else:
            pieces.append(piece)
    return pieces


class Step(NamedTuple):
    """From one control token, or the beginning, to the next one, or the end.

    Its tokens have the mark `rest`, after those of `prefix`, which the template writes. `mark` is
    the control token's own.
    """

    prefix: list[int]
    prefix_mark: Mark
    rest: Mark
    token: int | None
    mark: Mark


def plan(
    pieces: Iterable[Piece], encode_after: Callable[[int | None, str], list[int] | None]
) -> list[Step] | None:
    """Plans how to mark tokens without knowing where in the text each one lies.

    Control tokens are found among the ids by themselves. In between, the ids of what the template
    writes first are known, and the rest, of one mark, is what follows them.

    Args:
        pieces: The text's pieces.
        encode_after: Encodes what follows a control token, or begins a text (None); or None where
            its ids don't tell its end.

    Returns:
        The steps, or None if the text is not so simple.
    """
    steps: list[Step] = []
    before: int | None = None
    segment: list[Piece] = []
    for piece in [*pieces, Piece("", None, NOTHING)]:
        if piece.token is None and piece.text:
            segment.append(piece)
            continue
        marks = [p.mark for p in segment]
        prefix: list[int] = []
        if len(set(marks)) > 1:
            known = None
            if segment[0].source is None and len(set(marks[1:])) == 1:
                known = encode_after(before, segment[0].text)
            if known is None:
                return None
            prefix = known
        first, last = (marks[0], marks[-1]) if marks else (NOTHING, NOTHING)
        steps.append(Step(prefix, first, last, piece.token, piece.mark))
        before = piece.token
        segment = []
    return steps


def mark_by_steps(ids: list[int], steps: Iterable[Step]) -> tuple[list[int], list[int]] | None:
    """Marks tokens as planned.

    Returns:
        The masks (0 or 1) and the messages (or -1) of all tokens, or None if what follows the
        template's own text has merged with it.
    """
    length = len(ids)
    masks, messages = [0] * length, [-1] * length
    at = 0
    for prefix, prefix_mark, rest, token, mark in steps:
        start = at
        if prefix:
            at += len(prefix)
            if ids[start:at] != prefix:
                return None
            _mark(masks, messages, start, at, prefix_mark)
        end = length if token is None else ids.index(token, at)
        if rest != NOTHING:
            _mark(masks, messages, at, end, rest)
        if token is not None:
            at = end + 1
            if mark != NOTHING:
                _mark(masks, messages, end, at, mark)
    return masks, messages


def mark_by_position(
    length: int, pieces: Sequence[Piece], located: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Marks tokens by where pieces lie among them; a token of two messages has the earlier.

    Args:
        length: How many tokens there are.
        pieces: The text's pieces.
        located: For each piece's beginning, and the last one's end: how many tokens end there or
            before, and how many begin before.

    Returns:
        The masks (0 or 1) and the messages (or -1) of all tokens.
    """
    masks, messages = [0] * length, [-1] * length
    for piece, (start, _), (_, end) in zip(
        reversed(pieces), reversed(located[:-1]), reversed(located[1:]), strict=True
    ):
        _mark(masks, messages, start, end, piece.mark)
    return masks, messages


def find_edges(pieces: Iterable[str]) -> list[int]:
    """Says where each piece of a text begins, and where the last one ends."""
    return [0, *accumulate(map(len, pieces))]


def _mark(masks: list[int], messages: list[int], start: int, end: int, mark: Mark) -> None:
    if mark.message >= 0:
        messages[start:end] = [mark.message] * (end - start)
    if mark.trained:
        masks[start:end] = [1] * (end - start)
