"""Encoding with control tokens that no text can spell, for every kind of tokenizer."""

import json
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer

from trl_chatformat._transformers_private import respell

PRIVATE_USE = 0x100000  # the last plane of Unicode: 65,534 characters without a meaning
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


Located = tuple[list[int], list[tuple[int, int]]]


class Backend(Protocol):
    """A copy of a tokenizer that spells its control tokens in secret."""

    spellings: Mapping[int, str]
    """How the copy spells each control token."""

    secret: str
    """What all spellings have in them."""

    unknown: int | None
    """What the vocabulary makes of text that it lacks."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Turns texts into ids."""
        ...

    def encode_and_locate(
        self, texts: list[str], positions: Sequence[Sequence[int]]
    ) -> list[Located]:
        """Turns texts into ids, and finds positions of each text among them.

        Returns:
            For each text its ids, and for each position the number of tokens that end at it or
            before it, and of those that begin before it; the two differ where a token stretches
            across it.
        """
        ...


def find_fast_backend(tokenizer: Any) -> Tokenizer | None:
    """Finds the `tokenizers.Tokenizer` in a tokenizer, if there is one."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend if isinstance(backend, Tokenizer) else None


def read_added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """Lists a tokenizer's added tokens by id.

    Raises:
        TypeError: It is no tokenizer of a kind that this package knows.
    """
    fast = find_fast_backend(tokenizer)
    if fast is not None:
        return dict(fast.get_added_tokens_decoder())
    if not hasattr(tokenizer, "tokens_trie"):
        raise TypeError(
            f"{type(tokenizer).__name__} can't be used to encode: pass a transformers tokenizer, a "
            "tokenizers.Tokenizer or a ChatTokenizer."
        )
    return dict(tokenizer.added_tokens_decoder)


def read_named_tokens(tokenizer: Any) -> dict[str, str | None]:
    """Lists the texts of a tokenizer's bos, eos, pad and unk tokens by name."""
    found = {name: getattr(tokenizer, name, None) for name in NAMED}
    return {name: None if token is None else str(token) for name, token in found.items()}


def read_beginning_tokens(tokenizer: Any) -> list[int]:
    """Lists the tokens that a tokenizer puts before a text."""
    fast = find_fast_backend(tokenizer)
    if fast is None:
        text = [-1]  # an id that no token has
        whole = list(tokenizer.build_inputs_with_special_tokens(text))
    else:
        text = fast.encode("a", add_special_tokens=False).ids
        whole = fast.encode("a").ids
    starts = range(len(whole) - len(text) + 1)
    return whole[: next(i for i in starts if whole[i : i + len(text)] == text)]


def make_backend(tokenizer: Any, control: Collection[int]) -> Backend:
    """Copies a tokenizer so that no text spells a control token.

    Args:
        tokenizer: A transformers tokenizer, fast or slow, a `tokenizers.Tokenizer` or a
            `ChatTokenizer`; it stays as it is.
        control: The ids of the control tokens.

    Returns:
        The copy.

    Raises:
        TypeError: The tokenizer is of an unknown kind, or has parts written in Python.
        ValueError: A control token's id would change, or it is what unknown text becomes.

    Example:
        >>> from tokenizers.models import WordLevel
        >>> tokenizer = Tokenizer(WordLevel({"<unk>": 0, "hi": 1, "<s>": 2}, unk_token="<unk>"))
        >>> _ = tokenizer.add_special_tokens(["<unk>", "<s>"])
        >>> backend = make_backend(tokenizer, {0, 2})
        >>> backend.encode(["hi", "<s>", backend.spellings[2] + "hi"])
        [[1], [0], [2, 1]]
        >>> backend.encode_and_locate(["hi" + backend.spellings[2]], [[0, 1, 2]])
        [([1, 2], [(0, 0), (0, 1), (1, 1)])]
    """
    added = read_added_tokens(tokenizer)
    secret = "".join(chr(PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(4))
    spellings = {
        token: _spell(secret, number, added[token].content)
        for number, token in enumerate(sorted(control))
    }
    respelled = {i: _copy_token(token, spellings.get(i)) for i, token in added.items()}
    fast = find_fast_backend(tokenizer)
    if fast is None:
        return SlowBackend(respell(tokenizer, respelled), spellings, secret)
    return FastBackend(fast, respelled, spellings, secret)


def _spell(secret: str, number: int, content: str) -> str:
    # Between the same kinds of characters, for added tokens that only match beside white space.
    first, last = content[0], content[-1]
    before, after = (c if c.isalnum() or c == "_" else "" for c in (first, last))
    return f"{before}{secret}{chr(PRIVATE_USE + number)}{after}"


def _copy_token(token: AddedToken, content: str | None) -> AddedToken:
    if content is None:
        return token
    return AddedToken(
        content,
        single_word=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


class FastBackend:
    """A copy of a `tokenizers.Tokenizer`, its control tokens renamed wherever they occur.

    What is renamed in the vocabulary can't come out of the model either: a Unigram model may hold
    `</s>` as a piece like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        added: Mapping[int, AddedToken],
        spellings: Mapping[int, str],
        secret: str,
    ) -> None:
        self.spellings = spellings
        self.secret = secret
        try:
            state = json.loads(tokenizer.to_str())
        except Exception as error:  # tokenizers raises nothing narrower
            raise TypeError(
                f"The tokenizer can't be copied, as with parts written in Python: {error}"
            ) from error
        contents = {token["id"]: token["content"] for token in state["added_tokens"]}
        renamed = {contents[token]: spelling for token, spelling in spellings.items()}
        state["added_tokens"] = [
            {"id": token, **json.loads(json.dumps(added[token].__getstate__()))}
            for token in sorted(added)
        ]
        _rename(state["model"], renamed)
        state |= {"truncation": None, "padding": None, "post_processor": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(state))
        self.unknown = _find_unknown(state["model"], self._tokenizer)
        wrong = [c for c, s in renamed.items() if contents.get(self._tokenizer.token_to_id(s)) != c]
        if wrong:
            raise ValueError(
                f"The tokens {wrong} would get other ids in a copy of the tokenizer: save it and "
                "load it again, and see whether its ids are right."
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_and_locate(
        self, texts: list[str], positions: Sequence[Sequence[int]]
    ) -> list[Located]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        results: list[Located] = []
        for encoding, places in zip(encodings, positions, strict=True):
            starts, ends = zip(*encoding.offsets, strict=True) if encoding.ids else ((), ())
            located = [(bisect_right(ends, p), bisect_left(starts, p)) for p in places]
            results.append((encoding.ids, located))
        return results


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        return
    for old, new in names.items():
        if old in vocab:
            vocab[new] = vocab.pop(old)
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (m if isinstance(m, list) else m.split(" ") for m in model["merges"])
        model["merges"] = [pair for pair in pairs if not _touches(pair, names)]


def _find_unknown(model: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    if model.get("unk_token") is not None:
        return tokenizer.token_to_id(model["unk_token"])
    return model.get("unk_id")


def _touches(pair: Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = pair
    return left + right in names or left in names or right in names


class SlowBackend:
    """A copy of a transformers tokenizer written in Python, its control tokens renamed."""

    def __init__(self, tokenizer: Any, spellings: Mapping[int, str], secret: str) -> None:
        self._tokenizer = tokenizer
        self.spellings = spellings
        self.secret = secret
        self.unknown: int | None = tokenizer.unk_token_id

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.convert_tokens_to_ids(self._tokenizer.tokenize(text))
        # Text that the vocabulary lacks becomes the unknown token, as it must.
        for token in self.spellings.keys() & set(ids) - {self.unknown}:
            if ids.count(token) != text.count(self.spellings[token]):
                raise ValueError(
                    f"{type(self._tokenizer).__name__} turns ordinary text into the control token "
                    f"{token}: use the fast tokenizer."
                )
        return ids

    def encode_and_locate(
        self, texts: list[str], positions: Sequence[Sequence[int]]
    ) -> list[Located]:
        return [self._locate(text, ps) for text, ps in zip(texts, positions, strict=True)]

    def _locate(self, text: str, positions: Sequence[int]) -> Located:
        # A text's beginning that is encoded as the whole is ends between two tokens.
        ids = self._encode(text)

        def count(end: int) -> int | None:
            beginning = self._encode(text[:end])
            return len(beginning) if ids[: len(beginning)] == beginning else None

        def first(ends: Iterable[int]) -> int:
            return next(n for end in ends if (n := count(end)) is not None)

        return ids, [(first(range(p, -1, -1)), first(range(p, len(text) + 1))) for p in positions]
