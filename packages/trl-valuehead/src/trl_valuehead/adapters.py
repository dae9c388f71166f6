"""PEFT: adapters on the language model."""

from __future__ import annotations

import sys
from typing import Any

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


def check_peft_config(config: Any, has_adapter: bool) -> None:
    """Raise unless `config` is a PeftConfig of a kind that a value head can follow.

    Args:
        config: What was given as peft_config.
        has_adapter: Whether the model has an adapter already.
    """
    peft = import_peft("peft_config")
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"peft_config must be a peft.PeftConfig, not {type(config).__name__}.")
    refuse_prompt_learning(config)
    if has_adapter:
        raise ValueError(
            "peft_config would add an adapter to a model that has one already. Leave it out, or "
            "merge the adapter first."
        )


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
