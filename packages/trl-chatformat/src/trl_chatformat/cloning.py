"""Taking over a chat template, with its tokens, from another tokenizer."""

import copy
import logging
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

from tokenizers import AddedToken

from trl_chatformat.embeddings import check_model
from trl_chatformat.setup_format import (
    check_multiple,
    check_tokenizer,
    equip_tokenizer,
    find_added_ids,
    set_up_model,
)
from trl_chatformat.tokenizer_files import ChatTokenizer

ModelT = TypeVar("ModelT")
TokenizerT = TypeVar("TokenizerT")

logger = logging.getLogger(__name__)


def clone_chat_template(
    model: ModelT,
    tokenizer: TokenizerT,
    source_tokenizer_path: str | PathLike[str] | Any,
    resize_to_multiple_of: int | None = 64,
) -> tuple[ModelT, TokenizerT, list[int]]:
    """Sets up a model and its tokenizer for another tokenizer's chat template, in place.

    The tokenizer gets the source's template, those of its added tokens that are missing, with
    their flags, and its bos, eos and pad where it has them; a log line of level INFO says which.
    From then on it adds no beginning token: the template does. Whatever fails, both stay as they
    were.

    Args:
        model: A transformers model, or None to set up the tokenizer alone.
        tokenizer: A transformers tokenizer, fast or slow, or a `ChatTokenizer`; its own template
            is replaced.
        source_tokenizer_path: A folder, a name on the hub, or a tokenizer. A `ChatTokenizer` is
            given folders and tokenizers only.
        resize_to_multiple_of: Rounds the number of embedding rows up to a multiple of this.

    Returns:
        The same model and tokenizer, and the ids of the tokens that the tokenizer lacked.

    Raises:
        ValueError: The source has no chat template, or several and none named "default"; or
            `setup_chat_format` would refuse the model, the tokenizer or the multiple.
        TypeError: The tokenizer or the model is of an unknown kind.

    Example:
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import BPE
        >>> from trl_chatformat import setup_chat_format
        >>> source = ChatTokenizer(Tokenizer(BPE({"x": 0}, [])))
        >>> _, source = setup_chat_format(None, source)
        >>> tokenizer = ChatTokenizer(Tokenizer(BPE({"a": 0, "b": 1}, [])))
        >>> _, tokenizer, added_ids = clone_chat_template(None, tokenizer, source)
        >>> added_ids, tokenizer.eos_token
        ([2, 3], '<|im_end|>')
    """
    check_multiple(resize_to_multiple_of)
    check_tokenizer(tokenizer)
    if model is not None:
        check_model(model)
    source = _load(source_tokenizer_path, tokenizer)
    template = _choose_template(source)
    names = {
        name: str(token)
        for name in ("bos_token", "eos_token", "pad_token")
        if (token := getattr(source, name)) is not None
    }

    ready: Any = copy.deepcopy(tokenizer)
    vocab = ready.get_vocab()
    added = _added_tokens(source).items()
    new = [token for _, token in sorted(added) if token.content not in vocab]
    special = [token.content for token in new if token.special]
    equip_tokenizer(ready, names, [text for text in special if text not in names.values()], new)
    ready.chat_template = template
    added_ids = find_added_ids(tokenizer, ready)
    if model is not None:
        set_up_model(model, tokenizer, ready, resize_to_multiple_of, names=names)
    vars(tokenizer).update(vars(ready))
    logger.info("The chat template's source set %s.", ", ".join(names) or "no bos, eos or pad")
    return model, tokenizer, added_ids


def _load(source: Any, tokenizer: Any) -> Any:
    if hasattr(source, "chat_template"):
        return source
    if isinstance(tokenizer, ChatTokenizer):
        return ChatTokenizer.from_directory(source)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _choose_template(source: Any) -> str:
    template = source.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if template is None:
        raise ValueError(
            "The source tokenizer has no chat template, or none named 'default' among several: "
            "choose another source."
        )
    return template


def _added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    if isinstance(tokenizer, ChatTokenizer):
        return tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return tokenizer.added_tokens_decoder
