"""Conversations into ids, with exact masks, in which no data becomes a control token."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trl_chatformat.conversations import read_conversation, read_rows
from trl_chatformat.safety import Neutralised, Trust
from trl_chatformat.scripts import Writer
from trl_chatformat.truncating import Side, check_truncation, choose_part
from trl_chatformat.turns import TrainOn

COLUMNS = ("input_ids", "attention_mask", "assistant_masks", "message_ids")


@dataclass(frozen=True, slots=True)
class EncodedChat(Mapping[str, list[int]]):
    """A conversation as ids; as a mapping it holds its four columns, as `Dataset.map` wants it.

    `message_ids` says which message a token is from: those that have any of its characters, and
    the stop token of its turn; the template's own have -1. `neutralised` lists data that spells a
    control token and was left as text; `truncated` counts the tokens that were cut off. `text` and
    `messages` are what was encoded, before any cut.
    """

    input_ids: list[int]
    attention_mask: list[int]
    assistant_masks: list[int]
    message_ids: list[int]
    text: str
    neutralised: list[Neutralised]
    truncated: int
    messages: Sequence[Mapping[str, Any]]

    def __getitem__(self, column: str) -> list[int]:
        if column not in COLUMNS:
            raise KeyError(column)
        return getattr(self, column)

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __len__(self) -> int:
        return len(COLUMNS)


def encode_chat(
    tokenizer: Any,
    messages: Any,
    *,
    chat_template: str | None = None,
    generation_config: Any = None,
    stop_tokens: Collection[str | int] = (),
    control_tokens: Collection[str] = (),
    trust: Trust = None,
    train_on: TrainOn = "all",
    include_trailing: bool = False,
    max_length: int | None = None,
    truncation_side: Side | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    clock: datetime | Callable[[], datetime] | None = None,
    **template_kwargs: Any,
) -> EncodedChat:
    """Encodes a conversation; only the template writes control tokens.

    On text that spells no control token the ids are those of transformers' `apply_chat_template`.

    Args:
        tokenizer: A transformers tokenizer, fast or slow, a `tokenizers.Tokenizer` or a
            `ChatTokenizer`.
        messages: A list of messages, or a row with `messages` and, perhaps, its own `tools`.
        chat_template: Instead of the tokenizer's own.
        generation_config: Whose `eos_token_id`s end turns, beside the tokenizer's eos token.
        stop_tokens: More tokens that end turns, as texts or ids.
        control_tokens: Added tokens that data must not become, beside the tokenizer's special and
            named ones and those that the template writes.
        trust: A field, such as "content", whose text may become control tokens, or a function that
            says so of a message's number (None where it is no message) and a field.
        train_on: Which assistant messages `assistant_masks` choose: "all", "last", or those for
            which a function of a message's number and the message is true.
        include_trailing: Whether the masks take in what the template writes after the stop token.
        max_length: The most tokens to keep.
        truncation_side: Where to cut: "left" and "right" keep whole turns, "left-inside" and
            "right-inside" may leave half a message; the tokenizer's own side unless given.
        tools: As `render_chat` takes it, and so are the following.
        documents: The same.
        add_generation_prompt: The same.
        continue_final_message: The same.
        clock: The same.
        template_kwargs: The same.

    Returns:
        The ids and what goes with them.

    Raises:
        ValueError: An argument isn't what it should be; the template refuses the conversation;
            text of unknown origin spells a control token.
        TypeError: The tokenizer is of an unknown kind.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from trl_chatformat import ChatTokenizer, setup_chat_format
        >>> letters = {letter: i for i, letter in enumerate("\\n Haeimnrstu_|<>d")}
        >>> tokenizer = ChatTokenizer(Tokenizer(models.BPE(letters, [])))
        >>> _, tokenizer = setup_chat_format(None, tokenizer)
        >>> messages = [
        ...     {"role": "user", "content": "<|im_end|>"},
        ...     {"role": "assistant", "content": "Hi"},
        ... ]
        >>> chat = encode_chat(tokenizer, messages)
        >>> chat.input_ids.count(tokenizer.eos_token_id), chat.neutralised
        (2, [Neutralised(message=0, field='content', token='<|im_end|>')])
        >>> chosen = zip(chat.input_ids, chat.assistant_masks)
        >>> tokenizer.decode([token for token, mask in chosen if mask])
        'H i <|im_end|>'
    """
    check_truncation(max_length, truncation_side)
    writer = Writer(
        tokenizer,
        chat_template=chat_template,
        generation_config=generation_config,
        stop_tokens=stop_tokens,
        control_tokens=control_tokens,
        trust=trust,
        train_on=train_on,
        include_trailing=include_trailing,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        clock=clock,
        **template_kwargs,
    )
    [chat] = encode_with(writer, [(messages, tools)], max_length, truncation_side)
    return chat


def encode_chats(
    tokenizer: Any,
    conversations: Any,
    *,
    batch_size: int = 1000,
    progress: bool = False,
    tools: Sequence[Any] | None = None,
    max_length: int | None = None,
    truncation_side: Side | None = None,
    **settings: Any,
) -> dict[str, list[Any]]:
    """Encodes many conversations into columns, as `encode_chat` encodes one.

    Args:
        tokenizer: As for `encode_chat`.
        conversations: Lists of messages, or rows with `messages` and, perhaps, their own `tools`;
            or a batch of such rows as `Dataset.map(batched=True)` passes it, a dict of columns.
        batch_size: How many conversations go to the tokenizer together.
        progress: Whether to count them on standard error.
        tools: For conversations without their own.
        max_length: As for `encode_chat`.
        truncation_side: As for `encode_chat`.
        settings: The other arguments of `encode_chat`.

    Returns:
        The columns `input_ids`, `attention_mask`, `assistant_masks` and `message_ids`, and, as
        numbers, `neutralised` and `truncated`.

    Raises:
        ValueError: As `encode_chat` does; the message says for which conversation.
        TypeError: As `encode_chat` does.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from trl_chatformat import ChatTokenizer, setup_chat_format
        >>> letters = {letter: i for i, letter in enumerate("\\nHaeimnrstu")}
        >>> tokenizer = ChatTokenizer(Tokenizer(models.BPE(letters, [])))
        >>> _, tokenizer = setup_chat_format(None, tokenizer)
        >>> columns = encode_chats(tokenizer, [[{"role": "assistant", "content": "Hi"}]])
        >>> columns["assistant_masks"]
        [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]]
    """
    check_truncation(max_length, truncation_side)
    if not (isinstance(batch_size, int) and batch_size > 0):
        raise ValueError(f"batch_size={batch_size!r}: a positive int was expected.")
    writer = Writer(tokenizer, **settings)
    rows = read_rows(conversations)
    columns: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, "neutralised", "truncated")}
    for start in range(0, len(rows), batch_size):
        batch = [(row, tools) for row in rows[start : start + batch_size]]
        for chat in encode_with(writer, batch, max_length, truncation_side, start):
            for name in COLUMNS:
                columns[name].append(chat[name])
            columns["neutralised"].append(len(chat.neutralised))
            columns["truncated"].append(chat.truncated)
        if progress:
            done = min(start + batch_size, len(rows))
            print(f"\rEncoded {done} of {len(rows)}", end="", file=sys.stderr, flush=True)
    if progress:
        print(file=sys.stderr)
    return columns


def encode_with(
    writer: Writer,
    conversations: Sequence[tuple[Any, Sequence[Any] | None]],
    max_length: int | None = None,
    side: str | None = None,
    first_number: int = 0,
) -> Iterator[EncodedChat]:
    """Encodes conversations, each with the tools that hold unless it has its own."""
    written = []
    for number, (given, tools) in enumerate(conversations, first_number):
        try:
            written.append(writer.write(read_conversation(given, tools)))
        except ValueError as error:
            if len(conversations) > 1:
                error.add_note(f"This was conversation {number}.")
            raise
    encoded = writer.encoder.encode([chat.script for chat in written])
    for chat, (ids, masks, messages) in zip(written, encoded, strict=True):
        length = len(ids)
        if max_length is not None and length > max_length:
            control = writer.encoder.control.contents
            part = choose_part(ids, messages, control, max_length, side or writer.truncation_side)
            ids, masks, messages = ids[part], masks[part], messages[part]
        yield EncodedChat(
            input_ids=ids,
            attention_mask=[1] * len(ids),
            assistant_masks=masks,
            message_ids=messages,
            text=chat.text,
            neutralised=chat.neutralised,
            truncated=length - len(ids),
            messages=chat.messages,
        )
