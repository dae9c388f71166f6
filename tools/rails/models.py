"""The model that tests and benchmarks on engines run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def random_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Return a Llama with random weights, the same for the same seed; tiny unless told otherwise.

    Its embeddings are untied, since accelerate 1.6 can't shard tied ones with FSDP2.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tiny: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**tiny | settings))
