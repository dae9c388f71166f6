"""Tokens that a tokenizer puts before every text: a chat template writes its own."""

import json
from typing import Any

from tokenizers import Tokenizer, processors


class UnremovableBeginningToken(ValueError):
    """A tokenizer puts a token before every text, and can't be told not to."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"This tokenizer puts a token before every text ({kind}) and has no switch for it, so "
            "the chat template's own would come second. Load the tokenizer as a fast one whose "
            "post-processor is a TemplateProcessing, or without a post-processor."
        )


def drop_beginning_tokens(backend: Tokenizer) -> bool:
    """Takes what a tokenizer's post-processor puts before a text out of it; ends are kept.

    Args:
        backend: The tokenizer to change.

    Returns:
        Whether there was anything to take out.

    Raises:
        ValueError: The post-processor is of a kind that can't go without.

    Example:
        >>> from tokenizers.models import WordLevel
        >>> tokenizer = Tokenizer(WordLevel({"<s>": 0, "hi": 1}, unk_token="<s>"))
        >>> tokenizer.post_processor = processors.TemplateProcessing(
        ...     single="<s> $A", special_tokens=[("<s>", 0)]
        ... )
        >>> tokenizer.encode("hi").ids
        [0, 1]
        >>> drop_beginning_tokens(tokenizer)
        True
        >>> tokenizer.encode("hi").ids
        [1]
    """
    if backend.post_processor is None:
        return False
    before = json.loads(backend.post_processor.__getstate__())
    after = _without_beginning(before)
    if after == before:
        return False
    sequence = after["type"] == "Sequence"
    replacement = processors.Sequence([]) if sequence else processors.TemplateProcessing()
    replacement.__setstate__(json.dumps(after).encode())
    backend.post_processor = replacement
    return True


def _without_beginning(state: dict[str, Any]) -> dict[str, Any]:
    match state["type"]:
        case "Sequence":
            return state | {"processors": [_without_beginning(s) for s in state["processors"]]}
        case "TemplateProcessing":
            beginning = _beginning(state["single"])
            pieces = {key: _strip(state[key], beginning) for key in ("single", "pair")}
            return state | pieces
        case "BertProcessing" | "RobertaProcessing":
            raise UnremovableBeginningToken(state["type"])
        case _:
            return state


def _beginning(pieces: list[dict[str, Any]]) -> list[str]:
    first_text = next(i for i, piece in enumerate(pieces) if "Sequence" in piece)
    return [piece["SpecialToken"]["id"] for piece in pieces[:first_text]]


def _strip(pieces: list[dict[str, Any]], beginning: list[str]) -> list[dict[str, Any]]:
    # A pair may repeat the beginning before its second text.
    kept: list[dict[str, Any]] = []
    for piece in pieces:
        if "Sequence" in piece and beginning:
            tail = kept[-len(beginning) :]
            if [p.get("SpecialToken", {}).get("id") for p in tail] == beginning:
                del kept[-len(beginning) :]
        kept.append(piece)
    return kept


def drop_slow_beginning_tokens(tokenizer: Any) -> None:
    """Tells a slow transformers tokenizer to put nothing before a text.

    Args:
        tokenizer: A transformers tokenizer written in Python.

    Raises:
        ValueError: It puts a token there all the same.
    """
    if getattr(tokenizer, "add_bos_token", False):
        tokenizer.add_bos_token = False
    text = [-1]  # an id that no token has
    if tokenizer.build_inputs_with_special_tokens(text)[0] != -1:
        raise UnremovableBeginningToken(type(tokenizer).__name__)
