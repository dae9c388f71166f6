"""How a language model with a head passes for the language model: checks, attributes, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from trl_valuehead import _private_names, adapters
from trl_valuehead.backbone import language_model, lm_head_device
from trl_valuehead.checkpoints import BASE_PREFIX
from trl_valuehead.head import ValueHead


class ModelFacade(nn.Module):
    """A language model and its heads as one module, with the language model's face."""

    transformers_parent_class: ClassVar[Any] = None
    supported_args: ClassVar[tuple[str, ...]] = (
        "summary_dropout_prob",
        "v_head_initializer_range",
        "v_head_init_strategy",
    )
    supported_modules: ClassVar[tuple[str, ...]] = ("v_head",)
    supported_rm_modules: ClassVar[tuple[str, ...]] = ("score",)
    is_encoder_decoder: ClassVar[bool] = False

    pretrained_model: Any
    score: Any

    def __init__(
        self,
        pretrained_model: nn.Module,
        score_module: nn.Module | None = None,
        supports_rm_adapter: bool = False,
        rm_adapter_name: str | None = None,
        **head_options: Any,
    ) -> None:
        unknown = sorted(set(head_options) - set(self.supported_args))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} has no keyword {', '.join(unknown)}; those of the value "
                f"head are {', '.join(self.supported_args)}."
            )
        self.check(pretrained_model)
        super().__init__()
        self.pretrained_model = pretrained_model
        self.is_peft_model = adapters.is_peft_model(pretrained_model)
        self.is_sequential_parallel = bool(getattr(pretrained_model, "hf_device_map", None))
        self.supports_rm_adapter = supports_rm_adapter
        self.rm_adapter_name = rm_adapter_name
        device = lm_head_device(pretrained_model)
        if score_module is not None:
            self.score = score_module.to(device)
        self.v_head = ValueHead(self.config, **head_options).to(device)
        self.register_load_state_dict_pre_hook(_add_base_prefix)

    @classmethod
    def check(cls, model: Any) -> None:
        """Raise unless `model` is a language model that can carry a value head of this class.

        Raises:
            TypeError: It is no language model, or one of the other kind.
            ValueError: It has no LM head, uses prompt learning or is offloaded to CPU or disk.
        """
        if not isinstance(model, PreTrainedModel) and not adapters.is_peft_model(model):
            raise TypeError(
                f"pretrained_model must be a transformers PreTrainedModel or a PeftModel, "
                f"not {type(model).__name__}."
            )
        adapters.refuse_prompt_learning(getattr(model, "active_peft_config", None))
        base = language_model(model)
        if base.config.is_encoder_decoder != cls.is_encoder_decoder:
            kind = "is" if base.config.is_encoder_decoder else "is not"
            raise TypeError(
                f"{type(base).__name__} {kind} an encoder-decoder model: {cls.__name__} is for the "
                "other kind."
            )
        if not base.can_generate():
            raise ValueError(
                f"{type(base).__name__} has no LM head. Load the model with "
                f"{getattr(cls.transformers_parent_class, '__name__', 'its LM class')}."
            )
        device_map: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
        devices = {str(device) for device in device_map.values()}
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"The model is offloaded (its device_map uses {', '.join(sorted(devices))}): a "
                "value head can't train on that. Choose a device_map without cpu or disk offload."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The language model's weights under its own names, and the head's under `v_head.`.

        Inside another module's state dict the names are torch's own, with `pretrained_model.`;
        `load_state_dict` and `save_pretrained` take both.
        """
        state = super().state_dict(*args, **kwargs)
        if args or kwargs.get("destination") is not None:
            return state
        prefix = kwargs.get("prefix", "")
        for key in list(state):
            name = key.removeprefix(prefix)
            # Every key is popped, so that the order stays.
            state[prefix + name.removeprefix(BASE_PREFIX)] = state.pop(key)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returns, or the same under torch's names."""
        result = super().load_state_dict(state_dict, strict, assign)
        for keys in (result.missing_keys, result.unexpected_keys):
            keys[:] = [key.removeprefix(BASE_PREFIX) for key in keys]
        return result

    @property
    def config(self) -> PretrainedConfig:
        """The language model's configuration."""
        return self.pretrained_model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The language model's settings for `generate`."""
        return self.pretrained_model.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        language_model(self.pretrained_model).generation_config = config

    @property
    def device(self) -> torch.device:
        """The language model's device."""
        return language_model(self.pretrained_model).device

    @property
    def dtype(self) -> torch.dtype:
        """The language model's dtype; the head has its own."""
        return language_model(self.pretrained_model).dtype

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") and name not in _private_names.READ_BY_ACCELERATE:
                raise
            model = self.__dict__.get("_modules", {}).get("pretrained_model")
            if not hasattr(model, name):
                raise
            return getattr(model, name)


def _add_base_prefix(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Turns the names of `ModelFacade.state_dict` into torch's, in place."""
    for key in list(state_dict):
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.partition(".")[0] not in module._modules:
            state_dict[prefix + BASE_PREFIX + name] = state_dict.pop(key)
