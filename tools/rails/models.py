"""The model that tests and benchmarks on engines run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
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


def generate_greedily(model: Any, prompt: torch.Tensor, tokens: int, **settings: Any) -> None:
    """Let a model generate exactly so many tokens.

    Raises:
        RuntimeError: It generated another number.
    """
    import torch

    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        **settings,
    )
    if output.shape[1] != prompt.shape[1] + tokens:
        raise RuntimeError(f"{output.shape[1] - prompt.shape[1]} tokens were generated.")
