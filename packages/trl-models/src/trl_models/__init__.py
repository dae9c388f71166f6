"""All trl-* model utilities under one lazy import: a name loads its package at its first use."""

from typing import TYPE_CHECKING

__all__ = [
    "FORMAT_MAPPING",
    "SUPPORTED_ARCHITECTURES",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ChatMlSpecialTokens",
    "ChatTokenizer",
    "EncodedChat",
    "ForwardRedirection",
    "GatherCost",
    "GatherWontFit",
    "PreTrainedModelWrapper",
    "RenderedChat",
    "ValueHead",
    "_ForwardRedirection",
    "add_hooks",
    "add_reference_adapter",
    "clone_chat_template",
    "collate_chats",
    "create_reference_model",
    "disable_gradient_checkpointing",
    "encode_chat",
    "encode_chats",
    "encode_completions",
    "extend_chat",
    "gather_cost",
    "gathered",
    "get_all_parameters",
    "inference_config",
    "is_prefix_stable",
    "iter_params",
    "prepare_deepspeed",
    "prepare_fsdp",
    "prepare_reference_model",
    "prepare_tokenizer_files",
    "redirect",
    "reference_context",
    "reference_logprobs",
    "register_format",
    "remove_hooks",
    "render_chat",
    "setup_chat_format",
    "suspended_hooks",
    "sync_reference_model",
    "trainable_token_settings",
    "unwrap",
    "unwrap_model_for_generation",
]

# A type checker must not see `__getattr__`: with it, every misspelt name would be an Any.
if TYPE_CHECKING:
    from trl_chatformat import (
        FORMAT_MAPPING,
        ChatMlSpecialTokens,
        ChatTokenizer,
        EncodedChat,
        RenderedChat,
        clone_chat_template,
        collate_chats,
        encode_chat,
        encode_chats,
        encode_completions,
        extend_chat,
        is_prefix_stable,
        prepare_tokenizer_files,
        register_format,
        render_chat,
        setup_chat_format,
        trainable_token_settings,
    )
    from trl_prepare import (
        add_reference_adapter,
        create_reference_model,
        inference_config,
        prepare_deepspeed,
        prepare_fsdp,
        prepare_reference_model,
        reference_context,
        reference_logprobs,
        sync_reference_model,
    )
    from trl_redirect import ForwardRedirection, _ForwardRedirection, redirect
    from trl_valuehead import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        PreTrainedModelWrapper,
        ValueHead,
    )
    from trl_zero3 import (
        GatherCost,
        GatherWontFit,
        add_hooks,
        disable_gradient_checkpointing,
        gather_cost,
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
        "EncodedChat": "trl_chatformat",
        "ForwardRedirection": "trl_redirect",
        "GatherCost": "trl_zero3",
        "GatherWontFit": "trl_zero3",
        "PreTrainedModelWrapper": "trl_valuehead",
        "RenderedChat": "trl_chatformat",
        "ValueHead": "trl_valuehead",
        "_ForwardRedirection": "trl_redirect",
        "add_hooks": "trl_zero3",
        "add_reference_adapter": "trl_prepare",
        "clone_chat_template": "trl_chatformat",
        "collate_chats": "trl_chatformat",
        "create_reference_model": "trl_prepare",
        "disable_gradient_checkpointing": "trl_zero3",
        "encode_chat": "trl_chatformat",
        "encode_chats": "trl_chatformat",
        "encode_completions": "trl_chatformat",
        "extend_chat": "trl_chatformat",
        "gather_cost": "trl_zero3",
        "gathered": "trl_zero3",
        "get_all_parameters": "trl_zero3",
        "inference_config": "trl_prepare",
        "is_prefix_stable": "trl_chatformat",
        "iter_params": "trl_zero3",
        "prepare_deepspeed": "trl_prepare",
        "prepare_fsdp": "trl_prepare",
        "prepare_reference_model": "trl_prepare",
        "prepare_tokenizer_files": "trl_chatformat",
        "redirect": "trl_redirect",
        "reference_context": "trl_prepare",
        "reference_logprobs": "trl_prepare",
        "register_format": "trl_chatformat",
        "remove_hooks": "trl_zero3",
        "render_chat": "trl_chatformat",
        "setup_chat_format": "trl_chatformat",
        "suspended_hooks": "trl_zero3",
        "sync_reference_model": "trl_prepare",
        "trainable_token_settings": "trl_chatformat",
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
