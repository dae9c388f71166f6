"""The sandbox in which chat templates run: that of transformers, bounded, and it traces text.

It gives templates what transformers gives them: Jinja's immutable sandbox, loop controls, the
`generation` tag, `raise_exception`, `strftime_now` and a `tojson` that leaves characters as they
are. Every value that a template prints, joins, calls or filters passes through here, so that text
keeps its sources and no template runs without end or makes text without end.
"""

import json
import sys
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
    ValuesView,
)
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, generate_lorem_ipsum
from markupsafe import Markup
from markupsafe import escape as escape_html

from trl_chatformat._jinja_private import HookedCodeGenerator
from trl_chatformat.provenance import (
    Origin,
    Run,
    Tag,
    Text,
    Trace,
    concat,
    make,
    mapped,
    rebuilt,
    runs_of,
    split_up,
    tagged,
    trace_of,
)
from trl_chatformat.spelling import (
    MOST_PADDING,
    TracedFormatter,
    find_texts,
    spell,
    spell_json,
    spell_mixed,
    spell_percent,
)

MOST_DEPTH = 200
MOST_BITS = 10_000
CONTAINERS = (list, tuple, dict, ValuesView, ItemsView)


class TooMuch(TemplateRuntimeError):
    """A template works, or writes, beyond all bounds."""


class NeedsText(Exception):
    """A template takes something for text that was not given as text.

    Args:
        feature: What it is.
    """

    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


class Rendering:
    """What holds for one rendering.

    Args:
        traced: Whether to follow text.
        clock: Says what time it is.
        steps: How much the template may do.
        longest: How long a text may be.
        allow: Says how many more steps, and how much more text, what was given justifies. It is
            asked once, by a template that needs them.
    """

    __slots__ = ("allow", "blocks", "clock", "longest", "steps", "traced")

    def __init__(
        self,
        traced: bool,
        clock: Callable[[], datetime],
        steps: int,
        longest: int,
        allow: Callable[[], tuple[int, int]],
    ) -> None:
        self.traced = traced
        self.clock = clock
        self.steps = steps
        self.longest = longest
        self.allow: Callable[[], tuple[int, int]] | None = allow
        self.blocks = 0

    def charge(self, steps: int) -> None:
        """Counts what the template does."""
        self.steps -= steps
        if self.steps < 0:
            self._extend()
            if self.steps < 0:
                raise TooMuch("it does not come to an end in a reasonable number of steps")

    def measure(self, length: int) -> None:
        """Counts the text that the template makes."""
        if length > self.longest:
            self._extend()
            if length > self.longest:
                raise TooMuch("it makes a text that is out of all proportion to what was given")
        self.charge(length >> 8)

    def _extend(self) -> None:
        if self.allow is not None:
            steps, length = self.allow()
            self.allow = None
            self.steps += steps
            self.longest += length

    def weigh(self, value: Any) -> None:
        """Counts what a container holds, again wherever it holds the same thing again."""
        stack = [(value, 0)]
        while stack:
            container, depth = stack.pop()
            if depth > MOST_DEPTH:
                raise TooMuch("it puts lists into lists without end")
            items: Iterable[Any] = container
            if isinstance(container, dict):
                items = [part for pair in container.items() for part in pair]
            self.charge(len(container))
            stack += [(item, depth + 1) for item in items if isinstance(item, CONTAINERS)]

    def measure_value(self, value: Any) -> None:
        """Counts the text in a container that will be spelled."""
        if isinstance(value, CONTAINERS):
            self.weigh(value)
            self.measure(sum(map(len, find_texts(value))))

    def spell(self, value: Any) -> str:
        """Prints a value."""
        kind = type(value)
        if kind is str or kind is Text:
            return value
        feature = getattr(kind, "feature", None)
        if feature is not None:
            raise NeedsText(feature)
        self.measure_value(value)
        return spell(value, unknown) if self.traced else str(value)

    def mark_unknown(self, text: str) -> str:
        """Says that nobody knows where a text comes from."""
        return unknown(text) if self.traced else text


CURRENT: ContextVar[Rendering] = ContextVar("rendering")


def unknown(text: str) -> str:
    """Tags text whose origin nobody knows with the line of the template that made it."""
    if not text:
        return text
    frame = sys._getframe(1)
    found: Any = frame
    while found is not None and "__jinja_template__" not in found.f_globals:
        found = found.f_back
    line = ""
    if found is not None:
        template = found.f_globals["__jinja_template__"]
        number = template.get_corresponding_lineno(found.f_lineno)
        line = f"line {number}: {template.lines[number - 1].strip():.80}"
    tag = Tag(Origin("unknown", None, line))
    if isinstance(text, Markup):
        return as_html(text, [(len(text), tag)])
    return tagged(str.__str__(text), tag)


class ChatTemplate(Template):
    """A compiled template that knows its source."""

    lines: Sequence[str] = ()
    has_generation: bool = False


class Html(Markup):
    """Text that is marked as HTML and knows its sources, until something is done to it."""

    __slots__ = ("_trace",)
    _trace: Trace

    def __iter__(self) -> Iterator[str]:
        return split_up(self)

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"


def as_html(text: str, trace: Trace | None = None) -> str:
    """Marks traced text as HTML."""
    result = Html(str.__str__(text))
    result._trace = trace_of(text) if trace is None else trace
    return result


class ChatUndefined(Undefined):
    """What is missing; but whoever asks a list of parts for a text's method takes it for text."""

    __slots__ = ()
    _tag: None = None  # asked for any other name, what is missing fails

    def __init__(self, hint: Any = None, obj: Any = None, name: Any = None, **more: Any) -> None:
        feature = getattr(type(obj), "feature", None)
        if feature is not None and isinstance(name, str) and hasattr(str, name):
            raise NeedsText(feature)
        if obj is None and hint is None:
            super().__init__(name=name, **more)
        else:
            super().__init__(hint, name=name, **more) if obj is None else super().__init__(
                hint, obj, name, **more
            )


class GenerationTag(Extension):
    """The tag `generation`: what it encloses is what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the tag and what it encloses."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark_generated")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark_generated(self, caller: Callable[[], str]) -> str:
        """Gives the enclosed text the next block's number."""
        text = caller()
        rendering = CURRENT.get()
        if not rendering.traced:
            return text
        rendering.blocks += 1
        runs: list[Run] = [
            (count, Tag(tag.origin if tag else None, rendering.blocks))
            for count, tag in runs_of(text)
        ]
        return make(str.__str__(text), runs)


class ChatNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        raise SecurityError("a namespace can't be printed")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have {name!r}, which begins with an underscore")


class ChatDict:
    """`dict`, as far as templates need it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Makes a dict."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Makes a dict of keys with one value."""
        return dict.fromkeys(*args)


def raise_exception(message: Any) -> None:
    """Refuses the conversation."""
    raise TemplateError(str.__str__(CURRENT.get().spell(message)))


def strftime_now(form: str) -> str:
    """Says what time it is; the clock's words are the template's."""
    text = CURRENT.get().clock().strftime(str.__str__(form))
    return text if type(form) is str else spell_mixed(text, form, unknown)


def lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Makes text without a meaning."""
    if n * max > MOST_PADDING:
        raise TooMuch("it asks for too much text")
    text = generate_lorem_ipsum(n, html, min, max)
    return as_html(text) if html else text


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of all chat templates."""

    code_generator_class = HookedCodeGenerator
    template_class = ChatTemplate
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=ChatUndefined,
            extensions=[GenerationTag, loopcontrols],
            cache_size=0,
        )
        names: dict[str, Any] = {
            "dict": ChatDict(),
            "lipsum": lipsum,
            "namespace": ChatNamespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        self.globals.update(names)
        for name in FILTERS:
            if name not in CHEAP:
                self.filters[name] = _wrap(name)
        self.filters |= OWN
        self.filters[LOOP] = _count_items

    @staticmethod
    def concat(pieces: Any) -> Any:
        """Joins what a template writes."""
        found = pieces if isinstance(pieces, list) else list(pieces)
        CURRENT.get().measure(sum(map(len, found)))
        return concat(found)

    @staticmethod
    def write(value: Any) -> str:
        """Prints a value."""
        rendering = CURRENT.get()
        text = value if type(value) is str else rendering.spell(value)
        rendering.charge(len(text) >> 8)
        return text

    @staticmethod
    def join_texts(values: Sequence[Any]) -> str:
        """Joins values that stand between `~`."""
        rendering = CURRENT.get()
        pieces = [rendering.spell(value) for value in values]
        rendering.measure(sum(map(len, pieces)))
        return concat(pieces)

    @staticmethod
    def build(value: Any) -> Any:
        """Takes a new container."""
        CURRENT.get().weigh(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Adds, multiplies, raises, or fills a format string."""
        rendering = CURRENT.get()
        if operator == "+":
            try:
                result = left + right
            except TypeError:
                for value in (left, right):
                    feature = getattr(type(value), "feature", None)
                    if feature is not None:
                        raise NeedsText(feature) from None
                raise
        elif operator == "%":
            if not isinstance(left, str):
                return left % right
            return _percent(rendering, left, right)
        elif operator == "*":
            _check_product(rendering, left, right)
            result = left * right
        else:
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
            return left**right
        if isinstance(result, str):
            rendering.measure(len(result))
        elif isinstance(result, (list, tuple)):
            rendering.weigh(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Makes `str.format` safe and traced."""
        safe = super().wrap_str_format(value)
        owner: Any = getattr(value, "__self__", None)
        if safe is None or hasattr(owner, "__html__"):
            return safe
        return partial(_format, self, owner, value.__name__ == "format_map")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls."""
        rendering = CURRENT.get()
        rendering.charge(1)
        owner: Any = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            rendering.charge(len(owner) >> 8)
            name = __obj.__name__
            if name in GROWING:
                _check_growth(rendering, name, owner, args, kwargs)
                if type(owner) is str and rendering.traced:
                    __obj = getattr(make(owner, trace_of(owner)), name)
        elif isinstance(__obj, LoopContext):
            for value in args:
                rendering.charge(len(value) if isinstance(value, Sized) else 0)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            if type(result) is str and rendering.traced and not _is_followed(__obj, owner):
                result = unknown(result)
            rendering.measure(len(result))
        elif isinstance(result, (list, tuple, dict)) and getattr(__obj, "__name__", "") != "get":
            rendering.weigh(result)
        return result


FOLLOWED = (
    *(str, list, tuple, dict, LoopContext, Cycler, Joiner, Macro, BlockReference),
    *(Extension, ChatDict),
)
FUNCTIONS = (raise_exception, strftime_now, lipsum)
GROWING = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust"}
    | {"translate", "zfill"}
)


def _is_followed(called: Any, owner: Any) -> bool:
    if isinstance(owner, Markup):
        return False  # some of its methods give plain text
    if isinstance(owner, FOLLOWED) or isinstance(called, FOLLOWED) or called in FUNCTIONS:
        return True
    return isinstance(called, partial) and called.func is _format


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TooMuch("it makes a number that is too large")


def _check_product(rendering: Rendering, left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(value, (str, list, tuple)):
                rendering.measure(len(value) * max(count, 0))
            elif isinstance(value, int):
                _check_bits(value.bit_length() + count.bit_length())


def _check_growth(
    rendering: Rendering, name: str, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    given = [*args, *kwargs.values()]
    size = len(text)
    if name == "join":
        items = args[0] if args and isinstance(args[0], Sized) else ()
        rendering.measure(size * len(items))
        if isinstance(items, CONTAINERS):
            rendering.measure_value(items)
    elif name == "replace":
        if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            rendering.measure(size + text.count(args[0]) * len(args[1]))
    elif name == "translate":
        longest = max((len(value) for arg in given for value in find_texts(arg)), default=1)
        rendering.measure(size * longest)
    elif name in ("format", "format_map"):
        rendering.measure_value(given)
    else:
        widths = [abs(value) for value in given if isinstance(value, int)] or [0]
        rendering.measure(widths[0] * (text.count("\t") if name == "expandtabs" else 1))


def _percent(rendering: Rendering, template: str, values: Any) -> str:
    if hasattr(template, "__html__"):
        return rendering.mark_unknown(template % values)
    given = values if isinstance(values, tuple) else (values,)
    rendering.measure_value(given)
    result = spell_percent(template, values, rendering.mark_unknown)
    rendering.measure(len(result))
    return result


def _format(
    environment: ChatEnvironment, template: str, from_map: bool, *args: Any, **kwargs: Any
) -> str:
    if from_map:
        if len(args) != 1 or kwargs:
            raise TypeError("format_map() takes exactly one argument")
        args, kwargs = (), args[0]
    rendering = CURRENT.get()
    rendering.measure(template.count("{") * sum(map(len, find_texts([list(args), kwargs]))))
    formatter = TracedFormatter(environment, rendering.mark_unknown)
    return formatter.fill(template, args, kwargs)


# Filters that take no longer for more: they are Jinja's own.
CHEAP = frozenset(
    {"abs", "attr", "count", "d", "default", "first", "float", "int", "last", "length", "random"}
)
# Filters that hand on what they were given.
HANDING_ON = frozenset(
    {"batch", "dictsort", "groupby", "items", "list", "map", "max", "min", "reject", "rejectattr"}
    | {"reverse", "round", "select", "selectattr", "slice", "sort", "sum", "unique"}
)
# Filters that take whatever they are given as text.
OF_TEXT = frozenset({"capitalize", "center", "lower", "string", "trim", "upper"})
LOOP = "items of a loop"

_plain = ImmutableSandboxedEnvironment()


def _wrap(name: str) -> Callable[..., Any]:
    @pass_context
    def apply(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        rendering = CURRENT.get()
        for given in (*args, *kwargs.values()):
            if isinstance(given, int) and abs(given) > MOST_PADDING:
                raise TooMuch(f"it gives the filter `{name}` too large a number")
        if name in OF_TEXT:
            value = rendering.spell(value)
        rendering.charge(1 + (len(value) if isinstance(value, Sized) else 0) // 16)
        if name == "sum":
            value = list(value)
            _check_sum(rendering, value)
        elif name not in HANDING_ON:
            rendering.measure_value(value)
        result = _plain.call_filter(name, value, args, kwargs, context)
        if isinstance(result, (list, tuple)):
            rendering.weigh(result)
        elif isinstance(result, str):
            rendering.measure(len(result))
            if rendering.traced and not hasattr(result, "_trace") and name not in HANDING_ON:
                return _trace_result(name, result, [value, args, kwargs])
        return result

    return apply


def _check_sum(rendering: Rendering, values: Sequence[Any]) -> None:
    sizes = sum(len(value) for value in values if isinstance(value, (list, tuple)))
    rendering.charge(len(values) * sizes >> 6)


def _trace_result(name: str, result: str, given: list[Any]) -> str:
    if hasattr(result, "__html__"):
        plain = str.__str__(result)
        return as_html(plain, trace_of(spell_mixed(plain, given, unknown)))
    if name == "title" and isinstance(given[0], str):
        return mapped(result, given[0], str.title)
    return spell_mixed(result, given, unknown)


@pass_context
def _count_items(context: Context, value: Any) -> Any:
    rendering = CURRENT.get()
    if isinstance(value, Sized):
        rendering.charge(len(value))
        return value
    return _count_each(rendering, value)


def _count_each(rendering: Rendering, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        rendering.charge(1)
        yield value


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    rendering = CURRENT.get()
    if attribute is not None:
        value = context.environment.call_filter("map", value, (), {"attribute": attribute}, context)
    between = rendering.spell(d)
    pieces: list[str] = []
    for item in value:
        if pieces and between:
            pieces.append(between)
        pieces.append(rendering.spell(item))
        rendering.charge(1)
    rendering.measure(sum(map(len, pieces)))
    return concat(pieces)


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    rendering = CURRENT.get()
    text, old, new = map(rendering.spell, (s, old, new))
    rendering.measure(len(text) + text.count(old) * len(new))
    if isinstance(text, Markup) or (type(text) is str and type(new) is not str):
        text = make(text, trace_of(text))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _format_filter(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("the filter `format` takes values either by place or by name")
    rendering = CURRENT.get()
    return _percent(rendering, rendering.spell(value), kwargs or args)


@pass_context
def _indent(
    context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    rendering = CURRENT.get()
    if not isinstance(s, str) and not hasattr(type(s), "feature"):
        return do_indent(s, width, first, blank)  # it fails, as in transformers
    text = rendering.spell(s)
    rendering.measure(len(width) if isinstance(width, str) else width)
    gap = width if isinstance(width, str) else " " * width
    lines = (text + "\n").splitlines()
    rendering.measure(len(text) + len(lines) * len(gap))
    pieces = [gap] if first else []
    for number, line in enumerate(lines):
        if number:
            pieces += ["\n", gap] if line or blank else ["\n"]
        pieces.append(line)
    return as_html(concat(pieces)) if isinstance(s, Markup) else concat(pieces)


@pass_context
def _escape(context: Context, value: Any) -> str:
    if hasattr(value, "__html__"):
        return value if isinstance(value, Markup) else as_html(value.__html__())
    rendering = CURRENT.get()
    text = rendering.spell(value)
    rendering.measure(6 * len(text))
    plain = str.__str__(escape_html(str.__str__(text)))
    if type(text) is str:
        return as_html(plain)
    return as_html(rebuilt(plain, [text], lambda: _escape_runs(text)))


def _escape_runs(text: str) -> Iterator[str]:
    position = 0
    for count, tag in runs_of(text):
        part = str.__getitem__(text, slice(position, position + count))
        yield tagged(str.__str__(escape_html(part)), tag)
        position += count


@pass_context
def _safe(context: Context, value: Any) -> str:
    return value if isinstance(value, Markup) else as_html(CURRENT.get().spell(value))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    rendering = CURRENT.get()
    rendering.measure_value(value)
    gap = len(indent) if isinstance(indent, str) else indent or 0
    if max(gap, *map(len, separators or ("",))) > MOST_DEPTH:
        raise TooMuch("it gives the filter `tojson` too large an indent")
    options: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    plain = json.dumps(value, **options)
    rendering.measure(len(plain))
    rendering.charge(len(plain) >> 6)
    if not rendering.traced:
        return plain
    traced = spell_json(value, plain, options, unknown)
    return (
        traced
        if type(separators) is type(None)
        else spell_mixed(plain, [value, separators], unknown)
    )


OWN: dict[str, Callable[..., Any]] = {
    "e": _escape,
    "escape": _escape,
    "format": _format_filter,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "safe": _safe,
    "tojson": _tojson,
}

ENVIRONMENT = ChatEnvironment()


@lru_cache(maxsize=64)
def compile_template(source: str) -> ChatTemplate:
    """Compiles a template, or finds it from an earlier call.

    Raises:
        ValueError: It can't be compiled.
    """
    try:
        tree = ENVIRONMENT.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, LOOP, [], [], None, None, lineno=loop.lineno)
        has_generation = any(
            isinstance(block.call.node, nodes.ExtensionAttribute)
            for block in tree.find_all(nodes.CallBlock)
        )
        template: Any = ENVIRONMENT.from_string(tree)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise ValueError(f"The chat template can't be compiled{where}: {error}") from error
    template.lines = source.splitlines() or [""]
    template.has_generation = has_generation
    return template
