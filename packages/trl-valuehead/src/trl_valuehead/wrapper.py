"""A language model with a value head, as one module that behaves like the model."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from trl_valuehead.backbone import language_model, run_with_head
from trl_valuehead.loading import Loading
from trl_valuehead.saving import Saving

# A cache's name as argument and output: transformers 5, 4, and 4's state-space models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class PreTrainedModelWrapper(Loading, Saving):
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
        ValueError: The model has no LM head, uses prompt learning or is offloaded to CPU or disk,
            or an option of the head is out of range.
    """

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        return_past_key_values: bool = False,
        *,
        upcast_logits: bool = False,
        values_only: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits, loss and values.

        Args:
            input_ids: Token ids (batch, tokens).
            past_key_values: The cache of an earlier call.
            attention_mask: 1 for tokens, 0 for padding (batch, tokens).
            return_past_key_values: Whether to append the cache to what is returned.
            upcast_logits: Whether to copy half-precision logits to fp32.
            values_only: Whether to skip the LM head. DistributedDataParallel then needs
                `find_unused_parameters`, unless something else trains the LM head.
            **kwargs: Handed to the language model, for example `labels`, `inputs_embeds`,
                `decoder_input_ids`, `logits_to_keep` (values stay whole). `return_dict` and
                `output_hidden_states` make no difference.

        Returns:
            The logits (batch, tokens, vocabulary), the language model's loss or None, and the
            values (batch, tokens), of the decoder's tokens if there is one; and the cache if asked.
            With `values_only`, None for logits and loss.

        Raises:
            ValueError: `values_only` is given together with what is for logits.
        """
        if values_only and (upcast_logits or kwargs.keys() & {"labels", "logits_to_keep"}):
            raise ValueError(
                "values_only computes no logits and no loss: drop labels, logits_to_keep and "
                "upcast_logits. An encoder-decoder model takes decoder_input_ids instead."
            )
        for name in ("return_dict", "output_hidden_states"):
            kwargs.pop(name, None)
        # What isn't given isn't passed on: not every architecture has each argument.
        if input_ids is not None:
            kwargs["input_ids"] = input_ids
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        if past_key_values is not None:
            parameters = signature(language_model(self.pretrained_model).forward).parameters
            name = next((name for name in _CACHE_NAMES if name in parameters), "past_key_values")
            kwargs[name] = past_key_values
        output, value = run_with_head(
            self.pretrained_model, self.v_head, skip_lm_head=values_only, **kwargs
        )
        logits, loss = output.logits, output.get("loss")
        value = value.squeeze(-1).to(logits.device)
        if values_only:
            logits = None
        elif upcast_logits:
            logits = logits.float()
        if not return_past_key_values:
            return logits, loss, value
        caches = (output.get(name) for name in _CACHE_NAMES)
        return logits, loss, value, next((cache for cache in caches if cache is not None), None)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The language model's `generate`, with its arguments and result."""
        return self.pretrained_model.generate(*args, **kwargs)
