"""Decoder-only language models with a value head."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoModelForCausalLM

from trl_valuehead.wrapper import PreTrainedModelWrapper


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal language model with a value head; see `PreTrainedModelWrapper`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     vocab_size=16,
        ... )
        >>> model = AutoModelForCausalLMWithValueHead(LlamaForCausalLM(config))
        >>> logits, loss, value = model(torch.tensor([[1, 2, 3]]))
        >>> value.shape
        torch.Size([1, 3])
    """

    transformers_parent_class: ClassVar[Any] = AutoModelForCausalLM
