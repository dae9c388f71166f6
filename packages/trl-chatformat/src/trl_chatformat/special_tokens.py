"""The special tokens of a chat format, and the template that writes them."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@cache
def read_template(name: str) -> str:
    """Reads a template of this package.

    Args:
        name: The file's name.

    Returns:
        Its text.
    """
    return files("trl_chatformat").joinpath("templates", name).read_text(encoding="utf-8")


def _jinja_string(text: str) -> str:
    # Jinja reads the escapes of its string literals as JSON writes them.
    return json.dumps(text, ensure_ascii=False)


@dataclass
class ChatMlSpecialTokens:
    """The special tokens of ChatML, and the chat template that writes them.

    Args:
        bos_token: Opens every turn.
        eos_token: Ends every turn.
        pad_token: Fills up batches; the same as `eos_token` unless given.

    Example:
        >>> tokens = ChatMlSpecialTokens()
        >>> tokens.user
        '<|im_start|>user'
        >>> import jinja2
        >>> template = jinja2.Template(tokens.chat_template)
        >>> template.render(messages=[{"role": "user", "content": "Hi"}])
        '<|im_start|>user\\nHi<|im_end|>\\n'
    """

    bos_token: str = "<|im_start|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|im_end|>"

    @property
    def system(self) -> str:
        """How a system turn begins."""
        return f"{self.bos_token}system"

    @property
    def user(self) -> str:
        """How a user turn begins."""
        return f"{self.bos_token}user"

    @property
    def assistant(self) -> str:
        """How an assistant turn begins."""
        return f"{self.bos_token}assistant"

    @property
    def chat_template(self) -> str:
        """A Jinja template of `messages`, with or without `add_generation_prompt`.

        `content` may be text, a list of text parts, or None, which is empty text. Tools, tool
        calls, documents and other parts can't be written in ChatML, and raise.
        """
        names = {
            "turn_start": self.bos_token,
            "turn_end": self.eos_token,
            "generation_prompt": f"{self.assistant}\n",
        }
        settings = [f"{{%- set {name} = {_jinja_string(text)} -%}}" for name, text in names.items()]
        return "\n".join([*settings, read_template("chatml.jinja")])
