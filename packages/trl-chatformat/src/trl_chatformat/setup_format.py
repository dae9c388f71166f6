"""Setting up a tokenizer, and the model that goes with it, for a chat format."""

import copy
from typing import Any, TypeVar

from trl_chatformat.beginning_tokens import drop_beginning_tokens, drop_slow_beginning_tokens
from trl_chatformat.embeddings import check_model, grow_embeddings
from trl_chatformat.formats import ChatFormat, get_format
from trl_chatformat.rollback import ModelSnapshot
from trl_chatformat.tokenizer_files import ChatTokenizer
from trl_chatformat.vocabulary import add_special_tokens, get_highest_id, reserve_slow_ids

ModelT = TypeVar("ModelT")
TokenizerT = TypeVar("TokenizerT")


def setup_chat_format(
    model: ModelT,
    tokenizer: TokenizerT,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[ModelT, TokenizerT]:
    """Sets up a base model and its tokenizer for a chat format, in place.

    The tokenizer gets the format's special tokens beside those it has, and its template, which
    from then on writes the beginning tokens: the tokenizer no longer adds one. The model gets
    rows for the new tokens and the ids of pad, bos and eos. Whatever fails, both stay as they
    were.

    Args:
        model: A transformers model, or None to set up the tokenizer alone, which needs no torch.
        tokenizer: A transformers tokenizer, fast or slow, or a `ChatTokenizer`.
        format: A key of `FORMAT_MAPPING`.
        resize_to_multiple_of: Rounds the number of embedding rows up to a multiple of this.

    Returns:
        The same model and tokenizer.

    Raises:
        ValueError: The tokenizer has a chat template already; there is no such format;
            `resize_to_multiple_of` isn't a positive int; the model has PEFT adapters, embeddings
            that are sharded, quantized or not loaded, or separate ones for encoder and decoder;
            the tokenizer puts a token before every text and has no switch for it.
        TypeError: The tokenizer or the model is of an unknown kind.

    Example:
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import BPE
        >>> tokenizer = ChatTokenizer(Tokenizer(BPE({"a": 0, "b": 1}, [])))
        >>> _, tokenizer = setup_chat_format(None, tokenizer)
        >>> tokenizer.bos_token, tokenizer.eos_token_id, len(tokenizer)
        ('<|im_start|>', 3, 4)
        >>> tokenizer.encode("<|im_start|>ab<|im_end|>")
        [2, 0, 1, 3]
    """
    _check_multiple(resize_to_multiple_of)
    if not hasattr(tokenizer, "chat_template"):
        raise TypeError(
            f"{type(tokenizer).__name__} has no `chat_template`: pass a transformers tokenizer or "
            "a ChatTokenizer."
        )
    if tokenizer.chat_template is not None:
        raise ValueError(
            "The tokenizer has a chat template already. Set `tokenizer.chat_template = None` to "
            "overwrite it."
        )
    chat_format = get_format(format)
    if model is not None:
        check_model(model)

    ready: Any = copy.deepcopy(tokenizer)
    _set_up_tokenizer(ready, chat_format)
    if model is not None:
        _set_up_model(model, tokenizer, ready, resize_to_multiple_of)
    vars(tokenizer).update(vars(ready))
    return model, tokenizer


def _check_multiple(multiple: Any) -> None:
    is_int = isinstance(multiple, int) and not isinstance(multiple, bool)
    if multiple is not None and not (is_int and multiple > 0):
        raise ValueError(
            f"resize_to_multiple_of={multiple!r}: a positive int was expected, or None to keep the "
            "number of rows that is needed."
        )


def _set_up_tokenizer(tokenizer: Any, chat_format: ChatFormat) -> None:
    bos, eos, pad = chat_format.bos_token, chat_format.eos_token, chat_format.pad_token
    if isinstance(tokenizer, ChatTokenizer):
        dropped = drop_beginning_tokens(tokenizer.backend_tokenizer)
        if dropped or tokenizer.config.get("add_bos_token"):
            # Some classes of transformers 4 go by this instead of the post-processor.
            tokenizer.config["add_bos_token"] = False
        tokenizer.add_special_tokens([bos, eos, pad])
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = bos, eos, pad
    else:
        if tokenizer.is_fast:
            add_special_tokens(tokenizer.backend_tokenizer, [bos, eos, pad])
        else:
            reserve_slow_ids(tokenizer, [bos, eos, pad])
        # As they are, where they are: transformers would give a text default flags.
        known = {t.content: t for t in tokenizer.added_tokens_decoder.values() if t.special}
        first, last, fill = (known.get(token, token) for token in (bos, eos, pad))
        names = {"bos_token": first, "eos_token": last, "pad_token": fill}
        # The second argument says to keep the other ones; 4 and 5 call it by different names.
        tokenizer.add_special_tokens(names | {"additional_special_tokens": [first, last]}, False)
        _stop_beginning_token(tokenizer)
    tokenizer.chat_template = chat_format.chat_template


def _stop_beginning_token(tokenizer: Any) -> None:
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        drop_beginning_tokens(backend)
        kept = backend.post_processor
        if getattr(tokenizer, "add_bos_token", False):
            tokenizer.add_bos_token = False  # builds a post-processor of its own
            backend.post_processor = kept
    else:
        drop_slow_beginning_tokens(tokenizer)
    if "add_bos_token" in tokenizer.init_kwargs:
        tokenizer.init_kwargs["add_bos_token"] = False


def _set_up_model(model: Any, old: Any, new: Any, multiple: int | None) -> None:
    before, after = get_highest_id(old), get_highest_id(new)
    undo = ModelSnapshot(model)
    try:
        for name in ("config", "generation_config"):
            config = getattr(model, name, None)
            if config is not None:
                config.pad_token_id = new.pad_token_id
                config.bos_token_id = new.bos_token_id
                config.eos_token_id = new.eos_token_id
        grow_embeddings(model, after, range(before + 1, after + 1), multiple, undo)
    except BaseException:
        undo.restore()
        raise
