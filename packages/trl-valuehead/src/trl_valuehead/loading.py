"""Loading a language model with a value head, from a checkpoint or around a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from trl_valuehead import adapters
from trl_valuehead.checkpoints import HEAD_PREFIX, Checkpoint
from trl_valuehead.head import check_options
from trl_valuehead.rewards import RewardScoring
from trl_valuehead.sharding import writable

logger = logging.getLogger(__name__)


class Loading(RewardScoring):
    """`from_pretrained` and `post_init`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | nn.Module,
        *model_args: Any,
        peft_config: Any = None,
        reward_adapter: str | None = None,
        reward_adapter_name: str = "reward_adapter",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> Self:
        """A language model with a value head, from a checkpoint or around a model.

        A head in the checkpoint is loaded, whether this package or TRL wrote it; otherwise it is
        initialised, and a log message says so.

        Args:
            pretrained_model_name_or_path: A hub id, a folder, or a model that is loaded already. A
                folder or id with a PEFT adapter loads the adapter's base model too.
            *model_args: Handed to the transformers class.
            peft_config: A `peft.PeftConfig`: adds a new adapter.
            reward_adapter: A hub id or folder of an adapter that was trained as a reward model,
                for `compute_reward_score`. Needs a PEFT model.
            reward_adapter_name: The name that the reward adapter gets.
            is_trainable: Whether an adapter that the checkpoint holds is to be trained.
            **kwargs: The value head's (`summary_dropout_prob`, `v_head_init_strategy`,
                `v_head_initializer_range`), PEFT's for quantized models
                (`use_gradient_checkpointing`, `gradient_checkpointing_kwargs`), and those of the
                transformers class.

        Returns:
            The wrapped model.

        Raises:
            TypeError: The first argument is neither a name nor a language model, or a keyword
                would not be used.
            ValueError: `reward_adapter` or `peft_config` don't fit each other or the model.
            ImportError: PEFT is needed and missing.
            FileNotFoundError: The folder isn't there.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> from trl_valuehead import AutoModelForCausalLMWithValueHead
            >>> base = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
            >>> model = AutoModelForCausalLMWithValueHead.from_pretrained(base)
            >>> logits, loss, value = model(torch.tensor([[1, 2, 3]]))
            >>> logits.shape, value.shape
            (torch.Size([1, 3, 16]), torch.Size([1, 3]))
        """
        head_options = {key: kwargs.pop(key) for key in cls.supported_args if key in kwargs}
        check_options(**head_options)
        kbit_options = adapters.take_kbit_options(kwargs) if peft_config is not None else {}
        model: Any = pretrained_model_name_or_path
        checkpoint = None
        if isinstance(model, (str, os.PathLike)):
            checkpoint = Checkpoint.of(os.fspath(model), kwargs)
            has_adapter = checkpoint.has_adapter()
        else:
            cls.check(model)
            has_adapter = adapters.is_peft_model(model)
            if model_args or kwargs:
                raise TypeError(
                    f"{', '.join(map(str, [*model_args, *kwargs]))} would not be used: the model "
                    "is loaded already."
                )
        if peft_config is not None:
            adapters.check_peft_config(peft_config, has_adapter)
        if reward_adapter is not None:
            will_be_peft_model = has_adapter or peft_config is not None
            cls.check_reward_adapter(reward_adapter, will_be_peft_model, kwargs.get("token"))

        if checkpoint is not None:
            model = cls._load(checkpoint, model_args, kwargs, is_trainable)
        if peft_config is not None:
            model = adapters.add_adapter(model, peft_config, kbit_options)
        reward_options: dict[str, Any] = {}
        if reward_adapter is not None:
            score = cls.add_and_load_reward_modeling_adapter(
                model, reward_adapter, reward_adapter_name, kwargs.get("token")
            )
            reward_options = {
                "score_module": score,
                "supports_rm_adapter": True,
                "rm_adapter_name": reward_adapter_name,
            }
        wrapper = cls(model, **reward_options, **head_options)
        if checkpoint is not None:
            state_dict = checkpoint.head_state()
            if not state_dict:
                logger.warning(
                    "%s holds no value head: v_head is newly initialised, as it should be unless "
                    "training is being resumed.",
                    checkpoint.name,
                )
            wrapper.post_init(state_dict)
        return wrapper

    @classmethod
    def _load(
        cls,
        checkpoint: Checkpoint,
        model_args: tuple[Any, ...],
        options: dict[str, Any],
        is_trainable: bool,
    ) -> nn.Module:
        parent_class = cls.transformers_parent_class
        if checkpoint.has_adapter():
            return adapters.load_adapter_checkpoint(
                checkpoint, parent_class, model_args, options, is_trainable
            )
        if checkpoint.has_wrapper_prefix():
            return checkpoint.load_prefixed(parent_class, model_args, options)
        return parent_class.from_pretrained(checkpoint.name, *model_args, **options)

    def post_init(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the head's weights, those with `v_head.` in their name; no other is looked at.

        Args:
            state_dict: A checkpoint's weights. Collective if the head is a ZeRO-3 parameter:
                every rank calls it, and rank 0's weights are taken.

        Raises:
            RuntimeError: A weight of the head is missing or has another shape.
        """
        head = {
            key.rpartition(HEAD_PREFIX)[2]: value
            for key, value in state_dict.items()
            if HEAD_PREFIX in key
        }
        if head:
            with writable(self.v_head.parameters()):
                self.v_head.load_state_dict(head)
