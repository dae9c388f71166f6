"""Setting up a tokenizer, and the model that goes with it, for a chat format."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, overload

from tokenizers import AddedToken

from trl_chatformat.beginning_tokens import drop_beginning_tokens, drop_slow_beginning_tokens
from trl_chatformat.embeddings import NewRows, check_model, grow_embeddings
from trl_chatformat.formats import ChatFormat, get_format
from trl_chatformat.reserved_tokens import check_reserved, reuse_reserved_tokens
from trl_chatformat.rollback import ModelSnapshot
from trl_chatformat.tokenizer_files import ChatTokenizer
from trl_chatformat.vocabulary import (
    add_special_tokens,
    add_tokens,
    get_highest_id,
    reserve_slow_ids,
)

ModelT = TypeVar("ModelT")
TokenizerT = TypeVar("TokenizerT")


@overload
def setup_chat_format(
    model: ModelT,
    tokenizer: TokenizerT,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
    *,
    pad_token: str | None = None,
    new_rows: NewRows = "sample",
    reuse_reserved: bool | Sequence[str] = False,
    return_added_ids: Literal[False] = False,
) -> tuple[ModelT, TokenizerT]: ...
@overload
def setup_chat_format(
    model: ModelT,
    tokenizer: TokenizerT,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
    *,
    pad_token: str | None = None,
    new_rows: NewRows = "sample",
    reuse_reserved: bool | Sequence[str] = False,
    return_added_ids: Literal[True],
) -> tuple[ModelT, TokenizerT, list[int]]: ...
def setup_chat_format(
    model: ModelT,
    tokenizer: TokenizerT,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
    *,
    pad_token: str | None = None,
    new_rows: NewRows = "sample",
    reuse_reserved: bool | Sequence[str] = False,
    return_added_ids: bool = False,
) -> tuple[ModelT, TokenizerT] | tuple[ModelT, TokenizerT, list[int]]:
    """Sets up a base model and its tokenizer for a chat format, in place.

    The tokenizer gets the format's special tokens beside those it has, and its template, which
    from then on writes the beginning tokens: the tokenizer no longer adds one. The model gets
    rows for the new tokens and, in its configs, the ids of pad, bos and eos; where a config lists
    several stop ids, the new eos comes first and the others stay. Whatever fails, both stay as
    they were.

    Args:
        model: A transformers model, or None to set up the tokenizer alone, which needs no torch.
            One that `deepspeed.zero.Init` has partitioned must be set up on every process.
        tokenizer: A transformers tokenizer, fast or slow, or a `ChatTokenizer`.
        format: A key of `FORMAT_MAPPING`.
        resize_to_multiple_of: Rounds the number of embedding rows up to a multiple of this.
        pad_token: Another pad token than the format's: its text, or "distinct" for the
            tokenizer's own where that ends or begins nothing, else `<|pad|>`.
        new_rows: "sample" draws each new row from the trained rows' distribution, "mean" gives
            their mean to all.
        reuse_reserved: Whether new tokens take the ids of tokens that the vocabulary keeps in
            reserve, such as `<|reserved_special_token_0|>` or `[unused1]`, which lose their
            names; or a list of such names. Only the tokens beyond those get ids of their own.
        return_added_ids: Whether to return the ids of new tokens as well.

    Returns:
        The same model and tokenizer; with `return_added_ids`, also the ids of the tokens that the
        tokenizer lacked, in order.

    Raises:
        ValueError: The tokenizer has a chat template already; there is no such format;
            `resize_to_multiple_of` isn't a positive int, `pad_token` no text, or `new_rows`
            neither of its two values; a name in `reuse_reserved` is unknown or in use, or True
            finds none; the model has PEFT adapters, embeddings that FSDP or an engine shards, that
            are quantized or not loaded, or separate for encoder and decoder; the tokenizer puts a
            token before every text and has no switch for it.
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
    check_multiple(resize_to_multiple_of)
    if pad_token is not None and (not isinstance(pad_token, str) or not pad_token):
        raise ValueError(f'pad_token={pad_token!r}: a text was expected, "distinct", or None.')
    if new_rows not in get_args(NewRows):
        raise ValueError(f'new_rows={new_rows!r}: "sample" or "mean" was expected.')
    check_reserved(reuse_reserved)
    check_tokenizer(tokenizer)
    given: Any = tokenizer
    if given.chat_template is not None:
        raise ValueError(
            "The tokenizer has a chat template already. Set `tokenizer.chat_template = None` to "
            "overwrite it."
        )
    chat_format = get_format(format)
    if model is not None:
        check_model(model)

    ready: Any = copy.deepcopy(tokenizer)
    pad = _choose_pad(pad_token, tokenizer, chat_format)
    _set_up_tokenizer(ready, chat_format, pad, reuse_reserved)
    added_ids = find_added_ids(given, ready)
    if model is not None:
        set_up_model(model, tokenizer, ready, resize_to_multiple_of, new_rows)
    vars(tokenizer).update(vars(ready))
    if return_added_ids:
        return model, tokenizer, added_ids
    return model, tokenizer


def find_added_ids(before: Any, after: Any) -> list[int]:
    """Lists the ids of the tokens that a tokenizer lacked before it changed, in order."""
    known = before.get_vocab()
    return sorted({i for token, i in after.get_vocab().items() if token not in known})


def _choose_pad(asked: str | None, tokenizer: Any, chat_format: ChatFormat) -> str:
    if asked is None:
        return chat_format.pad_token
    if asked != "distinct":
        return asked
    used = {
        chat_format.bos_token,
        chat_format.eos_token,
        _get_token(tokenizer, "bos_token"),
        _get_token(tokenizer, "eos_token"),
    }
    own = _get_token(tokenizer, "pad_token")
    return "<|pad|>" if own is None or own in used else own


def _get_token(tokenizer: Any, name: str) -> str | None:
    token = getattr(tokenizer, name)
    return None if token is None else str(token)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuses what is no tokenizer with a TypeError."""
    if not hasattr(tokenizer, "chat_template"):
        raise TypeError(
            f"{type(tokenizer).__name__} has no `chat_template`: pass a transformers tokenizer or "
            "a ChatTokenizer."
        )


def check_multiple(multiple: Any) -> None:
    """Refuses what is no number of rows to round up to with a ValueError."""
    is_int = isinstance(multiple, int) and not isinstance(multiple, bool)
    if multiple is not None and not (is_int and multiple > 0):
        raise ValueError(
            f"resize_to_multiple_of={multiple!r}: a positive int was expected, or None to keep the "
            "number of rows that is needed."
        )


def _set_up_tokenizer(
    tokenizer: Any, chat_format: ChatFormat, pad: str, reuse_reserved: bool | Sequence[str]
) -> None:
    names = {
        "bos_token": chat_format.bos_token,
        "eos_token": chat_format.eos_token,
        "pad_token": pad,
    }
    others = getattr(chat_format, "other_tokens", ())
    reuse_reserved_tokens(tokenizer, reuse_reserved, [*names.values(), *others])
    equip_tokenizer(tokenizer, names, others)
    tokenizer.chat_template = chat_format.chat_template


def equip_tokenizer(
    tokenizer: Any,
    names: Mapping[str, str],
    others: Iterable[str] = (),
    new_tokens: Sequence[AddedToken] = (),
) -> None:
    """Gives a tokenizer special tokens, and takes the one away that it puts before texts.

    Args:
        tokenizer: A transformers tokenizer, fast or slow, or a `ChatTokenizer`.
        names: Texts of special tokens by attribute, such as `eos_token`.
        others: Texts of further special tokens.
        new_tokens: Tokens that the tokenizer lacks, with flags that they are added with.
    """
    special = [*names.values(), *others]
    if isinstance(tokenizer, ChatTokenizer):
        dropped = drop_beginning_tokens(tokenizer.backend_tokenizer)
        if dropped or tokenizer.config.get("add_bos_token"):
            # Some classes of transformers 4 go by this instead of the post-processor.
            tokenizer.config["add_bos_token"] = False
        add_tokens(tokenizer.backend_tokenizer, new_tokens)
        tokenizer.add_special_tokens(special)
        for name, token in names.items():
            setattr(tokenizer, name, token)
        return
    if tokenizer.is_fast:
        add_tokens(tokenizer.backend_tokenizer, new_tokens)
        add_special_tokens(tokenizer.backend_tokenizer, special)
    else:
        marked = [AddedToken(token, special=True, normalized=False) for token in special]
        reserve_slow_ids(tokenizer, [*new_tokens, *marked])
    # As they are, where they are: transformers would give a text default flags.
    known = {t.content: t for t in tokenizer.added_tokens_decoder.values() if t.special}
    named = {name: known.get(token, token) for name, token in names.items()}
    texts = [*(text for name, text in names.items() if name != "pad_token"), *others]
    listed = [known.get(token, token) for token in dict.fromkeys(texts)]
    # The second argument says to keep the other ones; 4 and 5 call it by different names.
    tokenizer.add_special_tokens(named | {"additional_special_tokens": listed}, False)
    _stop_beginning_token(tokenizer)


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


def set_up_model(
    model: Any,
    before: Any,
    tokenizer: Any,
    multiple: int | None,
    new_rows: NewRows = "sample",
    names: Collection[str] = ("bos_token", "eos_token", "pad_token"),
) -> None:
    """Gives a model rows for a tokenizer's new ids, and its configs the ids of named tokens.

    Args:
        model: A transformers model that `check_model` accepts.
        before: The tokenizer as it was before it changed.
        tokenizer: The tokenizer as it is now.
        multiple: The number of rows is rounded up to a multiple of this, if given.
        new_rows: How new rows get their values.
        names: Which tokens' ids to set.
    """
    known, after = get_highest_id(before) + 1, get_highest_id(tokenizer) + 1
    new_ids = {*find_added_ids(before, tokenizer), *range(known, after)}
    undo = ModelSnapshot(model)
    try:
        for config in _find_id_configs(model):
            for key in (f"{name}_id" for name in names):
                value = getattr(tokenizer, key)
                if key == "eos_token_id":
                    value = _put_first(value, getattr(config, key, None))
                setattr(config, key, value)
        grow_embeddings(model, known, after, new_ids, multiple, undo, new_rows)
    except BaseException:
        undo.restore()
        raise


def _find_id_configs(model: Any) -> list[Any]:
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    found = [config, text, getattr(model, "generation_config", None)]
    return list({id(item): item for item in found if item is not None}.values())


def _put_first(eos_id: int, stops: Any) -> Any:
    if not isinstance(stops, Sequence):
        return eos_id
    return list(dict.fromkeys([eos_id, *stops]))
