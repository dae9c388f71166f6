"""Control tokens: which there are, and where a text spells them."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken

# Entries through which a model spells bytes that it has no token for: data, whatever their flags.
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WORD = re.compile(r"\w")
ROLES = (
    *("assistant", "bot", "developer", "environment", "function", "gpt", "human", "ipython"),
    *("model", "observation", "system", "tool", "user"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A control token that a text spells: from where to where, and its id."""

    start: int
    end: int
    token: int


class ControlTokens:
    """The control tokens of a tokenizer with a template, and where texts spell them.

    Args:
        added: All added tokens of the tokenizer by id.
        control: The ids of those that are control tokens.

    Example:
        >>> added = {7: AddedToken("<|end|>"), 8: AddedToken("<b>")}
        >>> ControlTokens(added, {7}).find("a<|end|><b>")
        [Found(start=1, end=8, token=7)]
    """

    def __init__(self, added: Mapping[int, AddedToken], control: Collection[int]) -> None:
        self.contents = {token: added[token].content for token in sorted(control)}
        self._ids = {content: token for token, content in self.contents.items()}
        self._single_words = {t for t, token in added.items() if token.single_word}
        others = (token.content for i, token in added.items() if i not in control)
        words = [*self._ids, *_find_rivals(self._ids, others)]
        self._pattern = re.compile(_alternatives(words) or "(?!)", re.DOTALL)

    def find(self, text: str, start: int = 0, end: int | None = None) -> list[Found]:
        """Finds the control tokens that tokenizers would: leftmost first, of these the longest.

        Args:
            text: The text.
            start: Where to begin.
            end: Where what counts ends: nothing that goes beyond is found.

        Returns:
            What was found, in order.
        """
        return list(self._find(text, start, len(text) if end is None else end))

    def replace(self, text: str, spellings: Mapping[int, str]) -> str:
        """Spells the control tokens that are found in a text differently."""

        def spell(match: re.Match[str]) -> str:
            token = self._ids.get(match[0])
            if token is None or (
                token in self._single_words and not _stands_alone(text, *match.span())
            ):
                return match[0]
            return spellings[token]

        return self._pattern.sub(spell, text)

    def _find(self, text: str, start: int, end: int) -> Iterator[Found]:
        for match in self._pattern.finditer(text, start, end):
            token = self._ids.get(match[0])
            if token is not None and (
                token not in self._single_words or _stands_alone(text, *match.span())
            ):
                yield Found(*match.span(), token)


def choose_control_tokens(
    added: Mapping[int, AddedToken],
    named: Mapping[str, str | None],
    templates: Iterable[str] = (),
    more: Collection[str] = (),
) -> set[int]:
    """Says which added tokens are control tokens.

    They are the special ones, the named ones, those that the template writes (white space aside,
    which is text wherever it stands), and more that are given.

    Args:
        added: All added tokens of the tokenizer by id.
        named: The texts of its named tokens, such as "eos_token".
        templates: The chat templates, if there are any.
        more: Texts of other added tokens.

    Returns:
        Their ids.

    Raises:
        ValueError: A named token, or one of `more`, is not an added token, so that its text can't
            be told from any other.

    Example:
        >>> added = {5: AddedToken("<s>", special=True), 6: AddedToken("<think>")}
        >>> sorted(choose_control_tokens(added, {}, ["{{ bos_token + '<think>' }}"]))
        [5, 6]
        >>> sorted(choose_control_tokens(added, {}, ["{{ bos_token }}"]))
        [5]
    """
    ids = {token.content: i for i, token in added.items()}
    given = {text: f"control token {text!r}" for text in more}
    given |= {text: f"{name} {text!r}" for name, text in named.items() if text is not None}
    for text, what in given.items():
        if text not in ids:
            raise ValueError(
                f"The {what} is not an added token of the tokenizer, so that its text can't be "
                "told from any other. Add it to the tokenizer as a special token first."
            )
    literals = [literal for template in templates for literal in _read_literals(template)]
    return {
        i
        for content, i in ids.items()
        if not BYTE_TOKEN.fullmatch(content)
        and (added[i].special or content in given or _writes(literals, content))
    }


@lru_cache(maxsize=32)
def _read_literals(template: str) -> tuple[str, ...]:
    environment = Environment(  # only parsed, never run
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    # The one tag of chat templates that Jinja doesn't know has no expression of its own.
    plain = re.sub(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}", _as_known_tag, template)
    try:
        tree = environment.parse(plain)
    except TemplateError:
        return (template,)  # rendering will say what is wrong with it
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return tuple(dict.fromkeys(texts))


def _as_known_tag(match: re.Match[str]) -> str:
    return f"{{%{match[1]} {'endif' if match[2] else 'if true'} {match[3]}%}}"


def _writes(literals: Iterable[str], content: str) -> bool:
    if content.isspace():
        return False
    if any(content in literal for literal in literals):
        return True
    # Several families write '<|' + role + '|>'.
    before, _, after = next((content.partition(r) for r in ROLES if r in content), ("", "", ""))
    return bool(before and after) and (
        any(literal.endswith(before) for literal in literals)
        and any(literal.startswith(after) for literal in literals)
    )


def _find_rivals(control: Collection[str], others: Iterable[str]) -> Iterator[str]:
    # Other tokens that, where they are found first, leave no whole control token behind.
    beginnings = {content[:i] for content in control for i in range(1, len(content))}
    for other in others:
        overlaps = any(other[i:] in beginnings for i in range(1, len(other)))
        if overlaps or any(content in other for content in control):
            yield other


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[max(start - 1, 0) : start], text[end : end + 1]
    return not (WORD.match(before) or WORD.match(after))


def _alternatives(words: Iterable[str]) -> str:
    # A tree, so that a search tries each character once; the longest word wins.
    tails: dict[str, list[str]] = {}
    optional = False
    for word in sorted(set(words)):
        if word:
            tails.setdefault(word[0], []).append(word[1:])
        else:
            optional = True
    branches = [re.escape(first) + _alternatives(rest) for first, rest in tails.items()]
    if not branches:
        return ""
    if optional:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
