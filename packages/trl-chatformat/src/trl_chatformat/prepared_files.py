"""Setting up a tokenizer's folder for a chat format, file to file."""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from trl_chatformat.setup_format import setup_chat_format
from trl_chatformat.tokenizer_files import ChatTokenizer


def prepare_tokenizer_files(
    source_dir: str | PathLike[str],
    out_dir: str | PathLike[str],
    format: str = "chatml",
    legacy: bool = False,
    *,
    pad_token: str | None = None,
    reuse_reserved: bool | Sequence[str] = False,
) -> list[int]:
    """Writes a tokenizer's folder anew, set up for a chat format, without torch or transformers.

    The new folder holds the tokenizer alone and loads in transformers 4.51 and 5 with the same
    ids. It appears whole or not at all. Templates of the source are replaced by the format's; the
    source itself stays as it is.

    Args:
        source_dir: A folder with a saved fast tokenizer.
        out_dir: The folder to write, which must not exist.
        format: A key of `FORMAT_MAPPING`.
        legacy: Whether readers before tokenizers 0.20 (transformers 4.45) shall load it too.
        pad_token: As for `setup_chat_format`.
        reuse_reserved: As for `setup_chat_format`.

    Returns:
        The ids of the tokens that the tokenizer lacked.

    Raises:
        FileExistsError: `out_dir` exists.
        FileNotFoundError: The source has no tokenizer.json.
        ValueError: A file of the source isn't what its name says, `setup_chat_format` refuses, or
            the legacy form can't hold this tokenizer.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import WordLevel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ChatTokenizer(Tokenizer(WordLevel({"hi": 0}))).save_pretrained(f"{folder}/base")
        ...     prepare_tokenizer_files(f"{folder}/base", f"{folder}/chat")
        [1, 2]
    """
    out = Path(out_dir)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already: name a folder that doesn't.")
    tokenizer = ChatTokenizer.from_directory(source_dir)
    tokenizer.chat_template = None
    _, _, added_ids = setup_chat_format(
        None,
        tokenizer,
        format,
        pad_token=pad_token,
        reuse_reserved=reuse_reserved,
        return_added_ids=True,
    )
    tokenizer.save_pretrained(out, legacy)
    return added_ids
