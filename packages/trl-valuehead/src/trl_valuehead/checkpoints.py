"""Where the weights of a model and its value head lie, on disk and on the hub."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    RepositoryNotFoundError,
)
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig

from trl_valuehead import _private_names

WEIGHTS_FILE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
HEAD_FILE = "v_head.safetensors"
HEAD_PREFIX = "v_head."
BASE_PREFIX = "pretrained_model."

_HUB_OPTIONS = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


class Checkpoint:
    """A folder, or a repository on the hub, that a model is loaded from.

    Args:
        name: The folder's path or the repository's id.
        variant: The word between a weight file's name and its ending, as transformers has it.
        **hub_options: Where to look: subfolder, revision, token, cache_dir, local_files_only.

    Raises:
        FileNotFoundError: `name` is a path to a folder that isn't there.
    """

    def __init__(self, name: str, variant: str | None = None, **hub_options: Any) -> None:
        if (os.path.isabs(name) or name.startswith(".")) and not os.path.isdir(name):
            raise FileNotFoundError(f"There is no folder {name}; nor is that an id on the hub.")
        self.name = name
        self.variant = variant
        self.hub_options = hub_options

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint that these options of `from_pretrained` point to."""
        where = {key: options[key] for key in _HUB_OPTIONS if options.get(key) is not None}
        return cls(name, options.get("variant"), **where)

    def find(self, filename: str) -> str | None:
        """A path to the file on this machine, or None if the checkpoint has no such file."""
        if os.path.isdir(self.name):
            path = os.path.join(self.name, self.hub_options.get("subfolder", ""), filename)
            return path if os.path.isfile(path) else None
        try:
            return hf_hub_download(self.name, filename, **self.hub_options)
        except (EntryNotFoundError, RepositoryNotFoundError, HFValidationError):
            return None

    def has_adapter(self) -> bool:
        return self.find(ADAPTER_CONFIG) is not None

    @cached_property
    def _files(self) -> dict[str, str]:
        """For each weight, the name of the file that it is in. Pickles only if nothing else."""
        for name in (WEIGHTS_FILE, "pytorch_model.bin"):
            name = with_variant(name, self.variant)
            if path := self.find(name):
                return dict.fromkeys(_keys(path), name)
            if path := self.find(_index_name(name, self.variant)):
                return json.loads(Path(path).read_text())["weight_map"]
        return {}

    def _read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        by_file = defaultdict(list)
        for key in keys:
            by_file[self._files[key]].append(key)
        state = {}
        for filename, wanted in by_file.items():
            path = self.find(filename)
            if path is None:
                raise FileNotFoundError(
                    f"{self.name} has no {filename}, which its index names for {wanted[0]}."
                )
            state.update(_load(path, wanted))
        return state

    def head_state(self) -> dict[str, torch.Tensor]:
        """The value head's weights under `v_head.`; empty if the checkpoint has none."""
        if path := self.find(HEAD_FILE):
            return _load(path, _keys(path))
        state = self._read(key for key in self._files if HEAD_PREFIX in key)
        return {HEAD_PREFIX + key.rpartition(HEAD_PREFIX)[2]: value for key, value in state.items()}

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """A saved adapter's weights."""
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            if path := self.find(name):
                return _load(path, _keys(path))
        raise ValueError(f"{self.name} holds no adapter: there is no adapter_model.safetensors.")

    def has_wrapper_prefix(self) -> bool:
        """Whether the weights have the names that they bear inside the wrapper."""
        return any(key.startswith(BASE_PREFIX) for key in self._files)

    def load_prefixed(
        self, parent_class: Any, model_args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The language model, from weights that have their names inside the wrapper."""
        state = self._read(key for key in self._files if key.startswith(BASE_PREFIX))
        state = {key.removeprefix(BASE_PREFIX): value for key, value in state.items()}
        options = {k: v for k, v in options.items() if k not in (*_HUB_OPTIONS, "variant")}
        config = options.pop("config", None)
        if config is None:
            config = AutoConfig.from_pretrained(self.name, **self.hub_options)
        # A `key_mapping` would do in neither version: 4.51 guesses the model's own prefix from the
        # names before it maps them, and 5 would map them back when the model is saved.
        # Past the auto class, which loads from names only.
        model_class = getattr(parent_class, _private_names.MODEL_MAPPING)[type(config)]
        model = model_class.from_pretrained(
            None, *model_args, config=config, state_dict=state, **options
        )
        if self.find("generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(
                self.name, **self.hub_options
            )
        return model


def with_variant(name: str, variant: str | None) -> str:
    """The name that transformers gives to a weight file of this variant."""
    stem, _, ending = name.partition(".")
    return f"{stem}.{variant}.{ending}" if variant else name


def _index_name(name: str, variant: str | None) -> str:
    # model.safetensors.index.json, model.safetensors.index.VARIANT.json: as transformers has it.
    stem, ending = name.split(".")[0], name.split(".")[-1]
    return f"{stem}.{ending}.index{f'.{variant}' if variant else ''}.json"


def _keys(path: str) -> list[str]:
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(_unpickle(path))


def _load(path: str, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}
    state = _unpickle(path)
    return {key: state[key] for key in keys}


def _unpickle(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)
