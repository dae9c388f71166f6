"""Encode conversations with masks and safety: ours beside transformers, which has one of the two.

SmolLM2's tokenizer with ChatML; the conversations are made of real sentences. Times are CPU seconds
of all threads. Of the batch's two rows, the first has as its peer plain rendering and
`encode_batch_fast` over the same texts, with neither masks nor safety; the second has
`apply_chat_template` with masks, from a template marked by hand, which ours doesn't need. Turns are
milliseconds a turn in one conversation of that many, beside `apply_chat_template` with masks: where
they grow with the number, the time is not linear.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

from tools.bench.measures import Measure, alternate
from tools.rails.real_tokenizers import real_data, smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUNDS = 3
CONVERSATIONS = 10_000
TURNS = (10, 100, 1000, 3200)
WORDS_PER_MESSAGE = 50
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


@functools.cache
def _tokenizer() -> Any:
    tokenizer: Any = smollm2()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _make_chats(count: int, messages: int) -> list[list[dict[str, str]]]:
    turns = (turn for chat in real_data.conversations() for turn in chat)
    words = itertools.cycle([word for turn in turns for word in turn.split()])

    def message(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(itertools.islice(words, WORDS_PER_MESSAGE))}

    roles = ["system", *["user", "assistant"] * (messages // 2)][:messages]
    return [[message(role) for role in roles] for _ in range(count)]


def _timed(work: Callable[[], Any]) -> dict[str, float]:
    started = time.process_time()
    work()
    return {"seconds": time.process_time() - started}


def _encode_ours(chats: Any) -> Mapping[str, Any]:
    from trl_chatformat import encode_chats

    return encode_chats(_tokenizer(), chats)


def _encode_plainly(chats: Any) -> Any:
    tokenizer = _tokenizer()
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def _encode_with_masks(chats: Any) -> Mapping[str, Any]:
    return _tokenizer().apply_chat_template(
        chats,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


def _check(chats: Any) -> float:
    """Return the mean number of tokens, after making sure that ours and theirs are the same."""
    ours, theirs = _encode_ours(chats), _encode_with_masks(chats)
    for column in ("input_ids", "assistant_masks"):
        if ours[column] != theirs[column]:
            raise RuntimeError(f"{column} differ from transformers'.")
    return sum(map(len, ours["input_ids"])) / len(chats)


def _measure_batch(device: str) -> list[Measure]:
    chats = _make_chats(CONVERSATIONS, 7)
    length = _check(chats[:100])
    contestants = {"ours": _encode_ours, "plain": _encode_plainly, "masks": _encode_with_masks}
    found = alternate(
        {
            name: functools.partial(_timed, functools.partial(encode, chats))
            for name, encode in contestants.items()
        },
        ROUNDS,
    )
    ours, plain, masks = (found[name]["seconds"] for name in contestants)
    return [
        Measure("beside plain ids", "s", ours, plain),
        Measure("beside ids with masks", "s", ours, masks),
        Measure("tokens in a conversation", "tokens", length, length),
    ]


def _measure_turns(device: str) -> list[Measure]:
    return [_measure_length(turns) for turns in TURNS]


def _measure_length(turns: int) -> Measure:
    [chat] = _make_chats(1, turns + 1)
    _check([chat])
    repeats = max(TURNS) // turns

    def repeat(encode: Callable[[Any], Any]) -> dict[str, float]:
        return _timed(lambda: [encode([chat]) for _ in range(repeats)])

    found = alternate(
        {"ours": lambda: repeat(_encode_ours), "peer": lambda: repeat(_encode_with_masks)}, ROUNDS
    )
    ours, peer = (1000 * found[name]["seconds"] / (turns * repeats) for name in ("ours", "peer"))
    return Measure(f"a turn of {turns}", "ms", ours, peer)


CASES = {"batch": _measure_batch, "turns": _measure_turns}
