"""Encode conversations made to break out of their turns, and check what comes of them.

    python -m tools.hostile_chats --seconds 60 --kinds smollm2 unigram

Each kind of `tools.rails.real_tokenizers` gets its share of the time and of the conversations, half
of them hostile: their text is full of control tokens, pieces of these, and characters that
templates and tokenizers treat specially. For every conversation
- the control ids are those of a conversation of the same roles whose text is `x`;
- the ids decode to what the ids of transformers' plain path decode to (spaces aside where the
  tokenizer puts one before each piece of a text that control tokens split);
- where no text spells a control token, the ids are those of the plain path.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.rails.real_tokenizers import KINDS
from trl_chatformat import encode_chats
from trl_chatformat.control_tokens import ControlTokens, choose_control_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
COUNT = 1_000_000
BATCH = 1000
WORDS = (
    *("hello", "user", "assistant", "system", "Zoë", "naïve", "word", "12", "3.5", "don't", "x"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "\u200b", "\ufeff", "\0"),
    *("▁", "Ġ", "##", "<", ">", "|", "[", "]", "/", "<|", "|>", "</", "\\n", "{{ x }}", "{% x %}"),
    *(
        "e\u0301",
        "\u0301",
        "안녕",
        "日本語",
        "שלום",
        "مرحبا",
        "👩‍👩‍👧",
        "\U0001d518",
        "\ue000",
        "\U00100000",
        "ﬁ",
    ),
    *("<0x0A>", "<0x41>", "<b>", "<unk>", "<s>", "</s>", "<think>", "[INST]", "<tool_call>"),
)


@dataclass(frozen=True)
class Result:
    """What was done for one kind."""

    hostile: int
    harmless: int
    neutralised: int
    seconds: float


class Checker:
    """Makes conversations for one tokenizer and checks how they are encoded."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        added = tokenizer.added_tokens_decoder
        named = {
            name: getattr(tokenizer, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        control = choose_control_tokens(added, named, [tokenizer.chat_template])
        self.finder = ControlTokens(added, control)
        probe = f"x{tokenizer.eos_token}x"
        self.prepends = False
        self.prepends = (
            self.decode(tokenizer(probe, add_special_tokens=False)["input_ids"]) != probe
        )
        # Unknown characters become the unknown token, as they must.
        self.control = control - {tokenizer.unk_token_id}
        contents = [added[i].content for i in sorted(control)]
        self.hostile = (*contents[:20], *contents[-5:])

    def encode(self, chats: Sequence[list[dict[str, str]]]) -> dict[str, list[Any]]:
        """Encode conversations as they are to be checked."""
        return encode_chats(self.tokenizer, chats)

    def make_text(self, words: Sequence[str]) -> str:
        pieces = self.random.choices(words, k=self.random.randint(0, 12))
        for _ in range(self.random.randint(0, 2) if words is not WORDS else 0):
            token = self.random.choice(self.hostile)
            start = self.random.randint(0, len(token))
            pieces.insert(self.random.randint(0, len(pieces)), token[start:])
            pieces.append(token[:start])
        return "".join(pieces)

    def make_chat(self, hostile: bool) -> list[dict[str, str]]:
        words = (*WORDS, *self.hostile) if hostile else WORDS
        roles = ("user", "assistant") * self.random.randint(1, 2)
        return [{"role": role, "content": self.make_text(words)} for role in roles]

    def is_harmless(self, chat: list[dict[str, str]], text: str, written: int) -> bool:
        """Say whether a tokenizer sees no control token but the template's."""
        return len(self.finder.find(text)) == written and not any(
            self.finder.find(message["content"]) for message in chat
        )

    def check(self, chats: Sequence[list[dict[str, str]]]) -> tuple[int, int]:
        """Encode chats and raise AssertionError for the first one that is wrong."""
        tokenizer = self.tokenizer
        columns = self.encode(chats)
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
        twins = [[message | {"content": "x"} for message in chat] for chat in chats]
        twin_texts = tokenizer.apply_chat_template(twins, tokenize=False)
        twin_ids = tokenizer(twin_texts, add_special_tokens=False)["input_ids"]
        harmless = 0
        for chat, ids, text, expected, twin, twin_text in zip(
            chats, columns["input_ids"], texts, plain, twin_ids, twin_texts, strict=True
        ):
            here = [i for i in ids if i in self.control]
            there = [i for i in twin if i in self.control]
            assert here == there, ("control ids", chat, ids)
            if self.is_harmless(chat, text, len(self.finder.find(twin_text))):
                harmless += 1
                assert ids == expected, ("ids", chat, ids, expected)
            assert self.decode(ids) == self.decode(expected), ("text", chat, ids, expected)
        return harmless, sum(columns["neutralised"])

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text.replace(" ", "") if self.prepends else text


def run(kind: str, seconds: float, count: int, seed: int = 0) -> Result:
    """Check as many conversations of one kind as there is time for, and `count` at most."""
    checker = Checker(KINDS[kind](), seed)
    started = time.monotonic()
    done = harmless = neutralised = 0
    while done < count and time.monotonic() - started < seconds:
        size = min(BATCH, count - done)
        found = checker.check([checker.make_chat(hostile=i % 2 == 0) for i in range(size)])
        harmless += found[0]
        neutralised += found[1]
        done += size
    return Result(done - harmless, harmless, neutralised, time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200, help="time for all kinds together")
    parser.add_argument("--count", type=int, default=COUNT, help="conversations of all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    options = parser.parse_args(arguments)
    share = len(options.kinds)
    for kind in options.kinds:
        result = run(kind, options.seconds / share, -(-options.count // share), options.seed)
        print(kind, result, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
