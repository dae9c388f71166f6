"""Encoder-decoder language models with a value head."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoModelForSeq2SeqLM

from trl_valuehead.wrapper import PreTrainedModelWrapper


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """A sequence-to-sequence language model with a value head on its decoder.

    See `PreTrainedModelWrapper`.

    Example:
        >>> import torch
        >>> from transformers import T5Config, T5ForConditionalGeneration
        >>> config = T5Config(
        ...     d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16,
        ...     decoder_start_token_id=0,
        ... )
        >>> model = AutoModelForSeq2SeqLMWithValueHead(T5ForConditionalGeneration(config))
        >>> logits, loss, value = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[4, 5]]))
        >>> value.shape
        torch.Size([1, 2])
    """

    transformers_parent_class: ClassVar[Any] = AutoModelForSeq2SeqLM
    is_encoder_decoder: ClassVar[bool] = True
