"""The ways in which conversations are given: lists of messages, rows, and batches of rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Conversation(NamedTuple):
    """Messages, and the tools that hold for them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None


def read_conversation(given: Any, tools: Sequence[Any] | None = None) -> Conversation:
    """Reads a list of messages, or a row with `messages` and, perhaps, its own `tools`.

    Raises:
        ValueError: It is neither.

    Example:
        >>> read_conversation({"messages": [{"role": "user", "content": "Hi"}], "tools": []})
        Conversation(messages=[{'role': 'user', 'content': 'Hi'}], tools=[])
    """
    messages = given
    if isinstance(given, Mapping):
        if "messages" not in given:
            raise ValueError(
                f"A conversation has the keys {sorted(given)}: `messages` is missing among them."
            )
        messages = given["messages"]
        own = given.get("tools")
        tools = tools if own is None else own
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            f"A conversation is a list of messages, or a dict with `messages`: got {given!r:.80}."
        )
    if not messages:
        raise ValueError("A conversation has no messages: at least one is needed.")
    return Conversation(messages, tools)


def read_rows(given: Any) -> Sequence[Any]:
    """Reads a list of rows, or a batch: a dict of columns, as `Dataset.map` passes it.

    Raises:
        ValueError: It is neither, or its columns differ in length.

    Example:
        >>> read_rows({"prompt": ["a", "b"], "completion": ["c", "d"]})
        [{'prompt': 'a', 'completion': 'c'}, {'prompt': 'b', 'completion': 'd'}]
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"Rows, or a dict of columns, were expected: got {given!r:.80}.")
    if not isinstance(given, Mapping):
        return given if isinstance(given, Sequence) else list(given)
    lengths = {name: len(column) for name, column in given.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"The columns of a batch differ in length: {lengths}.")
    return [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
