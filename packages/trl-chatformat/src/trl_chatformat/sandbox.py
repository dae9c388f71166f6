"""The Jinja environment of chat templates: transformers' own, with bounds, and characters traced."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache, update_wrapper
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from trl_chatformat.provenance import (
    derive,
    in_generation,
    is_data,
    join_traced,
    traced,
)

MOST_STEPS = 10_000_000
MOST_CHARACTERS = 50_000_000


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders as transformers does, follows characters, and stops what would not end."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
        )
        self.code_generator_class = TracingCodeGenerator
        self.finalize = self.as_text
        self.steps = 0
        self.clock: Callable[[], datetime] = datetime.now
        for name, function in list(self.filters.items()):
            self.filters[name] = self._follow(name, function)
        self.filters["tojson"] = self._follow("tojson", to_json)
        self.filters["join"] = join_values
        self.filters["replace"] = lambda text, old, new, count=None: traced(
            self.as_text(text)
        ).replace(str(old), str(new), -1 if count is None else count)
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda layout: self.clock().strftime(layout)
        self.globals["namespace"] = ChatNamespace
        self.globals["dict"] = ChatDict()

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        text = join_traced(parts)
        self.count(len(text) // 1000)
        if len(text) > MOST_CHARACTERS:
            raise SecurityError(f"The template wrote more than {MOST_CHARACTERS} characters.")
        return text

    def concat_values(self, values: Iterable[Any]) -> str:
        """Joins what `~` joins."""
        return self.concat([self.as_text(value) for value in values])

    def as_text(self, value: Any) -> str:
        """Writes a value as `str` does, and follows the characters in it."""
        if isinstance(value, str):
            return value
        return derive(str(value), "a printed value", value)

    def count(self, steps: int = 1) -> None:
        """Counts what the template does, up to a bound."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise SecurityError(f"The template took more than {MOST_STEPS} steps.")

    def counted(self, items: Iterable[Any]) -> Iterable[Any]:
        """Counts the rounds of a loop."""
        try:
            self.count(1 + len(items))  # type: ignore[arg-type]
        except TypeError:
            return self._count_each(items)
        return items

    def _count_each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.count()
            yield item

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: PYI063
        self.count()
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and (is_data(args) or is_data(kwargs)):
            __obj = getattr(traced(owner), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.count()
        if operator == "**" or (operator == "*" and not _is_number(left, right)):
            sized = [v for v in (left, right) if not isinstance(v, (int, float))]
            number = next((v for v in (right, left) if isinstance(v, (int, float))), 1)
            size = len(sized[0]) if sized else abs(left) or 1
            if operator == "**" and size > 1 and number > 1000:
                raise SecurityError("A power in the template is too large.")
            if operator == "*" and size * number > MOST_CHARACTERS:
                raise SecurityError(f"The template wrote more than {MOST_CHARACTERS} characters.")
        if operator == "%" and isinstance(left, str):
            return derive(str.__mod__(left, right), "%", left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, str):
            self.count(len(result) // 1000)
            if len(result) > MOST_CHARACTERS:
                raise SecurityError(f"The template wrote more than {MOST_CHARACTERS} characters.")
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner = value.__self__
        as_map = value.__name__ == "format_map"

        def follow(*args: Any, **kwargs: Any) -> str:
            if as_map:
                args, kwargs = (), args[0]
            if is_data(owner):
                formatter = SandboxedFormatter(self)
                return derive(formatter.vformat(owner, args, kwargs), "format", owner, args)
            return _format(SandboxedFormatter(self), owner, args, kwargs, self.as_text)

        return update_wrapper(follow, value)

    def _follow(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give what a filter makes of data the source of the data, if the filter loses it."""
        passes = getattr(function, "jinja_pass_arg", None)

        def follow(*args: Any, **kwargs: Any) -> Any:
            self.count()
            given = args[1:] if passes is not None else args
            result = function(*args, **kwargs)
            if type(result) is str and (is_data(given) or is_data(kwargs)):
                whole = given if name != "tojson" else [v for v in given if is_data(v)]
                return derive(result, f"|{name}", *whole, *kwargs.values())
            return result

        update_wrapper(follow, function)
        return follow


class TracingCodeGenerator(CodeGenerator):
    """Compiles `~` and loops so that the environment sees them."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)


class GenerationBlocks(Extension):
    """`{% generation %}` blocks, wherever they stand."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return in_generation(caller())


class ChatNamespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class ChatDict:
    """`dict`, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_environment
def join_values(
    environment: ChatEnvironment, values: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    """Join as Jinja's filter does, character by character."""
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    return traced(str(d)).join([environment.as_text(value) for value in values])


def raise_exception(message: str) -> None:
    """Refuse a conversation, on the template's behalf."""
    raise TemplateError(message)


@lru_cache(maxsize=64)
def compile_template(template: str) -> jinja2.Template:
    """Compile a template; the last ones are kept."""
    return ChatEnvironment().from_string(template)


def _format(
    formatter: SandboxedFormatter,
    pattern: str,
    args: Any,
    kwargs: Any,
    as_text: Callable[[Any], str],
) -> str:
    parts: list[str] = []
    automatic = 0
    for literal, name, layout, conversion in formatter.parse(pattern):
        parts.append(literal)
        if name is None:
            continue
        if name == "" or name[0] in ".[":
            name = f"{automatic}{name}"
            automatic += 1
        value, _ = formatter.get_field(name, args, kwargs)
        if conversion is None and not layout:
            parts.append(as_text(value))
        else:
            text = formatter.format_field(formatter.convert_field(value, conversion), layout or "")
            parts.append(derive(str(text), "format", value))
    return join_traced(parts)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace of a template can't have an attribute {name!r}.")


def _is_number(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
