"""Chat templates rendered to text that says where each of its characters comes from."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from jinja2.exceptions import TemplateError

from trl_chatformat.provenance import Origin, runs_of, trace
from trl_chatformat.sandbox import compile_template

_ROLE = re.compile(r"[A-Za-z0-9_-]+")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
# Names of a message's reasoning, the standard one first; transformers fills it from the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters in a row from one place; `origin` is None for what the template wrote."""

    start: int
    end: int
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    Args:
        text: The text.
        spans: Where its characters come from; they cover it in order.
        generation: Where its `{% generation %}` blocks are; None if the template has none.
    """

    text: str
    spans: tuple[Span, ...]
    generation: tuple[tuple[int, int], ...] | None


def render_chat(
    template_or_tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    clock: datetime | Callable[[], datetime] | None = None,
    **template_kwargs: Any,
) -> RenderedChat:
    """Renders a conversation to the text that transformers renders, and follows its characters.

    Args:
        template_or_tokenizer: A Jinja template; a dict of them by name; or a tokenizer, for its
            template and the texts of its named tokens.
        messages: Each has a `role`, and `content` that is text, None or a list of text parts.
        tools: JSON schemas.
        documents: What the template does with documents.
        add_generation_prompt: Whether to write how an answer begins.
        continue_final_message: Whether to end in the middle of the last message.
        clock: What `strftime_now` tells: a time, or a function that tells one; else the real one.
        template_kwargs: Variables of the template. The texts of named tokens, such as `bos_token`,
            are the template's own text; other texts are data.

    Returns:
        The text, and where it comes from.

    Raises:
        ValueError: The template refuses the conversation, fails, or takes too long; a role is no
            plain word; a part of a message is no text; there is no template.

    Example:
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> chat = render_chat(template, [{"role": "user", "content": "<user>"}])
        >>> chat.text
        '<user><user>'
        >>> [(span.start, span.end, span.origin and span.origin.message) for span in chat.spans]
        [(0, 6, None), (6, 12, 0)]
    """
    template, named = read_template(template_or_tokenizer, bool(tools))
    text = _render(
        template,
        _trace_messages(messages),
        _trace_all(list(tools) if tools else None, "tool"),
        _trace_all(documents, "document"),
        add_generation_prompt,
        continue_final_message,
        clock,
        named
        | {k: v if k in _NAMED else _trace_all(v, "setting") for k, v in template_kwargs.items()},
    )
    spans: list[Span] = []
    generation: list[tuple[int, int]] = []
    at = 0
    for origin, runs in groupby(runs_of(text), key=lambda run: run[1].origin):
        end = at + sum(length for length, _ in runs)
        spans.append(Span(at, end, origin))
        at = end
    at = 0
    for inside, runs in groupby(runs_of(text), key=lambda run: run[1].generation):
        end = at + sum(length for length, _ in runs)
        if inside:
            generation.append((at, end))
        at = end
    marked = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None
    return RenderedChat(str.__str__(text), tuple(spans), tuple(generation) if marked else None)


def render_text(
    template_or_tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    clock: datetime | Callable[[], datetime] | None = None,
    **template_kwargs: Any,
) -> str:
    """Renders the text of `render_chat`, without following its characters, which is faster."""
    template, named = read_template(template_or_tokenizer, bool(tools))
    return _render(
        template,
        [_prepare(message) for message in messages],
        list(tools) if tools else None,
        documents,
        add_generation_prompt,
        continue_final_message,
        clock,
        named | template_kwargs,
    )


def read_template(source: Any, with_tools: bool = False) -> tuple[str, dict[str, str]]:
    """Reads the template, and the texts of named tokens, of what `render_chat` takes.

    Raises:
        ValueError: There is no template, or no default one among several.
    """
    named: dict[str, str] = {}
    template = source
    if not isinstance(source, (str, Mapping)):
        template = getattr(source, "chat_template", None)
        tokens = {name: getattr(source, name, None) for name in _NAMED}
        named = {name: str(token) for name, token in tokens.items() if token is not None}
    if isinstance(template, Mapping):
        name = "tool_use" if with_tools and "tool_use" in template else "default"
        if name not in template:
            raise ValueError(
                f"There is no default among the chat templates {sorted(template)}: pass one of them."
            )
        template = template[name]
    if not isinstance(template, str):
        raise ValueError(
            f"{type(source).__name__} has no chat template: set one, or pass a template."
        )
    return template, named


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    documents: Any,
    add_generation_prompt: bool,
    continue_final_message: bool,
    clock: datetime | Callable[[], datetime] | None,
    variables: dict[str, Any],
) -> str:
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt exclude each other: choose one."
        )
    tag = ""
    if continue_final_message:
        tag = "CONTINUE_HERE "
        _append_to_final(messages, tag)
    compiled = compile_template(template)
    environment: Any = compiled.environment
    environment.steps = 0
    if callable(clock):
        environment.clock = clock
    else:
        environment.clock = datetime.now if clock is None else lambda: clock
    try:
        text = compiled.render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (TemplateError, TypeError, RecursionError, OverflowError, AttributeError) as error:
        raise ValueError(f"The chat template refuses this conversation: {error}") from error
    if not tag:
        return text
    at = text.rfind(tag.strip())
    if at < 0:
        raise ValueError(
            "The chat template does not write the final message's content, so it can't be continued."
        )
    return text[:at] if text[at : at + len(tag)] == tag else text[:at].rstrip()


def _append_to_final(messages: list[dict[str, Any]], tag: str) -> None:
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + tag
    elif isinstance(content, list) and content:
        content[-1]["text"] = content[-1]["text"] + tag
    else:
        raise ValueError("There is no content of a final message to continue.")


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Check a message and write it as templates know it; None counts as missing."""
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ValueError(
            f"The role {role!r} is not a word of letters, digits, '_' and '-', as templates write it."
        )
    prepared = {name: value for name, value in message.items() if value is not None}
    prepared["content"] = _check_content(message.get("content"), prepared)
    if prepared["content"] is None:
        del prepared["content"]
    reasoning = next((message[n] for n in _REASONING if message.get(n) is not None), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning} | prepared | {"reasoning_content": reasoning}
    if isinstance(prepared.get("tool_calls"), Sequence):
        prepared["tool_calls"] = [_parse_arguments(call) for call in prepared["tool_calls"]]
    return prepared


def _check_content(content: Any, message: Mapping[str, Any]) -> Any:
    if content is None:
        return None if message.get("tool_calls") else ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return [dict(part) for part in content]
    raise ValueError(
        f"The content {content!r:.80} is neither text nor a list of text parts: this package renders "
        "text only."
    )


def _parse_arguments(call: Any) -> Any:
    """Read the arguments of a tool call that come as JSON, so that they are written one way."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parse_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return dict(call)
        if isinstance(parsed, dict):
            return {**call, "arguments": parsed}
    return dict(call)


def _trace_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: str(value) if name == "role" else _trace_value(value, Origin("message", i, name))
            for name, value in _prepare(message).items()
        }
        for i, message in enumerate(messages)
    ]


def _trace_all(value: Any, kind: str) -> Any:
    return _trace_value(value, Origin(kind))


def _trace_value(value: Any, origin: Origin) -> Any:
    if isinstance(value, str):
        return trace(value, origin) if value else ""
    if isinstance(value, Mapping):
        return {_trace_value(k, origin): _trace_value(v, origin) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_trace_value(item, origin) for item in value)
    return value
