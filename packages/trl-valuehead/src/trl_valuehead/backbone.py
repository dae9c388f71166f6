"""The module under the LM head, and the last hidden state that it hands to it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model itself: `model`, or what a PeftModel has inside."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def backbones(model: PreTrainedModel) -> list[nn.Module]:
    """The modules whose first output may be the last hidden state that the LM head reads.

    As a rule the model's body, with its decoder inside. Some models run the body's decoder without
    the body (OPT in transformers 5), so both are here.
    """
    body: Any = model.base_model
    # A model's body, or one that holds encoder and decoder side by side, as T5's.
    decoder = body.get_decoder() if hasattr(body, "get_decoder") else None
    if body is model and isinstance(decoder, PreTrainedModel) and decoder.can_generate():
        return backbones(decoder)  # of a composite: a whole causal model with its own LM head
    found = [module for module in (body, decoder) if module is not None and module is not model]
    return list(dict.fromkeys(found))


def run_with_last_hidden_state(model: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
    """`model(**inputs)`, and the last hidden state (batch, tokens, hidden) that it computed.

    Of a body and the decoder in it, the body's comes last and counts. Nothing else of their output
    is kept alive, and the hooks are gone when this returns.

    Raises:
        RuntimeError: The model did not run its body.
    """
    kept: list[torch.Tensor] = []
    here = threading.local()
    here.recording = True  # another thread may run the same model meanwhile

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(here, "recording", False):
            kept[:] = [output[0]]

    handles: list[Any] = []
    try:
        for backbone in backbones(language_model(model)):
            handles.append(backbone.register_forward_hook(keep))
        output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not kept:
        raise RuntimeError(
            f"{type(language_model(model)).__name__} ran without calling its base_model or its "
            "decoder, so there is no last hidden state to read values from. Such a model can't "
            "have a value head here."
        )
    return output, kept.pop()


def lm_head_device(model: nn.Module) -> torch.device:
    """The device that computes the logits."""
    head = language_model(model).get_output_embeddings()
    return list((head or model).parameters())[-1].device
