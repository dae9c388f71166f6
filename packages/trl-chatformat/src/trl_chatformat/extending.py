"""Going on with earlier ids: what new messages add, without encoding the earlier ones again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trl_chatformat.conversations import read_conversation
from trl_chatformat.encoding import EncodedChat, encode_with
from trl_chatformat.placing import find_edges
from trl_chatformat.scripts import Writer


def is_prefix_stable(
    tokenizer: Any, messages: Any, *, tools: Sequence[Any] | None = None, **settings: Any
) -> bool:
    """Says whether ids stay what they are while a conversation goes on.

    Args:
        tokenizer: As for `encode_chat`.
        messages: The conversation. Its beginnings are tried one by one, except those that the
            template refuses.
        tools: As for `encode_chat`.
        settings: The other arguments of `encode_chat`, except for truncation.

    Returns:
        Whether the ids of the whole begin with those of each beginning.

    Raises:
        ValueError: As `encode_chat` does for the whole.
        TypeError: As `encode_chat` does.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from trl_chatformat import ChatTokenizer, setup_chat_format
        >>> tokenizer = ChatTokenizer(Tokenizer(models.BPE({"a": 0, "\\\\n": 1}, [])))
        >>> _, tokenizer = setup_chat_format(None, tokenizer)
        >>> is_prefix_stable(tokenizer, [{"role": "user", "content": "a"}] * 3)
        True
    """
    writer = Writer(tokenizer, **settings)
    messages, tools = read_conversation(messages, tools)
    [whole] = encode_with(writer, [(messages, tools)])
    for count in range(1, len(messages)):
        try:
            [chat] = encode_with(writer, [(messages[:count], tools)])
        except ValueError:
            continue
        if whole.input_ids[: len(chat.input_ids)] != chat.input_ids:
            return False
    return True


def extend_chat(
    tokenizer: Any,
    encoded: EncodedChat,
    new_messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    **settings: Any,
) -> EncodedChat | None:
    """Adds messages to an encoded conversation; its ids stay what they are, such as a model's own.

    Args:
        tokenizer: As for `encode_chat`.
        encoded: What `encode_chat` returned, or the same with other ids of the same text.
        new_messages: What follows `encoded.messages`.
        tools: As for `encode_chat`.
        settings: The other arguments of `encode_chat`, except for truncation.

    Returns:
        The whole conversation, whose ids, masks and messages begin with the earlier ones; or None
        if the template writes the earlier messages differently now, or if what follows merges with
        the last of the earlier ids.

    Raises:
        ValueError: `encoded` was truncated; otherwise as `encode_chat` does for the whole.
        TypeError: As `encode_chat` does.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from trl_chatformat import ChatTokenizer, encode_chat, setup_chat_format
        >>> tokenizer = ChatTokenizer(Tokenizer(models.BPE({"a": 0, "\\\\n": 1}, [])))
        >>> _, tokenizer = setup_chat_format(None, tokenizer)
        >>> messages = [{"role": "user", "content": "a"}] * 3
        >>> chat = encode_chat(tokenizer, messages[:1])
        >>> extend_chat(tokenizer, chat, messages[1:]) == encode_chat(tokenizer, messages)
        True
    """
    if encoded.truncated:
        raise ValueError(
            f"{encoded.truncated} tokens of this chat were cut off: extend it first, then truncate."
        )
    writer = Writer(tokenizer, **settings)
    messages = [*encoded.messages, *new_messages]
    written = writer.write(read_conversation(messages, tools))
    if not written.text.startswith(encoded.text):
        return None
    # What follows a control token is encoded alike whatever comes before it.
    pieces = written.script.get_pieces()
    starts = find_edges(piece.text for piece in pieces)[:-1]
    earlier = [
        index
        for index, (piece, start) in enumerate(zip(pieces, starts, strict=True))
        if piece.token is not None and start < len(encoded.text)
    ]
    first, kept = 0, 0
    if earlier:
        first = earlier[-1]
        places = [i for i, token in enumerate(encoded.input_ids) if token == pieces[first].token]
        if not places:
            return None
        kept = places[-1]
    [tail] = writer.encoder.encode([writer.encoder.write(pieces[first:])])
    last = len(encoded.input_ids) - kept
    if tail.ids[:last] != encoded.input_ids[kept:]:
        return None
    return replace(
        encoded,
        input_ids=[*encoded.input_ids, *tail.ids[last:]],
        attention_mask=[*encoded.attention_mask, *[1] * (len(tail.ids) - last)],
        assistant_masks=[*encoded.assistant_masks, *tail.masks[last:]],
        message_ids=[*encoded.message_ids, *tail.messages[last:]],
        text=written.text,
        neutralised=written.neutralised,
        messages=messages,
    )
