"""What a template writes around the texts of conversations of one shape, found once and reused.

A conversation is rendered without following its characters. If the result is, letter by letter,
what the template is known to write around such texts, and no text spells a control token, then
each character comes from where it came from before.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from trl_chatformat.placing import Piece, Step

MOST = 4  # layouts of a shape: some templates write a message in one way or another

Field = tuple[int, str]

# How templates take what surrounds a text away from it, if they do.
WAYS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: text.strip("\n"),
    str.lstrip,
    str.rstrip,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)


class Shape(NamedTuple):
    """A conversation without its texts, and its texts."""

    key: Hashable
    texts: dict[Field, str]


def read_shape(messages: Sequence[Mapping[str, Any]]) -> Shape | None:
    """Tells the texts of messages from all else.

    Args:
        messages: The messages.

    Returns:
        The shape, or None if a message has parts that have parts.

    Example:
        >>> read_shape([{"role": "user", "content": "Hi"}]).texts
        {(0, 'content'): 'Hi'}
    """
    key: list[Hashable] = []
    texts: dict[Field, str] = {}
    for number, message in enumerate(messages):
        for name, value in message.items():
            if type(value) is str and name != "role":
                texts[number, name] = value
                key.append(name)
            elif value is None or type(value) in (str, bool, int, float):
                key.append((name, value, type(value)))
            else:
                return None
        key.append(None)
    return Shape(tuple(key), texts)


class Layout:
    """What a template writes around texts, as the copy of the tokenizer spells it."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        parts: Sequence[str | tuple[Field, Callable[[str], str]]],
        steps: list[Step] | None,
        prompt: str,
    ) -> None:
        self._pieces = pieces
        self._parts = parts
        self.steps = steps
        self._never = _find_continuations(pieces, prompt)

    @classmethod
    def read(
        cls,
        pieces: Sequence[Piece],
        steps: list[Step] | None,
        texts: Mapping[Field, str],
        spell: Callable[[Piece], str],
        prompt: str = "",
    ) -> "Layout | None":
        """Reads a layout off a conversation's pieces.

        Args:
            pieces: The pieces; the source of data has a `message` and a `field`.
            steps: How to mark their tokens.
            texts: The texts of the conversation.
            spell: Spells a piece.
            prompt: The generation prompt, as far as which an answer is not trained on.

        Returns:
            The layout, or None if a piece is something else than one of the texts.
        """
        parts: list[str | tuple[Field, Callable[[str], str]]] = []
        for piece in pieces:
            if piece.source is None:
                parts.append(spell(piece))
                continue
            field = (piece.source.message, piece.source.field)
            text = texts.get(field)
            way = next((w for w in WAYS if text is not None and w(text) == piece.text), None)
            if way is None:
                return None
            parts.append((field, way))
        return cls(pieces, parts, steps, prompt)

    def fits(self, texts: Mapping[Field, str], spelled: str) -> bool:
        """Says whether a text is what the template writes around other texts."""
        parts = [part if isinstance(part, str) else part[1](texts[part[0]]) for part in self._parts]
        return (
            "".join(parts) == spelled
            and "" not in parts  # where a message shows nowhere, others have its stop token
            and not any(parts[index].startswith(letter) for index, letter in self._never)
        )

    def fill(self, texts: Mapping[Field, str]) -> list[Piece]:
        """Makes the pieces of other texts."""
        return [
            piece if isinstance(part, str) else piece._replace(text=part[1](texts[part[0]]))
            for piece, part in zip(self._pieces, self._parts, strict=True)
        ]


def _find_continuations(pieces: Sequence[Piece], prompt: str) -> list[tuple[int, str]]:
    # Where an answer goes on as the generation prompt does, it is not trained on so far.
    written = ""
    found = []
    for index, (before, piece) in enumerate(pairwise(pieces), 1):
        written = (written + before.text)[-len(prompt) - 1 :]
        if piece.source is not None and piece.mark.trained and not before.mark.trained:
            common = next(n for n in range(len(prompt), -1, -1) if written.endswith(prompt[:n]))
            if common < len(prompt):
                found.append((index, prompt[common]))
    return found
