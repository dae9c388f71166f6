"""Chat templates rendered to text that says where each of its characters came from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError, UndefinedError

from trl_chatformat.messages import REASONING, prepare_messages, prepare_value
from trl_chatformat.provenance import Origin, Tag, runs_of, tagged
from trl_chatformat.sandbox import (
    CURRENT,
    ENVIRONMENT,
    ChatTemplate,
    NeedsText,
    Rendering,
    compile_template,
)
from trl_chatformat.spelling import find_texts

# The texts of these variables are the template's own.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What any conversation may cost; what it holds allows for more.
MOST_STEPS = 1_000_000
MOST_TEXT = 1_000_000
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
CONTINUED_TAG = Tag(Origin("continued"))
FAULTS = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)

Clock = datetime | Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters in a row from one place; `origin` is None for what the template wrote."""

    start: int
    end: int
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    `spans` say where the characters of `text` came from, and cover it in order; `generation` says
    where the `{% generation %}` blocks are, and is None if the template has none.
    """

    text: str
    spans: tuple[Span, ...]
    generation: tuple[tuple[int, int], ...] | None


def render_chat(
    template_or_tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    clock: Clock | None = None,
    **template_kwargs: Any,
) -> RenderedChat:
    """Renders a conversation as transformers does, and says where each character came from.

    Args:
        template_or_tokenizer: A Jinja template; a dict of them by name; or a tokenizer, for its
            template and its named tokens.
        messages: Each has a `role`, and `content` that is text, None or a list of text parts.
        tools: JSON schemas, or functions that transformers can make schemas of.
        documents: Dicts, for templates that write them.
        add_generation_prompt: Whether to write how an answer begins.
        continue_final_message: Whether to end where the last message's content ends, or the field
            that is named.
        clock: The time that the template sees, or a function that tells it; the real one if None.
        template_kwargs: Variables of the template. Named tokens such as `bos_token` are the
            template's own text; all others are data.

    Returns:
        The text and its sources.

    Raises:
        ValueError: There is no template, or it can't be compiled, refuses the conversation, fails,
            or does not come to an end; a role is no plain word; a part of a message is no text.

    Example:
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> chat = render_chat(template, [{"role": "user", "content": "<user>"}])
        >>> chat.text
        '<user><user>'
        >>> [(span.start, span.end, span.origin and span.origin.message) for span in chat.spans]
        [(0, 6, None), (6, 12, 0)]
    """
    template, named = read_template(template_or_tokenizer, bool(tools))
    job = _Job(template, messages, clock, traced=True)
    job.set_variables(tools, documents, add_generation_prompt, named, template_kwargs)
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message goes on with the last message, add_generation_prompt begins "
            "another one: choose one of them."
        )
    text = job.run(continue_final_message)
    spans: list[Span] = []
    blocks: dict[int, tuple[int, int]] = {}
    end = 0
    for count, tag in runs_of(text):
        start, end = end, end + count
        origin = tag.origin if tag is not None else None
        if spans and spans[-1].origin == origin:
            spans[-1] = Span(spans[-1].start, end, origin)
        else:
            spans.append(Span(start, end, origin))
        if tag is not None and tag.block is not None:
            blocks[tag.block] = (blocks.get(tag.block, (start, end))[0], end)
    generation = tuple(sorted(blocks.values())) if job.template.has_generation else None
    return RenderedChat(str.__str__(text), tuple(spans), generation)


def render_text(
    template_or_tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    clock: Clock | None = None,
    **template_kwargs: Any,
) -> str:
    """Renders the text of `render_chat` without following its characters, which is faster.

    Args:
        template_or_tokenizer: As for `render_chat`, and so are the following.
        messages: The same.
        tools: The same.
        documents: The same.
        add_generation_prompt: The same.
        continue_final_message: The same.
        clock: The same.
        template_kwargs: The same.

    Returns:
        The text.

    Raises:
        ValueError: As `render_chat` does.

    Example:
        >>> render_text("{{ messages[0].content }}!", [{"role": "user", "content": "Hi"}])
        'Hi!'
    """
    if continue_final_message:
        return render_chat(
            template_or_tokenizer,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            clock=clock,
            **template_kwargs,
        ).text
    template, named = read_template(template_or_tokenizer, bool(tools))
    job = _Job(template, messages, clock, traced=False)
    job.set_variables(tools, documents, add_generation_prompt, named, template_kwargs)
    return str.__str__(job.run())


def read_template(source: Any, with_tools: bool = False) -> tuple[str, dict[str, Any]]:
    """Reads the template, and the named tokens, of what `render_chat` takes.

    Raises:
        ValueError: There is no template, or no default one among several.
    """
    template = source
    named: dict[str, str] = {}
    if not isinstance(source, (str, Mapping)):
        template = getattr(source, "chat_template", None)
        known = getattr(source, "special_tokens_map", None)
        if not isinstance(known, Mapping):
            known = {name: getattr(source, name, None) for name in NAMED}
        named = {name: _as_texts(token) for name, token in known.items() if token is not None}
    if isinstance(template, Mapping):
        name = "tool_use" if with_tools and "tool_use" in template else "default"
        if name not in template:
            raise ValueError(
                f"There is no default among the chat templates {sorted(template)}: pass one."
            )
        template = template[name]
    if not isinstance(template, str):
        raise ValueError(
            f"{type(source).__name__} has no chat template: set one, or pass a template."
        )
    return template, named


def _as_texts(token: Any) -> Any:
    return [str(item) for item in token] if isinstance(token, (list, tuple)) else str(token)


class _Job:
    def __init__(self, source: str, messages: Any, clock: Clock | None, traced: bool) -> None:
        self.template: ChatTemplate = compile_template(source)
        self._source = source
        self._messages = getattr(messages, "messages", messages)
        self._traced = traced
        self._clock = datetime.now if clock is None else clock if callable(clock) else lambda: clock
        self._variables: dict[str, Any] = {}

    def set_variables(
        self,
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        add_generation_prompt: bool,
        named: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        own = {name: others[name] for name in NAMED if isinstance(others.get(name), str)}
        self._variables = {
            **named,
            **{k: self._prepare(v, "setting", k) for k, v in others.items() if k not in own},
            **own,
            "tools": self._prepare([_read_schema(t) for t in tools] if tools else None, "tool"),
            "documents": self._prepare(documents, "document"),
            "add_generation_prompt": add_generation_prompt,
        }

    def _prepare(self, value: Any, kind: str, field: str | None = None) -> Any:
        if value is None or isinstance(value, bool):
            return value
        tag = Tag(Origin(kind, None, field or f"{kind}s")) if self._traced else None
        return prepare_value(value, tag)

    def run(self, continued: bool | str = False) -> str:
        as_text: set[str] = set()
        while True:
            messages = prepare_messages(self._messages, as_text, self._traced)
            final = _mark_end(messages, continued, self._source) if continued else None
            try:
                text = self._render(messages)
            except _Fault as fault:
                if fault.feature is None or fault.feature in as_text:
                    raise fault.as_error() from fault.__cause__
                as_text.add(fault.feature)
                continue
            return text if final is None else _cut_end(text, final)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        def allow() -> tuple[int, int]:
            # A template may look at all messages for each of them, and write them one by one
            # to the end of a variable.
            size = sum(map(len, find_texts([messages, self._variables])))
            turns = len(messages)
            return size + 4 * turns**2 + (turns * size >> 8), 20 * size

        token = CURRENT.set(Rendering(self._traced, self._clock, MOST_STEPS, MOST_TEXT, allow))
        try:
            context = self.template.new_context({"messages": messages, **self._variables})
            return ENVIRONMENT.concat(self.template.root_render_func(context))
        except NeedsText as need:
            raise _Fault(self.template, need, need.feature) from need
        except FAULTS as error:
            undefined = isinstance(error, UndefinedError) and "'content'" in str(error)
            missing = undefined or isinstance(error, TypeError)
            raise _Fault(self.template, error, "content" if missing else None) from error
        finally:
            CURRENT.reset(token)


class _Fault(Exception):
    def __init__(self, template: ChatTemplate, error: Exception, feature: str | None) -> None:
        super().__init__(error)
        self.feature = feature
        self._template = template
        self._error = error

    def as_error(self) -> ValueError:
        line = None
        step = self._error.__traceback__
        while step is not None:
            if step.tb_frame.f_globals.get("__jinja_template__") is self._template:
                line = self._template.get_corresponding_lineno(step.tb_lineno)
            step = step.tb_next
        where = f" (line {line})" if line else ""
        what = str(self._error) or type(self._error).__name__
        if isinstance(self._error, NeedsText):
            what = f"it takes {what} for text"
        return ValueError(f"The chat template refuses this conversation{where}: {what}")


def _read_schema(tool: Any) -> Any:
    if not callable(tool) or isinstance(tool, Mapping):
        return tool
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _mark_end(messages: list[dict[str, Any]], continued: bool | str, source: str) -> str:
    field = continued if isinstance(continued, str) else "content"
    message = messages[-1] if messages else {}
    value = message.get(field)
    names = [field]
    if field in REASONING:
        names = [name for name in REASONING if name in message and message[name] == value]
    if value is None or not any(name in source for name in names):
        raise ValueError(
            f"The last message has no {field!r} to continue, or the chat template never writes it."
        )
    mark = tagged(CONTINUED, CONTINUED_TAG)
    if isinstance(value, str):
        message.update(dict.fromkeys(names, value + mark))
        return value
    for part in reversed(value):
        if isinstance(part, dict) and "text" in part:
            text = part["text"]
            part["text"] = text + mark
            return text
    raise ValueError("The last message has no text to continue.")


def _cut_end(text: str, final: str) -> str:
    end = 0
    found: tuple[int, int] | None = None
    for count, tag in runs_of(text):
        start, end = end, end + count
        if tag is not None and tag.origin is CONTINUED_TAG.origin:
            found = (start, count)
    if found is None or final.strip() not in text:
        raise ValueError(
            "The chat template doesn't write the last message as it is, so that it can't be "
            "continued."
        )
    start, count = found
    text = text[:start]
    return text if count == len(CONTINUED) else text.rstrip()
