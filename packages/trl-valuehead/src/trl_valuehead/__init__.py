"""Causal and sequence-to-sequence language models with a value head."""

from trl_valuehead.causal_lm import AutoModelForCausalLMWithValueHead
from trl_valuehead.head import ValueHead
from trl_valuehead.seq2seq_lm import AutoModelForSeq2SeqLMWithValueHead
from trl_valuehead.wrapper import PreTrainedModelWrapper

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "PreTrainedModelWrapper",
    "ValueHead",
]
