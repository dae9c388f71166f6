"""The chat formats that `setup_chat_format` knows by name."""

from collections.abc import Callable
from typing import Protocol

from trl_chatformat.special_tokens import ChatMlSpecialTokens


class ChatFormat(Protocol):
    """What a chat format tells: its special tokens, and the template that writes them."""

    @property
    def bos_token(self) -> str: ...
    @property
    def eos_token(self) -> str: ...
    @property
    def pad_token(self) -> str: ...
    @property
    def chat_template(self) -> str: ...


FORMAT_MAPPING: dict[str, Callable[[], ChatFormat]] = {"chatml": ChatMlSpecialTokens}


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
