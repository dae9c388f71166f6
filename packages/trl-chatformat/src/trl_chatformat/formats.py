"""The chat formats that `setup_chat_format` knows by name."""

from collections.abc import Callable
from typing import Protocol

from trl_chatformat.special_tokens import ChatMlSpecialTokens
from trl_chatformat.turn_formats import (
    GemmaSpecialTokens,
    Llama3SpecialTokens,
    Phi4SpecialTokens,
    Qwen3SpecialTokens,
    ZephyrSpecialTokens,
)


class ChatFormat(Protocol):
    """What a chat format tells: its special tokens, and the template that writes them.

    It may have `other_tokens` too: texts of special tokens besides those three.
    """

    @property
    def bos_token(self) -> str: ...
    @property
    def eos_token(self) -> str: ...
    @property
    def pad_token(self) -> str: ...
    @property
    def chat_template(self) -> str: ...


FORMAT_MAPPING: dict[str, Callable[[], ChatFormat]] = {
    "chatml": ChatMlSpecialTokens,
    "gemma": GemmaSpecialTokens,
    "llama3": Llama3SpecialTokens,
    "phi4": Phi4SpecialTokens,
    "qwen3": Qwen3SpecialTokens,
    "zephyr": ZephyrSpecialTokens,
}


def register_format(name: str, make: Callable[[], ChatFormat]) -> None:
    """Gives a chat format of one's own a name that `setup_chat_format` knows.

    Args:
        name: The name, which no format has yet.
        make: Makes the format: a class or a function, called without arguments.

    Raises:
        ValueError: The name is taken or no text, or the format lacks one of `bos_token`,
            `eos_token`, `pad_token` and `chat_template`, which must be texts.

    Example:
        >>> register_format("chatml-padded", lambda: ChatMlSpecialTokens(pad_token="<|pad|>"))
        >>> get_format("chatml-padded").pad_token
        '<|pad|>'
        >>> del FORMAT_MAPPING["chatml-padded"]
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a text was expected.")
    if name in FORMAT_MAPPING:
        raise ValueError(f"There is a chat format {name!r} already: choose another name.")
    made = make()
    for part in ("bos_token", "eos_token", "pad_token", "chat_template"):
        value = getattr(made, part, None)
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"The format {name!r} has {value!r} as its `{part}`: a text was expected."
            )
    FORMAT_MAPPING[name] = make


def get_format(name: str) -> ChatFormat:
    """Makes the format of this name.

    Args:
        name: A key of `FORMAT_MAPPING`.

    Returns:
        A new instance of the format.

    Raises:
        ValueError: No format has this name.

    Example:
        >>> get_format("chatml").eos_token
        '<|im_end|>'
    """
    if name not in FORMAT_MAPPING:
        known = ", ".join(sorted(FORMAT_MAPPING))
        raise ValueError(f"There is no chat format {name!r}: choose one of {known}.")
    return FORMAT_MAPPING[name]()
