"""Saving a language model with a value head, into a folder and to the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file

from trl_valuehead.checkpoints import (
    ADAPTER_CONFIG,
    BASE_PREFIX,
    HEAD_FILE,
    HEAD_PREFIX,
    WEIGHTS_FILE,
    with_variant,
)
from trl_valuehead.facade import ModelFacade
from trl_valuehead.sharding import has_shards, holds_fsdp1, is_partitioned


class Saving(ModelFacade):
    """`save_pretrained` and `push_to_hub`."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save model and head so that `from_pretrained` loads both, as safetensors only.

        A plain model's head lies in the model's own files. Beside an adapter or a quantized model
        it has a file of its own, `v_head.safetensors`.

        Args:
            save_directory: A folder; it is made if need be.
            state_dict: The whole model's weights. Needed for a model that is sharded by ZeRO-3 or
                FSDP: `accelerator.get_state_dict(model)`, called on every rank.
            is_main_process: Whether this rank writes. The others return at once.
            **kwargs: Handed to the language model's `save_pretrained`.

        Raises:
            TypeError: The language model's `save_pretrained` doesn't know a keyword.
            ValueError: A pickle or an upload is asked for, weights or the head are missing in
                `state_dict`, the folder holds an adapter and the model is plain, or an adapter's
                model lies in FSDP1.
        """
        base = self.pretrained_model
        # What is always so here may be said, also where transformers no longer takes it.
        if not kwargs.pop("safe_serialization", True):
            raise ValueError(
                "Weights are saved as safetensors only: drop safe_serialization=False."
            )
        if kwargs.pop("push_to_hub", False):
            raise ValueError("Call push_to_hub(repo_id): save_pretrained doesn't upload the head.")
        unknown = sorted(kwargs.keys() - signature(base.save_pretrained).parameters.keys())
        if unknown:
            raise TypeError(
                f"save_pretrained of {type(base).__name__} has no keyword {', '.join(unknown)}."
            )
        if not is_main_process:
            return
        folder = os.fspath(save_directory)
        state = dict(self.state_dict() if state_dict is None else state_dict)
        if has_shards(state) or (state_dict is None and is_partitioned(self)):
            raise ValueError(
                "This rank holds only pieces of the weights: pass "
                "state_dict=accelerator.get_state_dict(model), called on every rank."
            )
        state = {key.removeprefix(BASE_PREFIX): value for key, value in state.items()}
        names = [HEAD_PREFIX + name for name in self.v_head.state_dict()]
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"state_dict lacks {', '.join(missing)}: pass the whole model's, as "
                "accelerator.get_state_dict(model) returns it."
            )
        if self.is_peft_model and holds_fsdp1(base):
            raise ValueError(
                "PEFT looks for an adapter's weights under its modules' names, which FSDP1 "
                "changes: load the state_dict into an unwrapped model, and save that."
            )
        own_file = self._head_needs_own_file()
        if not own_file and os.path.exists(os.path.join(folder, ADAPTER_CONFIG)):
            raise ValueError(
                f"{folder} holds an adapter, which would be loaded in place of this model: save it "
                f"elsewhere, or remove {ADAPTER_CONFIG}."
            )
        head = {name: state.pop(name) for name in names}
        state = {key: value for key, value in state.items() if not key.startswith("score.")}

        if own_file:
            if state_dict is not None:
                kwargs["state_dict"] = state
            base.save_pretrained(folder, **kwargs)
            tensors = {key: value.detach().cpu().contiguous() for key, value in head.items()}
            save_file(tensors, os.path.join(folder, HEAD_FILE), metadata={"format": "pt"})
            return
        # What an earlier save left would be loaded first: transformers removes old shards, but not
        # a whole file when it writes shards.
        weights = Path(folder, with_variant(WEIGHTS_FILE, kwargs.get("variant")))
        before = weights.stat() if weights.exists() else None
        base.save_pretrained(folder, state_dict=state | head, **kwargs)
        if before is not None and weights.stat() == before:
            weights.unlink()
        Path(folder, HEAD_FILE).unlink(missing_ok=True)

    def _head_needs_own_file(self) -> bool:
        # PEFT's save picks the adapter's weights, and transformers' replaces the state dict of a
        # quantized model: neither would write the head.
        return (
            self.is_peft_model
            or bool(getattr(self.pretrained_model, "peft_config", None))
            or getattr(self.pretrained_model, "hf_quantizer", None) is not None
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **save_options: Any,
    ) -> str:
        """Upload what `save_pretrained` writes; the model stays as it is.

        Args:
            repo_id: The repository's id; it is created if need be.
            commit_message: For the commit.
            commit_description: For the commit.
            private: Whether a new repository is private.
            token: For the hub.
            revision: The branch to commit to.
            create_pr: Whether to open a pull request instead.
            **save_options: Handed to `save_pretrained`.

        Returns:
            The commit's address.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, **save_options)
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )
