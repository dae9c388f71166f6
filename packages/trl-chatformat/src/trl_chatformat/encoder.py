"""What a tokenizer and a template make of rendered text, kept from one call to the next."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from trl_chatformat.backends import (
    Backend,
    find_fast_backend,
    make_backend,
    read_added_tokens,
    read_named_tokens,
)
from trl_chatformat.control_tokens import ControlTokens, choose_control_tokens
from trl_chatformat.placing import (
    Piece,
    Step,
    find_edges,
    mark_by_position,
    mark_by_steps,
    plan,
)


class Script(NamedTuple):
    """A text ready to be encoded: as the copy of the tokenizer spells it, and how to mark it."""

    spelled: str
    steps: list[Step] | None
    get_pieces: Callable[[], Sequence[Piece]]


class Tokens(NamedTuple):
    """A text's tokens, which of them are trained on, and the message of each, or -1."""

    ids: list[int]
    masks: list[int]
    messages: list[int]


class Encoder:
    """Encodes text in which some pieces are control tokens, and no other piece becomes one."""

    def __init__(self, backend: Backend, control: ControlTokens, never: Collection[int]) -> None:
        self.control = control
        self.backend = backend
        # What the vocabulary makes of text that it lacks, where that has another meaning as well.
        self._unknown = backend.unknown if backend.unknown in never else None
        self._after: dict[tuple[int | None, str], list[int] | None] = {}

    def spell(self, piece: Piece) -> str:
        """Spells a piece as the copy of the tokenizer does."""
        return piece.text if piece.token is None else self.backend.spellings[piece.token]

    def write(self, pieces: Sequence[Piece]) -> Script:
        """Makes a text's pieces ready to be encoded."""
        spelled = "".join(map(self.spell, pieces))
        return Script(spelled, self.plan(pieces), lambda: pieces)

    def plan(self, pieces: Sequence[Piece]) -> list[Step] | None:
        """Plans how to mark a text's tokens, if that can be done without looking for each one."""
        if any(piece.token == self.backend.unknown is not None for piece in pieces):
            return None  # other text may become the same id
        return plan(pieces, self._encode_after)

    def _encode_after(self, token: int | None, text: str) -> list[int] | None:
        key = (token, text)
        if key not in self._after:
            before = "" if token is None else self.backend.spellings[token]
            ids = self.backend.encode([before + text])[0][token is not None :]
            self._after[key] = None if self.backend.unknown in ids else ids
        return self._after[key]

    def encode(self, scripts: Sequence[Script]) -> list[Tokens]:
        """Encodes texts and marks their tokens.

        Raises:
            ValueError: A text has characters that the vocabulary lacks and makes an end of turn of.
        """
        results: list[Tokens | None] = [None] * len(scripts)
        planned = [i for i, script in enumerate(scripts) if script.steps is not None]
        all_ids = self.backend.encode([scripts[i].spelled for i in planned])
        for i, ids in zip(planned, all_ids, strict=True):
            marks = mark_by_steps(ids, scripts[i].steps or ())
            results[i] = marks and Tokens(ids, *marks)
        others = iter(self._look_up([s for s, t in zip(scripts, results, strict=True) if not t]))
        done = [tokens or next(others) for tokens in results]
        if self._unknown is not None:
            self._check_unknown(done, scripts)
        return done

    def _look_up(self, scripts: Sequence[Script]) -> list[Tokens]:
        pieces = [script.get_pieces() for script in scripts]
        edges = [find_edges(map(self.spell, some)) for some in pieces]
        found = self.backend.encode_and_locate([script.spelled for script in scripts], edges)
        return [
            Tokens(ids, *mark_by_position(len(ids), some, located))
            for (ids, located), some in zip(found, pieces, strict=True)
        ]

    def _check_unknown(self, done: Iterable[Tokens], scripts: Iterable[Script]) -> None:
        unknown = self._unknown
        for tokens, script in zip(done, scripts, strict=True):
            written = sum(piece.token == unknown for piece in script.get_pieces())
            if unknown is not None and tokens.ids.count(unknown) > written:
                raise ValueError(
                    f"A text has characters that the vocabulary lacks, and its token for these is "
                    f"{self.control.contents[unknown]!r}, which also begins, ends or fills. Give "
                    "the tokenizer an unknown token of its own, or leave such characters out."
                )


def make_encoder(
    tokenizer: Any, templates: Iterable[str], stops: Collection[str], more: Collection[str]
) -> tuple[Encoder, dict[str, int]]:
    """Makes what encodes with a tokenizer and its templates, or finds it from an earlier call.

    Args:
        tokenizer: Any tokenizer that this package knows.
        templates: The chat templates, if there are any.
        stops: Texts of tokens that end turns.
        more: Texts of other control tokens.

    Returns:
        The encoder, and the ids of `stops` by text.

    Raises:
        TypeError: The tokenizer is of an unknown kind.
        ValueError: A named token, a stop token or one of `more` is not an added token.
    """
    added = read_added_tokens(tokenizer)
    named = read_named_tokens(tokenizer)
    control = choose_control_tokens(added, named, templates, [*stops, *more])
    ids = {token.content: i for i, token in added.items()}
    never = {named["bos_token"], named["eos_token"], *stops} - {None}
    fast = find_fast_backend(tokenizer)
    # All that changes ids in place; whoever changes more makes a new tokenizer.
    state = [added, fast and (fast.get_vocab_size(), fast.normalizer, fast.pre_tokenizer)]
    encoder = _make_encoder(
        tokenizer if fast is None else fast,
        repr(state),
        frozenset(control),
        frozenset(ids[text] for text in never if text is not None),
    )
    return encoder, {text: ids[text] for text in stops}


@lru_cache(maxsize=4)
def _make_encoder(
    tokenizer: Any, state: str, control: frozenset[int], never: frozenset[int]
) -> Encoder:
    tokens = ControlTokens(read_added_tokens(tokenizer), control)
    return Encoder(make_backend(tokenizer, control), tokens, never)
