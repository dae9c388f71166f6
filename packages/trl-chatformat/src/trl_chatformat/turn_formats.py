"""Formats of well-known models: turns that begin with a role and end with a token."""

import json
from dataclasses import dataclass
from typing import ClassVar

from trl_chatformat.special_tokens import read_template


@dataclass
class _TurnFormat:
    bos_token: str
    eos_token: str
    pad_token: str

    # Special tokens that the template writes besides those three.
    other_tokens: ClassVar[tuple[str, ...]] = ()
    before_role: ClassVar[str]
    after_role: ClassVar[str]
    after_turn: ClassVar[str] = ""
    writes_bos: ClassVar[bool] = False
    roles: ClassVar[dict[str, str]] = {}
    trimmed: ClassVar[bool] = False
    alternating: ClassVar[bool] = False
    thinking: ClassVar[bool] = False

    @property
    def chat_template(self) -> str:
        """A Jinja template of `messages`, with the assistant's turns marked for masks."""
        settings = {
            "beginning": self.bos_token if self.writes_bos else "",
            "turn_end": self.eos_token,
            "before_role": self.before_role,
            "after_role": self.after_role,
            "after_turn": self.after_turn,
            "roles": self.roles,
            "trimmed": self.trimmed,
            "alternating": self.alternating,
            "thinking": self.thinking,
        }
        # Jinja reads such literals as JSON writes them.
        lines = [
            f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}"
            for name, value in settings.items()
        ]
        return "\n".join([*lines, read_template("turns.jinja")])


@dataclass
class Llama3SpecialTokens(_TurnFormat):
    """The special tokens of Llama 3, and a chat template that writes them.

    Args:
        bos_token: Opens the conversation.
        eos_token: Ends every turn.
        pad_token: Fills up batches.

    Example:
        >>> Llama3SpecialTokens().other_tokens
        ('<|start_header_id|>', '<|end_header_id|>')
    """

    bos_token: str = "<|begin_of_text|>"
    eos_token: str = "<|eot_id|>"
    pad_token: str = "<|finetune_right_pad_id|>"
    other_tokens = ("<|start_header_id|>", "<|end_header_id|>")
    before_role = "<|start_header_id|>"
    after_role = "<|end_header_id|>\n\n"
    writes_bos = True
    trimmed = True


@dataclass
class GemmaSpecialTokens(_TurnFormat):
    """The special tokens of Gemma, and a chat template that writes them.

    The assistant is called "model"; there is no system message.

    Args:
        bos_token: Opens the conversation.
        eos_token: Ends every turn.
        pad_token: Fills up batches.

    Example:
        >>> GemmaSpecialTokens().eos_token
        '<end_of_turn>'
    """

    bos_token: str = "<bos>"
    eos_token: str = "<end_of_turn>"
    pad_token: str = "<pad>"
    other_tokens = ("<start_of_turn>",)
    before_role = "<start_of_turn>"
    after_role = "\n"
    after_turn = "\n"
    roles: ClassVar[dict[str, str]] = {"assistant": "model"}
    writes_bos = True
    trimmed = True
    alternating = True


@dataclass
class Qwen3SpecialTokens(_TurnFormat):
    """The special tokens of Qwen 3, and a chat template that writes them.

    Of the turns after the last user's, thoughts are written, from `reasoning_content` or from
    between `<think>` and `</think>`; of earlier ones they are left out.

    Args:
        bos_token: Opens every turn.
        eos_token: Ends every turn.
        pad_token: Fills up batches.

    Example:
        >>> Qwen3SpecialTokens().pad_token
        '<|endoftext|>'
    """

    bos_token: str = "<|im_start|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|endoftext|>"
    before_role = "<|im_start|>"
    after_role = "\n"
    after_turn = "\n"
    thinking = True


@dataclass
class Phi4SpecialTokens(_TurnFormat):
    """The special tokens of Phi 4, and a chat template that writes them.

    Args:
        bos_token: Named by the tokenizer; the template doesn't write it.
        eos_token: Ends every turn.
        pad_token: Fills up batches.

    Example:
        >>> Phi4SpecialTokens().other_tokens
        ('<|im_start|>', '<|im_sep|>')
    """

    bos_token: str = "<|endoftext|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|dummy_85|>"
    other_tokens = ("<|im_start|>", "<|im_sep|>")
    before_role = "<|im_start|>"
    after_role = "<|im_sep|>"


@dataclass
class ZephyrSpecialTokens(_TurnFormat):
    """The special tokens of Zephyr, and a chat template that writes them.

    What opens a turn, such as `<|user|>`, is text and no token.

    Args:
        bos_token: Named by the tokenizer; the template doesn't write it.
        eos_token: Ends every turn.
        pad_token: Fills up batches; the same as `eos_token` unless given.

    Example:
        >>> ZephyrSpecialTokens().pad_token
        '</s>'
    """

    bos_token: str = "<s>"
    eos_token: str = "</s>"
    pad_token: str = "</s>"
    before_role = "<|"
    after_role = "|>\n"
    after_turn = "\n"
