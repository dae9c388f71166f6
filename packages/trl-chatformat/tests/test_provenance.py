"""Data is never said to be the template's, whatever a template does with it."""

import random

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from trl_chatformat import render_chat

# Each message's letters are of one script, in which case exists; templates write ASCII alone.
SCRIPTS = (range(0x430, 0x450), range(0x3B1, 0x3C2), range(0x561, 0x581))
STEPS = (
    *(".strip()", ".lstrip()", ".rstrip()", ".upper()", ".lower()", ".title()", ".capitalize()"),
    *(".swapcase()", ".casefold()", "[1:]", "[:-2]", "[::-1]", "[2:9:2]", "[0:1]", "[-3:]"),
    *(".replace(' ', '-')", ".replace('', '.')", ".replace(' ', '_', 1)", ".expandtabs(3)"),
    *(".split()|join('+')", ".split(' ')|join", ".split(' ', 1)[-1]", ".rsplit(' ', 1)[0]"),
    *(".splitlines()|join('/')", ".splitlines(true)|join('/')", ".partition(' ')|join('*')"),
    *(".rpartition(' ')[2]", ".removeprefix(' ')", ".removesuffix('\\n')", ".center(60, '-')"),
    *(".ljust(70)", ".rjust(80, '.')", ".zfill(50)", "|safe", "|escape", "|list|string"),
    *("|trim", "|trim('-')", "|upper", "|lower", "|title", "|capitalize", "|string", "|indent(2)"),
    *("|tojson", "|tojson(indent=2)", "|tojson(ensure_ascii=false)", "|list|join('.')", "|first"),
    *("|last", "|reverse", "|list|reverse|join", "|replace(' ', '=')", "|default('d')", "|pprint"),
    *("|truncate(20)", "|wordwrap(9)", "|center(70)", "|list|map('upper')|join", "|striptags"),
    *("|list|select('ne', ' ')|join", "|list|unique|join", "|list|sort|join('')", "|urlize"),
    *("|batch(3)|map('join', '-')|join('+')", "|list|groupby(0)|map('first')|join"),
    *(" + '!'", " ~ '!' ~ loop.index", " * 2", " + messages[0].content"),
)
WHOLES = (
    "{{@}}",
    "{{'<' + (@)|string + '>'}}",
    "{{'a' ~ (@) ~ 1}}",
    "{{'[%s|%5s]' % ((@), 2)}}",
    "{{'{}-{:>9}-{!r}'.format((@), 'x', (@))}}",
    "{{'{x}'.format(x=(@))}}",
    "{{'+'.join(['a', (@)|string, 'b'])}}",
    "{{[(@), 1, none]}}",
    "{{{'k': (@)}|tojson}}",
    "{{{'k': (@)}|dictsort|string}}",
    "{% set x = (@) %}{{x}}{{x}}",
    "{% set x %}({{@}}){% endset %}{{x[1:]}}",
    "{% set ns = namespace(x='') %}{% set ns.x = ns.x ~ (@) %}{{ns.x}}",
    "{% macro f(x) %}<{{x}}>{% endmacro %}{{f(@)}}",
    "{% for c in (@)|string %}{{c}},{% endfor %}",
    "{% for c in (@)|string|list %}{{loop.cycle('a', c)}}{% endfor %}",
    "{% filter upper %}b{{@}}{% endfilter %}",
    "{% call(y) g((@)) %}{{y}}{% endcall %}",
    "{% generation %}{{@}}{% endgeneration %}",
    "{{'x'.replace('x', (@)|string)}}",
    "{{dict(a=(@)).values()|first}}",
    "{{joiner((@)|string)() ~ cycler((@), 'z').next()}}",
    "{% if (@) %}{{(@)}}{% else %}none{% endif %}",
)
CALLER = "{% macro g(x) %}{{ caller(x) }}{% endmacro %}"
# What these make depends on what letters there are.
KEEPING = ("sort", "unique", "striptags", "urlize", "title", "groupby", "wordwrap")


def make_template(rng):
    pieces = []
    for _ in range(rng.randint(1, 3)):
        expression = "m.content"
        for _ in range(rng.randint(0, 3)):
            expression = f"({expression}){rng.choice(STEPS)}"
        pieces.append(rng.choice(WHOLES).replace("@", expression))
    return f"{CALLER}{{% for m in messages %}}{'|'.join(pieces)}{{% endfor %}}"


def make_texts(rng):
    texts = []
    for script in SCRIPTS:
        letters = [*map(chr, script), " ", " ", "\n", "\t"]
        texts.append("".join(rng.choices(letters, k=rng.randint(1, 40))))
    return texts


def as_messages(texts):
    return [{"role": "user", "content": text} for text in texts]


def written(chat):
    return "".join(chat.text[s.start : s.end] for s in chat.spans if s.origin is None)


def cases(seed, count):
    """Random templates and texts, and what transformers renders."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        template, texts = make_template(rng), make_texts(rng)
        messages = as_messages(texts)
        try:
            theirs = _compile_jinja_template(template).render(messages=messages)
        except Exception:  # a template that makes no sense
            with pytest.raises(ValueError, match="template"):
                render_chat(template, messages)
            continue
        found += 1
        yield template, texts, theirs


@pytest.mark.parametrize("seed", range(5))
def test_texts_are_those_of_transformers_and_letters_keep_their_message(seed):
    for template, texts, theirs in cases(seed, 100):
        chat = render_chat(template, as_messages(texts))
        assert chat.text == theirs, template
        for span in chat.spans:
            part = chat.text[span.start : span.end].lower()
            own = {n for n, script in enumerate(SCRIPTS) if any(ord(c) in script for c in part)}
            if span.origin is None:
                assert not own, (template, texts, part)
            elif span.origin.kind == "message" and "messages[0]" not in template:
                assert own <= {span.origin.message}, (template, texts, part)


@pytest.mark.parametrize("seed", range(5, 10))
def test_what_the_template_wrote_does_not_depend_on_what_data_spells(seed):
    marks = str.maketrans("абвгд", "|[]{}")
    for template, texts, _ in cases(seed, 100):
        if not any(word in template for word in KEEPING):
            # The first letter stays a letter, for what depends on its case.
            harmless = render_chat(template, as_messages([f"ж{t}" for t in texts]))
            hostile = render_chat(template, as_messages([f"ж{t.translate(marks)}" for t in texts]))
            assert written(hostile) == written(harmless), (template, texts)


@pytest.mark.parametrize(
    "expression",
    [
        "(c|escape)|list|join",
        "c|escape|first ~ (c|escape)[1:]",
        "(c|escape).unescape()",
        "('<b>'|safe + c)|list|join",
        "('%s'|safe % c)|list|join",
        "'x'|safe|replace('x', c)",
        "''.join(c|safe)",
        "('<b>'|safe + c).striptags()",
        "c.encode().decode()",
        "'{}'.format(c|safe)",
        "'x'.translate({120: c})",
        "'x'.replace('x', c)",
        "''.join([c])",
        "(c|safe).split()|join",
        "[c]|string",
        "{c: c}|string",
        "''|default(c, true)",
        "(''|first)|default(c)",
        "([lipsum(1, true, 1, 2)[:0] + c]|join|list|join)",
    ],
)
def test_text_in_markup_bytes_and_containers_is_data_still(expression):
    template = "{%- set c = messages[0].content -%}{{ " + expression + " }}"
    chat = render_chat(template, [{"role": "user", "content": "Data"}])
    assert "Data" in chat.text
    assert not {*"Data"} & {*written(chat)}, chat


@pytest.mark.parametrize(
    "expression",
    [
        "x",
        "[x]",
        "x|title",
        "'%s' % x",
        "'{}'.format(x)",
        "x|pprint",
        "''|first|string",
        "x|urlize",
    ],
)
def test_what_is_missing_is_printed_as_transformers_does(expression):
    template = "{{ " + expression + " }}."
    expected = _compile_jinja_template(template).render(messages=[])
    assert render_chat(template, []).text == expected
