"""All trl-* model utilities under one lazy import: a name loads its package at its first use."""

from typing import TYPE_CHECKING

__all__ = [
    "FORMAT_MAPPING",
    "SUPPORTED_ARCHITECTURES",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ChatMlSpecialTokens",
    "ChatTokenizer",
    "ForwardRedirection",
    "PreTrainedModelWrapper",
    "ValueHead",
    "_ForwardRedirection",
    "add_hooks",
    "create_reference_model",
    "disable_gradient_checkpointing",
    "gathered",
    "get_all_parameters",
    "iter_params",
    "prepare_deepspeed",
    "prepare_fsdp",
    "redirect",
    "remove_hooks",
    "setup_chat_format",
    "suspended_hooks",
    "unwrap",
    "unwrap_model_for_generation",
]

# A type checker must not see `__getattr__`: with it, every misspelt name would be an Any.
if TYPE_CHECKING:
    from trl_chatformat import (
        FORMAT_MAPPING,
        ChatMlSpecialTokens,
        ChatTokenizer,
        setup_chat_format,
    )
    from trl_prepare import create_reference_model, prepare_deepspeed, prepare_fsdp
    from trl_redirect import ForwardRedirection, _ForwardRedirection, redirect
    from trl_valuehead import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        PreTrainedModelWrapper,
        ValueHead,
    )
    from trl_zero3 import (
        add_hooks,
        disable_gradient_checkpointing,
        gathered,
        get_all_parameters,
        iter_params,
        remove_hooks,
        suspended_hooks,
        unwrap,
        unwrap_model_for_generation,
    )

    SUPPORTED_ARCHITECTURES = (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
    )
else:
    _PACKAGES = {
        "FORMAT_MAPPING": "trl_chatformat",
        "AutoModelForCausalLMWithValueHead": "trl_valuehead",
        "AutoModelForSeq2SeqLMWithValueHead": "trl_valuehead",
        "ChatMlSpecialTokens": "trl_chatformat",
        "ChatTokenizer": "trl_chatformat",
        "ForwardRedirection": "trl_redirect",
        "PreTrainedModelWrapper": "trl_valuehead",
        "ValueHead": "trl_valuehead",
        "_ForwardRedirection": "trl_redirect",
        "add_hooks": "trl_zero3",
        "create_reference_model": "trl_prepare",
        "disable_gradient_checkpointing": "trl_zero3",
        "gathered": "trl_zero3",
        "get_all_parameters": "trl_zero3",
        "iter_params": "trl_zero3",
        "prepare_deepspeed": "trl_prepare",
        "prepare_fsdp": "trl_prepare",
        "redirect": "trl_redirect",
        "remove_hooks": "trl_zero3",
        "setup_chat_format": "trl_chatformat",
        "suspended_hooks": "trl_zero3",
        "unwrap": "trl_zero3",
        "unwrap_model_for_generation": "trl_zero3",
    }

    def __getattr__(name):  # noqa: ANN001, ANN202
        if name == "SUPPORTED_ARCHITECTURES":
            value = (
                __getattr__("AutoModelForCausalLMWithValueHead"),
                __getattr__("AutoModelForSeq2SeqLMWithValueHead"),
            )
        elif name in _PACKAGES:
            import importlib

            value = getattr(importlib.import_module(_PACKAGES[name]), name)
        else:
            import difflib

            close = difflib.get_close_matches(name, __all__, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
        globals()[name] = value
        return value

    def __dir__():  # noqa: ANN202
        return sorted({*globals(), *__all__})
