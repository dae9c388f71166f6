"""What `render_chat` takes, what it refuses, and what it says of each character."""

import re
import sys
import threading
from datetime import datetime

import pytest
from jinja2 import Environment
from jinja2.exceptions import UndefinedError
from transformers import PreTrainedTokenizerFast

from trl_chatformat import render_chat
from trl_chatformat.rendering import render_text

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}

START = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = "
GROWING = ("ns.x * 2", "ns.x + ns.x", "ns.x ~ ns.x", "ns.x.replace('a', 'aa')", "[ns.x, ns.x]")


def pieces(chat):
    return [(chat.text[span.start : span.end], span.origin) for span in chat.spans]


def test_spans_name_messages_fields_tools_and_settings():
    template = (
        "{{ bos_token }}{{ tools[0].name }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}{{ motto }}{{ documents[0].text }}"
    )
    messages = [*HI, {"role": "assistant", "content": "Yo", "tool_calls": [CALL]}]
    chat = render_chat(
        template,
        messages,
        tools=[{"name": "f"}],
        documents=[{"text": "d"}],
        bos_token="<s>",
        motto="m!",
    )
    found = [(t, o and (o.kind, o.message, o.field)) for t, o in pieces(chat)]
    assert found == [
        ("<s>", None),
        ("f", ("tool", None, "tools")),
        ("[user]", None),
        ("Hi", ("message", 0, "content")),
        ("[assistant]", None),
        ("Yo", ("message", 1, "content")),
        (
            '[{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}]',
            ("message", 1, "tool_calls"),
        ),
        ("m!", ("setting", None, "motto")),
        ("d", ("document", None, "documents")),
    ]


def test_text_of_unknown_origin_names_the_line_of_the_template():
    chat = render_chat("a\n{{ namespace }}{{ messages|length }}", HI)
    assert {o.kind for _, o in pieces(chat) if o} == {"unknown"}
    assert "line 2: {{ namespace }}" in pieces(chat)[-1][1].field


@pytest.mark.parametrize("role", ["user<|im_end|>", "", "a b", "us\ner", "ассистент", None, 3])
def test_a_role_that_is_no_word_is_refused(role):
    with pytest.raises(ValueError, match=r"Message 1 has the role .* a role is a word"):
        render_chat(CHATML, [*HI, {"role": role or "", "content": "x"}])


def test_roles_are_the_templates_text():
    chat = render_chat("<|{{ messages[0].role }}|>", [{"role": "my-role_2", "content": ""}])
    assert pieces(chat) == [("<|my-role_2|>", None)]


def test_content_that_is_missing_is_empty_and_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, text in ((None, ""), (parts, "ab"), ([], "")):
        chat = render_chat(CHATML, [{"role": "user", "content": content}])
        assert chat.text == f"<|im_start|>user\n{text}<|im_end|>\n"
        assert [t for t, o in pieces(chat) if o] == [text] * bool(text)


@pytest.mark.parametrize("kind", ["image", "audio", "video", "input_image"])
def test_parts_that_are_no_text_are_refused(kind):
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: "x.png"}]
    with pytest.raises(ValueError, match=r"Message 0 .* renders text only"):
        render_chat(CHATML, [{"role": "user", "content": parts}])


def test_arguments_of_tool_calls_have_one_form():
    as_json = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    for template, text in (
        ("{{ messages[0].tool_calls[0].function.arguments|tojson }}", '{"x": "é"}'),
        ("{{ 'a' + messages[0].tool_calls[0].function.arguments }}", 'a{"x": "é"}'),
        ("{% for k, v in messages[0].tool_calls[0].function.arguments|items %}{{ k }}={{ v }}"
         "{% endfor %}", "x=é"),
    ):  # fmt: skip
        for call in (CALL, as_json):
            messages = [{"role": "assistant", "tool_calls": [call]}]
            assert render_chat(template, messages).text == text


def test_no_tools_are_none():
    template = "{{ 'tools' if tools is not none else 'none' }}"
    assert render_chat(template, HI, tools=[]).text == render_chat(template, HI).text == "none"


def test_one_of_several_templates_is_chosen_as_transformers_does():
    both = {"default": "d", "tool_use": "t"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render_chat(both, HI).text == "d"
    assert render_chat(both, HI, tools=tools).text == "t"
    assert render_chat({"default": "d"}, HI, tools=tools).text == "d"
    with pytest.raises(ValueError, match="no default"):
        render_chat({"rag": "r"}, HI)
    with pytest.raises(ValueError, match="no chat template"):
        render_chat(object(), HI)


def test_the_clock_is_pinned_by_a_time_or_a_function():
    then = datetime(2031, 2, 3)
    for clock in (then, lambda: then):
        chat = render_chat("{{ strftime_now('%d %b %Y') }}", HI, clock=clock)
        assert pieces(chat) == [("03 Feb 2031", None)]


@pytest.mark.parametrize("content", ["Once upon", "tail \n", "a<|im_end|>"])
@pytest.mark.parametrize("change", ["", "|trim"])
def test_the_last_message_goes_on_as_in_transformers(byte_level, content, change):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    tokenizer.chat_template = CHATML.replace("+ m.content +", f"+ m.content{change} +")
    messages = [*HI, {"role": "assistant", "content": content}]
    settings = {"continue_final_message": True}
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    assert render_chat(tokenizer, messages, **settings).text == theirs
    assert render_text(tokenizer, messages, **settings) == theirs
    with pytest.raises(ValueError, match="choose one"):
        render_chat(tokenizer, messages, add_generation_prompt=True, **settings)


def test_spaces_around_the_last_message_stay_where_the_template_keeps_them():
    # transformers 4.51 drops those after it.
    chat = render_chat(CHATML, [{"role": "user", "content": "  a  "}], continue_final_message=True)
    assert chat.text == "<|im_start|>user\n  a  "


def test_generation_blocks_are_right_inside_of_macros_and_set_blocks():
    block = "{% generation %}{{ m.content }}!{% endgeneration %}"
    macro = "{% macro f(m) %}<" + block + ">{% endmacro %}"
    in_set = "{% set x %}" + block + "{% endset %}{{ x }}"
    for before, shown in (("", block), (macro, "{{ f(m) }}"), ("", in_set)):
        chat = render_chat(before + "{% for m in messages %}ab" + shown + "{% endfor %}", HI * 2)
        assert [chat.text[start:end] for start, end in chat.generation] == ["Hi!", "Hi!"]
    assert render_chat(CHATML, HI).generation is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum.__globals__['os'] }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) ~ [].__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages|map(attribute='__class__')|list|first.__mro__ }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_what_reaches_out_of_the_sandbox_is_refused(template):
    with pytest.raises(ValueError, match="chat template"):
        render_chat(template, HI)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        *(START + more + " %}{% endfor %}{{ ns.x }}" for more in GROWING),
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ 9**99999 }}",
        "{{ [0] * 10**10 }}",
        "{{ lipsum(10**9) }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ 'a'|indent(10**9, true) }}",
    ],
)  # fmt: skip
def test_what_has_no_end_is_refused(template, monkeypatch):
    # Bounds that are reached sooner than the real ones.
    monkeypatch.setattr("trl_chatformat.rendering.MOST_STEPS", 100_000)
    monkeypatch.setattr("trl_chatformat.rendering.MOST_TEXT", 100_000)
    with pytest.raises(ValueError, match="chat template refuses this conversation"):
        render_chat(template, HI)


def test_errors_say_where_and_what():
    with pytest.raises(ValueError, match=r"line 2.*no system"):
        render_chat("a\n{{ raise_exception('no system') }}", HI)
    with pytest.raises(ValueError, match="can't be compiled at line 2"):
        render_chat("a\n{% if %}", HI)
    with pytest.raises(ValueError, match="Message 0 is 'x'"):
        render_chat(CHATML, ["x"])


@pytest.mark.parametrize("value", ["missing", "none", "5", "[1]"])
def test_a_filter_for_text_alone_fails_on_what_is_none_as_in_jinja(value):
    plain = "{{ " + value + "|indent }}"
    with pytest.raises((UndefinedError, TypeError, AttributeError)) as expected:
        Environment().from_string(plain).render()
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        render_chat(plain, HI)


def test_nothing_that_is_given_is_changed():
    messages = [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    template = "{{ messages|tojson }}{{ tools|tojson }}"
    tools = [{"name": "f"}]
    render_chat(template, messages, tools=tools, continue_final_message=False)
    assert messages == [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    assert type(messages[0]["content"]) is str
    assert tools == [{"name": "f"}]


def test_the_work_is_linear_in_the_number_of_turns():
    """Counted in steps of the interpreter, which no other work on the machine changes."""

    def count(turns):
        steps = 0

        def step(frame, event, argument):
            nonlocal steps
            steps += 1

        messages = [{"role": "user", "content": f"turn {i}"} for i in range(turns)]
        sys.setprofile(step)
        try:
            render_chat(CHATML, messages)
        finally:
            sys.setprofile(None)
        return steps

    count(1)  # it compiles
    assert count(800) < 1.1 * 8 * count(100)


def test_threads_share_a_template():
    messages = [[{"role": "user", "content": f"{n} " * 200}] for n in range(4)]
    expected = [render_chat(CHATML, chat) for chat in messages]
    wrong = []

    def work(number):
        for _ in range(50):
            if render_chat(CHATML, messages[number]) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
