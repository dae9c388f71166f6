"""PEFT: adapters on the language model, and a reward model that is an adapter beside them."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trl_valuehead.checkpoints import Checkpoint

_KBIT_OPTIONS = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")


def is_peft_model(model: object) -> bool:
    """Whether `model` is one of PEFT's, without importing PEFT."""
    peft_model = getattr(sys.modules.get("peft"), "PeftModel", None)
    return peft_model is not None and isinstance(model, peft_model)


def import_peft(why: str) -> Any:
    """PEFT, or an ImportError that says what needs it."""
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{why} needs PEFT: pip install 'trl-valuehead[peft]'.") from error
    return peft


def refuse_prompt_learning(config: Any) -> None:
    """Raise for prompt, prefix and p-tuning."""
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{type(config).__name__} is prompt learning: its virtual tokens have hidden states "
            "but no place in the input, so values wouldn't line up with tokens. Use LoRA or "
            "another method that keeps the sequence as it is."
        )


def check_peft_config(config: Any) -> None:
    """Raise unless `config` is a PeftConfig of a kind that a value head can follow."""
    peft = import_peft("peft_config")
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"peft_config must be a peft.PeftConfig, not {type(config).__name__}.")
    refuse_prompt_learning(config)


def take_kbit_options(options: dict[str, Any]) -> dict[str, Any]:
    """Removes PEFT's options for quantized models from `options` and returns them."""
    return {name: options.pop(name) for name in _KBIT_OPTIONS if name in options}


def add_adapter(model: PreTrainedModel, config: Any, kbit_options: dict[str, Any]) -> nn.Module:
    """`model` with a new adapter; a quantized one is prepared for training first."""
    peft = import_peft("peft_config")
    if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
        model = peft.prepare_model_for_kbit_training(model, **kbit_options)
    elif kbit_options:
        raise ValueError(
            f"{', '.join(kbit_options)} is for models that are loaded in 8 or 4 bits; this one is "
            "not. Call gradient_checkpointing_enable() on the result instead."
        )
    return peft.get_peft_model(model, config)


def load_adapter_checkpoint(
    checkpoint: Checkpoint,
    parent_class: Any,
    model_args: tuple[Any, ...],
    options: dict[str, Any],
    is_trainable: bool,
) -> nn.Module:
    """The base model that a saved adapter names, with that adapter."""
    peft = import_peft(f"{checkpoint.name}, a saved adapter,")
    where = checkpoint.hub_options
    config = peft.PeftConfig.from_pretrained(checkpoint.name, **where)
    refuse_prompt_learning(config)
    # Where to look in the adapter's repository says nothing about the base model's.
    options = {key: value for key, value in options.items() if key not in ("subfolder", "revision")}
    if config.revision:
        options["revision"] = config.revision
    base = parent_class.from_pretrained(config.base_model_name_or_path, *model_args, **options)
    return peft.PeftModel.from_pretrained(base, checkpoint.name, is_trainable=is_trainable, **where)


def load_reward_adapter(
    model: Any, adapter: str, name: str, score_names: tuple[str, ...], **hub_options: Any
) -> nn.Linear:
    """Adds the adapter to `model` under `name`, frozen, and returns its frozen score layer."""
    # Read first: a bad adapter leaves the model as it was.
    score = _score_layer(Checkpoint(adapter, **hub_options), score_names)
    model.load_adapter(adapter, name, is_trainable=False, **hub_options)
    return score.to(dtype=model.dtype).requires_grad_(False)


def _score_layer(checkpoint: Checkpoint, score_names: tuple[str, ...]) -> nn.Linear:
    state = {
        key.rpartition(".")[2]: tensor
        for key, tensor in checkpoint.adapter_state().items()
        if set(key.split(".")[:-1]) & set(score_names)
    }
    if "weight" not in state:
        raise ValueError(
            f"{checkpoint.name} holds no score layer ({', '.join(score_names)}): reward_adapter "
            "must be the adapter of a reward model, trained as a sequence classifier."
        )
    labels, hidden = state["weight"].shape
    score = nn.Linear(hidden, labels, bias="bias" in state)
    score.load_state_dict(state)
    return score


@contextmanager
def active_adapter(model: Any, name: str) -> Generator[None]:
    """Another adapter and eval mode for the body; everything that PEFT switches comes back."""
    previous = model.active_adapter
    modes = [(module, module.training) for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.set_adapter(name)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.set_adapter(previous)
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)
