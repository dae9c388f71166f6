"""A tokenizer of files alone: tokenizer.json, its config and chat template."""

import json
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from trl_chatformat.vocabulary import add_special_tokens
from trl_chatformat.writing import write_together

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

# In the order in which transformers adds the ones that a vocabulary lacks.
NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class _NamedToken:
    """A special token that the config names: its text, or None."""

    def __init__(self, name: str) -> None:
        self.key = f"{name}_token"

    def __get__(self, tokenizer: "ChatTokenizer", owner: type) -> str | None:
        return _text(tokenizer.config.get(self.key))

    def __set__(self, tokenizer: "ChatTokenizer", token: str | None) -> None:
        if token != _text(tokenizer.config.get(self.key)):
            tokenizer.config[self.key] = token


class _NamedTokenId:
    """The id of a special token that the config names, or None."""

    def __init__(self, name: str) -> None:
        self.key = f"{name}_token"

    def __get__(self, tokenizer: "ChatTokenizer", owner: type) -> int | None:
        token = _text(tokenizer.config.get(self.key))
        return None if token is None else tokenizer.backend_tokenizer.token_to_id(token)


class ChatTokenizer:
    """A tokenizer with its special tokens and chat template, without transformers.

    `bos_token`, `eos_token`, `pad_token` and `unk_token` are texts or None, and can be set; their
    ids are `bos_token_id` and so on. Texts are encoded whole: padding and truncation that the
    tokenizer has turned on are off, as in transformers until asked for, and kept for saving.

    Args:
        backend_tokenizer: The tokenizer itself.
        config: What tokenizer_config.json holds; unknown entries are kept.
        chat_template: A Jinja template, several by name, or None.

    Example:
        >>> from tokenizers.models import WordLevel
        >>> backend = Tokenizer(WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
        >>> tokenizer = ChatTokenizer(backend, {"unk_token": "<unk>"})
        >>> tokenizer.encode("hello"), tokenizer.unk_token_id, len(tokenizer)
        ([1], 0, 2)
    """

    bos_token = _NamedToken("bos")
    eos_token = _NamedToken("eos")
    pad_token = _NamedToken("pad")
    unk_token = _NamedToken("unk")
    bos_token_id = _NamedTokenId("bos")
    eos_token_id = _NamedTokenId("eos")
    pad_token_id = _NamedTokenId("pad")
    unk_token_id = _NamedTokenId("unk")

    def __init__(
        self,
        backend_tokenizer: Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        self.backend_tokenizer = backend_tokenizer
        self.config = dict(config or {})
        self.chat_template = chat_template
        self._padding = backend_tokenizer.padding
        self._truncation = backend_tokenizer.truncation
        backend_tokenizer.no_padding()
        backend_tokenizer.no_truncation()
        # transformers 5 calls the list "extra_special_tokens", which in 4 is a mapping of names.
        if isinstance(self.config.get("extra_special_tokens"), list):
            extra = self.config.pop("extra_special_tokens")
            listed = self.config.get("additional_special_tokens") or []
            self.config["additional_special_tokens"] = [*listed, *extra]

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "ChatTokenizer":
        """Reads a folder that transformers 4 or 5, or `save_pretrained`, wrote.

        Args:
            path: The folder; tokenizer.json is needed, the other files are read where they exist.

        Returns:
            The tokenizer.

        Raises:
            FileNotFoundError: The folder has no tokenizer.json.
            ValueError: A file isn't what its name says.

        Example:
            >>> import tempfile
            >>> from tokenizers.models import WordLevel
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ChatTokenizer(Tokenizer(WordLevel({"hi": 0}))).save_pretrained(folder)
            ...     ChatTokenizer.from_directory(folder).encode("hi")
            [0]
        """
        folder = Path(path)
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no {TOKENIZER_FILE}: give a folder with a saved fast tokenizer."
            )
        try:
            backend = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer that can be read: {error}") from error
        config = _read_object(folder / CONFIG_FILE)
        template = config.pop("chat_template", None)
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if "added_tokens_decoder" not in config:
            # As transformers does, which tells texts and tokens apart by their type elsewhere.
            config.update(_mark_tokens(_read_object(folder / SPECIAL_TOKENS_FILE)))
        tokenizer = cls(backend, config, _read_templates(folder) or template)
        tokenizer._add_missing_tokens()
        return tokenizer

    def save_pretrained(self, path: str | PathLike[str], legacy: bool = False) -> None:
        """Writes a folder that transformers 4.51 and 5 load with the same ids.

        The files are written together or, if anything fails, not at all. Templates go into
        tokenizer_config.json, where every version finds them and line ends are kept; files of the
        folder that would override that are taken away.

        Args:
            path: The folder; made if it doesn't exist. Other files in it stay as they are.
            legacy: Write what tokenizers before 0.20 reads too: the merges of a BPE as texts.

        Raises:
            ValueError: With `legacy`, a merge holds a space, which that form can't tell apart.
        """
        added = self.backend_tokenizer.get_added_tokens_decoder()
        decoder = {str(i): token.__getstate__() for i, token in sorted(added.items())}
        config = self.config | {"added_tokens_decoder": decoder}
        # transformers 4 doesn't know the name that 5 gives to a tokenizer of no special class.
        if config.get("tokenizer_class") in (None, "TokenizersBackend"):
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(self.chat_template, dict):
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self.chat_template.items()
            ]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_together(
            Path(path),
            {
                TOKENIZER_FILE: self._serialize_backend(legacy),
                CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
            },
            remove=[TEMPLATE_FILE, TEMPLATE_FOLDER, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE],
        )

    def _add_missing_tokens(self) -> None:
        # A vocabulary may lack tokens that the config lists; transformers adds them in this order.
        backend = self.backend_tokenizer
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        listed = self.config.get("added_tokens_decoder") or {}
        for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
            if token["content"] not in added:
                backend.add_tokens([AddedToken(**token)])
                added.add(token["content"])
        named = [self.config.get(f"{name}_token") for name in NAMED_TOKENS]
        for entry in [*named, *(self.config.get("additional_special_tokens") or [])]:
            token = _text(entry)
            if token is not None and token not in added:
                backend.add_special_tokens([_as_added_token(entry)])
                added.add(token)

    def _serialize_backend(self, legacy: bool) -> str:
        backend = self.backend_tokenizer
        try:
            if self._padding is not None:
                backend.enable_padding(**self._padding)
            if self._truncation is not None:
                backend.enable_truncation(**self._truncation)
            text = backend.to_str(pretty=True)
            return _join_merges(text) if legacy else text
        finally:
            backend.no_padding()
            backend.no_truncation()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def additional_special_tokens(self) -> list[str]:
        """The special tokens besides the named ones."""
        listed = self.config.get("additional_special_tokens") or []
        return [token for entry in listed if (token := _text(entry)) is not None]

    def add_special_tokens(self, tokens: Collection[str]) -> None:
        """Makes tokens special ones, beside those there are; new ones get ids above all others.

        Args:
            tokens: The texts of the tokens.

        Raises:
            ValueError: The vocabulary leaves no way to give a token an id of its own.
        """
        add_special_tokens(self.backend_tokenizer, tokens)
        known = self.additional_special_tokens
        new = [token for token in dict.fromkeys(tokens) if token not in known]
        listed = self.config.get("additional_special_tokens") or []
        self.config["additional_special_tokens"] = [*listed, *new]

    def get_vocab(self) -> dict[str, int]:
        """Lists every token with its id, added ones included."""
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids.

        Args:
            text: The text; special tokens in it become their ids.
            add_special_tokens: Whether the tokenizer adds what it puts before and after a text.

        Returns:
            The ids.
        """
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Turns ids into text.

        Args:
            ids: The ids.
            skip_special_tokens: Whether to leave special tokens out.

        Returns:
            The text, as the tokenizer's decoder gives it.
        """
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _join_merges(serialized: str) -> str:
    state = json.loads(serialized)
    merges = state["model"].get("merges")
    if merges and not isinstance(merges[0], str):
        spaced = next((pair for pair in merges if any(" " in part for part in pair)), None)
        if spaced is not None:
            raise ValueError(
                f"The merge {spaced} holds a space, which the legacy form can't write: leave "
                "`legacy` out."
            )
        state["model"]["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(state, indent=2, ensure_ascii=False)


def _text(token: Any) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _as_added_token(token: Any) -> AddedToken:
    if not isinstance(token, Mapping):
        return AddedToken(token, special=True, normalized=False)
    flags = {key: value for key, value in token.items() if key != "__type"}
    return AddedToken(**flags | {"special": True})


def _mark_tokens(value: Any) -> Any:
    if isinstance(value, list):
        return [_mark_tokens(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "content" in value:
        return value | {"__type": "AddedToken", "special": True}
    return {key: _mark_tokens(item) for key, item in value.items()}


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}: a JSON object was expected.")
    return content


def _read_templates(folder: Path) -> str | dict[str, str] | None:
    found = {"default": folder / TEMPLATE_FILE}
    found |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    # As bytes: reading text would turn every line end into "\n".
    texts = {name: file.read_bytes().decode() for name, file in found.items() if file.is_file()}
    return texts["default"] if list(texts) == ["default"] else texts or None
