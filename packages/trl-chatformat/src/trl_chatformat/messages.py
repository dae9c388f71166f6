"""Messages, tools and variables as chat templates know them: plain JSON values, each one traced.

What is given is what transformers gives. A template that takes for text what was given otherwise
gets it as text instead: parts joined, arguments of tool calls as JSON, missing content as "".
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from trl_chatformat.provenance import Origin, Tag, concat, tagged
from trl_chatformat.spelling import Fields, Float, Int, Items, spell_json

ROLE = re.compile(r"[A-Za-z0-9_-]+")
# Names of a message's reasoning, the standard one first.
REASONING = ("reasoning_content", "thinking", "reasoning")
KNOWN = frozenset({"content", "name", "role", "tool_call_id", "tool_calls", *REASONING})
SCALARS = (str, bool, int, float)


class Parts(Items):
    """A list of text parts: a message's content."""

    feature = "parts"


class Arguments(Fields):
    """A tool call's arguments."""

    feature = "arguments"


def prepare_value(value: Any, tag: Tag | None) -> Any:
    """Makes plain JSON values of a value, as transformers does, and gives all of them a tag.

    Args:
        value: The value; whatever is no JSON value becomes a text that names its type.
        tag: The tag; with None no text is traced.

    Returns:
        The values.
    """
    if isinstance(value, str):
        plain = str.__str__(value)
        return plain if tag is None else tagged(plain, tag)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if tag is None:
            return int.__int__(value) if isinstance(value, int) else float.__float__(value)
        return _with_tag(Int(value) if isinstance(value, int) else Float(value), tag)
    if isinstance(value, Mapping):
        found = {prepare_value(k, tag): prepare_value(v, tag) for k, v in value.items()}
        return found if tag is None else _with_tag(Fields(found), tag)
    if isinstance(value, list):
        items = [prepare_value(item, tag) for item in value]
        return items if tag is None else _with_tag(Items(items), tag)
    if isinstance(value, tuple):
        return tuple(prepare_value(item, tag) for item in value)
    return prepare_value(_simplify(value), tag)


def _simplify(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's models
        return value.model_dump()
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)):
        item = value.item() if getattr(value, "ndim", 1) == 0 else None
        if isinstance(item, SCALARS):
            return item
    return f"<{type(value).__name__}>"


def _with_tag(value: Any, tag: Tag | None) -> Any:
    value._tag = tag
    return value


def prepare_messages(messages: Any, as_text: Collection[str], traced: bool) -> list[dict[str, Any]]:
    """Makes plain JSON values of messages.

    Args:
        messages: The messages: dicts, dataclasses or pydantic's models.
        as_text: What to give as text: "parts", "arguments", "content" that is missing.
        traced: Whether text is traced.

    Returns:
        The messages, without keys whose value is None.

    Raises:
        ValueError: A message is none; a role is no plain word; a part is no text.
    """
    return [
        _prepare_message(number, message, as_text, traced)
        for number, message in enumerate(messages)
    ]


def _prepare_message(
    number: int, message: Any, as_text: Collection[str], traced: bool
) -> dict[str, Any]:
    given = message
    if not isinstance(message, Mapping):
        message = _simplify(message)
        if not isinstance(message, Mapping):
            raise ValueError(f"Message {number} is {given!r:.80}: a dict was expected.")
    result: dict[str, Any] = {}
    for name, value in message.items():
        if value is None:
            continue
        if name == "role":
            result[name] = _check_role(number, value)
        elif type(value) is str and name in KNOWN:
            tag = Tag(Origin("message", number, name))
            result[name] = tagged(value, tag) if traced else value
        else:
            tag = Tag(Origin("message", number, str(name))) if traced else None
            key = name if name in KNOWN else prepare_value(name, tag)
            result[key] = _prepare_field(number, name, value, as_text, tag)
    if "content" in as_text and "content" not in result:
        result["content"] = ""
    for name in REASONING:
        if name in result:
            return {"thinking": result[name], **result, "reasoning_content": result[name]}
    return result


def _prepare_field(
    number: int, name: Any, value: Any, as_text: Collection[str], tag: Tag | None
) -> Any:
    if name == "content" and isinstance(value, (list, tuple)):
        return _prepare_parts(number, value, as_text, tag)
    if name == "tool_calls" and isinstance(value, (list, tuple)):
        return _with_tag(Items(_prepare_call(call, as_text, tag) for call in value), tag)
    return prepare_value(value, tag)


def _check_role(number: int, role: Any) -> str:
    if isinstance(role, str) and ROLE.fullmatch(role):
        return str.__str__(role)
    raise ValueError(
        f"Message {number} has the role {role!r:.80}: a role is a word of letters, digits, '_' and "
        "'-', because templates write it among their own text."
    )


def _prepare_parts(
    number: int, parts: Sequence[Any], as_text: Collection[str], tag: Tag | None
) -> Any:
    for part in parts:
        text = part if isinstance(part, str) else _read_text(part)
        if text is None:
            raise ValueError(
                f"Message {number} has the part {part!r:.80}: this package renders text only, "
                "so leave out images, audio and whatever else is not {'type': 'text', 'text': ...}."
            )
    if "parts" not in as_text:
        return _with_tag(Parts(prepare_value(part, tag) for part in parts), tag)
    texts = (part if isinstance(part, str) else _read_text(part) for part in parts)
    return concat([prepare_value(text, tag) for text in texts])


def _read_text(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        part = _simplify(part)
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _prepare_call(call: Any, as_text: Collection[str], tag: Tag | None) -> Any:
    result = prepare_value(call, tag)
    for holder in (result, result.get("function")) if isinstance(result, dict) else ():
        if not isinstance(holder, dict) or "arguments" not in holder:
            continue
        values = holder["arguments"]
        if isinstance(values, str):
            values = _parse(values)
        if not isinstance(values, dict):
            continue  # what is no object stays what it is
        arguments = _with_tag(Arguments(prepare_value(values, tag)), tag)
        if "arguments" in as_text:
            plain = json.dumps(arguments, ensure_ascii=False)
            holder["arguments"] = (
                plain if tag is None else spell_json(arguments, plain, {}, lambda text: text)
            )
        else:
            holder["arguments"] = arguments
    return result


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
