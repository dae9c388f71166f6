"""What the ChatML template writes, and what it refuses to."""

from dataclasses import dataclass

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from trl_chatformat import FORMAT_MAPPING, ChatMlSpecialTokens

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Two\nlines, 'quotes' and {{ braces }}\r\n"},
    {"role": "assistant", "content": ""},
    {"role": "tool", "content": "naïve 你好 🙂 "},
]
WRITTEN = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n  Two\nlines, 'quotes' and {{ braces }}\r\n<|im_end|>\n"
    "<|im_start|>assistant\n<|im_end|>\n"
    "<|im_start|>tool\nnaïve 你好 🙂 <|im_end|>\n"
)


@pytest.fixture
def render(byte_level):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    template = ChatMlSpecialTokens().chat_template

    def render(messages, **keywords):
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **keywords
        )

    return render


def test_plain_conversations_are_written_as_documented(render):
    assert render(CONVERSATION) == WRITTEN
    assert render(CONVERSATION, add_generation_prompt=True) == (WRITTEN + "<|im_start|>assistant\n")


def test_plain_jinja_writes_the_same_as_transformers(render):
    template = jinja2.Template(ChatMlSpecialTokens().chat_template)
    assert template.render(messages=CONVERSATION) == render(CONVERSATION)


def test_empty_tools_are_no_tools(render):
    assert render(CONVERSATION, tools=[]) == WRITTEN


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        (["a ", "b"], "a b"),
    ],
)
def test_no_content_is_empty_and_text_parts_are_joined(render, content, text):
    message = {"role": "user", "content": content}
    assert render([message]) == f"<|im_start|>user\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "keywords", "complaint"),
    [
        (
            [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}],
            {},
            "text parts only",
        ),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], {}, "list of text parts"),
        ([{"role": "user", "content": 3}], {}, "list of text parts"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}],
            {},
            "tool calls",
        ),
        (
            CONVERSATION,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            "tool schemas",
        ),
        (CONVERSATION, {"documents": [{"title": "t", "text": "x"}]}, "documents"),
    ],
)
def test_what_the_format_cannot_express_is_an_error(render, messages, keywords, complaint):
    with pytest.raises(jinja2.TemplateError, match=complaint):
        render(messages, **keywords)


@pytest.mark.parametrize(
    "token", ["it's", 'say "x"', "back\\slash\\n", "{{ x }}", "<\uff5cé🙂\uff5c>"]
)
def test_any_text_can_be_a_token(token):
    tokens = ChatMlSpecialTokens(bos_token=token, eos_token=f"/{token}", pad_token="p")
    written = jinja2.Template(tokens.chat_template).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert written == f"{token}user\nHi/{token}\n{token}assistant\n"


def test_roles_begin_with_the_beginning_token():
    tokens = ChatMlSpecialTokens(bos_token="[")
    assert (tokens.system, tokens.user, tokens.assistant) == ("[system", "[user", "[assistant")
    assert (tokens.eos_token, tokens.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_a_subclass_can_write_another_assistant():
    @dataclass
    class Model(ChatMlSpecialTokens):
        @property
        def assistant(self) -> str:
            return f"{self.bos_token}model"

    template = jinja2.Template(Model().chat_template)
    assert template.render(messages=[], add_generation_prompt=True) == "<|im_start|>model\n"


def test_the_format_is_known_by_name():
    assert FORMAT_MAPPING["chatml"] is ChatMlSpecialTokens
