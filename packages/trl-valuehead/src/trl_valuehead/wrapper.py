"""A language model with a value head, as one module that behaves like the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from inspect import signature
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from trl_valuehead import adapters, checkpoints
from trl_valuehead.backbone import language_model, lm_head_device, run_with_last_hidden_state
from trl_valuehead.head import ValueHead
from trl_valuehead.sharding import has_shards, is_partitioned, writable

logger = logging.getLogger(__name__)

_BASE = checkpoints.BASE_PREFIX

# A cache's name as argument and output: transformers 5, 4, and 4's state-space models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")

# Private attributes of PreTrainedModel that accelerate reads on a model to shard it
# (transformers 4.51 to 5.24). Public ones are handed on without a list.
_READ_BY_ACCELERATE = ("_no_split_modules", "_tied_weights_keys")


class PreTrainedModelWrapper(nn.Module):
    """A transformers language model with a value head beside its LM head.

    Use a subclass: `AutoModelForCausalLMWithValueHead` or `AutoModelForSeq2SeqLMWithValueHead`.
    What isn't defined here is looked up on `pretrained_model`, so `config`, `device`, `generate`'s
    helpers, `gradient_checkpointing_enable` and the like are there.

    Its state dict has the language model's own names, and `v_head.summary.weight` and `.bias`.

    Args:
        pretrained_model: The language model; a PeftModel may be around it.
        score_module: A reward adapter's score layer; `from_pretrained` supplies it.
        supports_rm_adapter: Whether `compute_reward_score` may be called.
        rm_adapter_name: The reward adapter's name in the PeftModel.
        summary_dropout_prob: See `ValueHead`.
        v_head_init_strategy: See `ValueHead`.
        v_head_initializer_range: See `ValueHead`.

    Raises:
        TypeError: `pretrained_model` is no language model of the class's kind, or a keyword is
            unknown.
        ValueError: The model has no LM head, uses prompt learning or is offloaded to CPU or disk.
    """

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
        self._check(pretrained_model)
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
    def _check(cls, model: Any) -> None:
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
        if reward_adapter is not None and not isinstance(reward_adapter, str):
            raise ValueError(
                "reward_adapter must be a hub id or the path of a folder, "
                f"not {type(reward_adapter).__name__}."
            )
        if peft_config is not None:
            adapters.check_peft_config(peft_config)
        source: Any = pretrained_model_name_or_path
        checkpoint = None
        if isinstance(source, (str, os.PathLike)):
            checkpoint = checkpoints.Checkpoint.of(os.fspath(source), kwargs)
        else:
            cls._check(source)
        if adapters.is_peft_model(source) or (checkpoint is not None and checkpoint.has_adapter()):
            if peft_config is not None:
                raise ValueError(
                    "peft_config would add an adapter to a model that has one already. Leave it "
                    "out, or merge the adapter first."
                )
        elif reward_adapter is not None and peft_config is None:
            raise ValueError(
                "reward_adapter needs a PEFT model: pass peft_config, or a model or checkpoint "
                "with an adapter."
            )

        kbit_options = adapters.take_kbit_options(kwargs) if peft_config is not None else {}
        if checkpoint is not None:
            model = cls._load(checkpoint, model_args, kwargs, is_trainable)
        elif model_args or kwargs:
            raise TypeError(
                f"{', '.join(map(str, [*model_args, *kwargs]))} would not be used: the model is "
                "loaded already."
            )
        else:
            model = source
        if peft_config is not None:
            model = adapters.add_adapter(language_model(model), peft_config, kbit_options)

        reward_options: dict[str, Any] = {}
        if reward_adapter is not None:
            token = {"token": kwargs["token"]} if kwargs.get("token") is not None else {}
            reward_options = {
                "score_module": cls.add_and_load_reward_modeling_adapter(
                    model, reward_adapter, reward_adapter_name, **token
                ),
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
        checkpoint: checkpoints.Checkpoint,
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

    @classmethod
    def add_and_load_reward_modeling_adapter(
        cls,
        pretrained_model: nn.Module,
        adapter_model_id: str,
        adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> nn.Module:
        """Add a reward model's adapter to a PeftModel and return its score layer, both frozen.

        Args:
            pretrained_model: The PeftModel.
            adapter_model_id: A hub id or folder.
            adapter_name: The adapter's name in the PeftModel.
            token: For the hub.

        Returns:
            The score layer: hidden states to rewards.

        Raises:
            ValueError: There is no adapter, or it has no score layer.
        """
        token_option = {} if token is None else {"token": token}
        return adapters.load_reward_adapter(
            pretrained_model,
            adapter_model_id,
            adapter_name,
            cls.supported_rm_modules,
            **token_option,
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        return_past_key_values: bool = False,
        *,
        upcast_logits: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits, loss and values.

        Args:
            input_ids: Token ids (batch, tokens).
            past_key_values: The cache of an earlier call.
            attention_mask: 1 for tokens, 0 for padding (batch, tokens).
            return_past_key_values: Whether to append the cache to what is returned.
            upcast_logits: Whether to copy half-precision logits to fp32.
            **kwargs: Handed to the language model, for example `labels`, `inputs_embeds`,
                `decoder_input_ids`, `logits_to_keep` (values stay whole). `return_dict` and
                `output_hidden_states` make no difference.

        Returns:
            The logits (batch, tokens, vocabulary), the language model's loss or None, and the
            values (batch, tokens), of the decoder's tokens if there is one; and the cache if asked.
        """
        kwargs["return_dict"] = True
        kwargs.pop("output_hidden_states", None)
        # What isn't given isn't passed on: not every architecture has each argument.
        if input_ids is not None:
            kwargs["input_ids"] = input_ids
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        if past_key_values is not None:
            parameters = signature(language_model(self.pretrained_model).forward).parameters
            name = next((name for name in _CACHE_NAMES if name in parameters), "past_key_values")
            kwargs[name] = past_key_values
        output, hidden_states = run_with_last_hidden_state(self.pretrained_model, **kwargs)
        value = self.v_head(hidden_states).squeeze(-1).to(output.logits.device)
        logits = output.logits.float() if upcast_logits else output.logits
        result = (logits, output.get("loss"), value)
        if return_past_key_values:
            caches = (output.get(name) for name in _CACHE_NAMES)
            result += (next((cache for cache in caches if cache is not None), None),)
        return result

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The language model's `generate`, with its arguments and result."""
        return self.pretrained_model.generate(*args, **kwargs)

    def compute_reward_score(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The reward adapter's scores, without gradients.

        Active adapter, training modes and `requires_grad` flags are afterwards as they were.

        Args:
            input_ids: Token ids (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding (batch, tokens).
            **kwargs: Handed to the language model.

        Returns:
            Scores (batch, tokens, labels).

        Raises:
            ValueError: The model was loaded without `reward_adapter`.
        """
        if not self.supports_rm_adapter or self.rm_adapter_name is None:
            raise ValueError(
                "This model has no reward adapter: pass reward_adapter to from_pretrained."
            )
        kwargs["return_dict"] = True
        kwargs.pop("output_hidden_states", None)
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        with adapters.active_adapter(self.pretrained_model, self.rm_adapter_name):
            _, hidden_states = run_with_last_hidden_state(
                self.pretrained_model, input_ids=input_ids, **kwargs
            )
            weight = self.score.weight
            return self.score(hidden_states.to(weight.device, weight.dtype))

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
            state[prefix + name.removeprefix(_BASE)] = state.pop(key)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returns, or the same under torch's names."""
        result = super().load_state_dict(state_dict, strict, assign)
        for keys in (result.missing_keys, result.unexpected_keys):
            keys[:] = [key.removeprefix(_BASE) for key in keys]
        return result

    def post_init(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the head's weights, those with `v_head.` in their name; no other is looked at.

        Args:
            state_dict: A checkpoint's weights. Collective if the head is a ZeRO-3 parameter:
                every rank calls it, and rank 0's weights are taken.

        Raises:
            RuntimeError: A weight of the head is missing or has another shape.
        """
        prefix = checkpoints.HEAD_PREFIX
        head = {k.rpartition(prefix)[2]: v for k, v in state_dict.items() if prefix in k}
        if head:
            with writable(self.v_head.parameters()):
                self.v_head.load_state_dict(head)

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
            ValueError: A pickle or an upload is asked for, or weights or the head are missing in
                `state_dict`.
        """
        if kwargs.get("safe_serialization") is False:
            raise ValueError(
                "Weights are saved as safetensors only: drop safe_serialization=False."
            )
        if kwargs.get("push_to_hub"):
            raise ValueError("Call push_to_hub(repo_id): save_pretrained doesn't upload the head.")
        if not is_main_process:
            return
        folder = os.fspath(save_directory)
        state = dict(self.state_dict() if state_dict is None else state_dict)
        if has_shards(state) or (state_dict is None and is_partitioned(self)):
            raise ValueError(
                "This rank holds only pieces of the weights: pass "
                "state_dict=accelerator.get_state_dict(model), called on every rank."
            )
        state = {key.removeprefix(_BASE): value for key, value in state.items()}
        names = [checkpoints.HEAD_PREFIX + name for name in self.v_head.state_dict()]
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"state_dict lacks {', '.join(missing)}: pass the whole model's, as "
                "accelerator.get_state_dict(model) returns it."
            )
        head = {name: state.pop(name) for name in names}
        state = {key: value for key, value in state.items() if not key.startswith("score.")}

        base = self.pretrained_model
        if self._head_needs_own_file():
            if state_dict is not None:
                kwargs["state_dict"] = state
            base.save_pretrained(folder, **kwargs)
            checkpoints.save_head(head, folder)
        else:
            base.save_pretrained(folder, state_dict=state | head, **kwargs)
            checkpoints.remove_head_file(folder)

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
            if name.startswith("_") and name not in _READ_BY_ACCELERATE:
                raise
            model = self.__dict__.get("_modules", {}).get("pretrained_model")
            if not hasattr(model, name):
                raise
            return getattr(model, name)


def _add_base_prefix(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Turns the names of `PreTrainedModelWrapper.state_dict` into torch's, in place."""
    for key in list(state_dict):
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.partition(".")[0] not in module._modules:
            state_dict[prefix + _BASE + name] = state_dict.pop(key)
