"""The module under the LM head, and the last hidden state that it hands to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model itself: `model`, or what a PeftModel has inside."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def backbones(model: PreTrainedModel) -> list[nn.Module]:
    """The modules whose first output may be the last hidden state that the LM head reads.

    As a rule the model's body, with its decoder inside. Some models run the decoder without the
    body (OPT in transformers 5, BART's decoder alone in 4), so both are here. Where one of them is
    a whole language model, as in composites, its own are meant.
    """
    body: Any = model.base_model
    owners: list[Any] = [body, model]
    modules = [body, *(owner.get_decoder() for owner in owners if hasattr(owner, "get_decoder"))]
    # Llama 4's text model alone, in transformers 5, has a body that neither of them finds.
    modules += [child for child in model.children() if isinstance(child, PreTrainedModel)]
    found: dict[nn.Module, None] = {}
    for module in modules:
        # Some name the LM head itself their decoder.
        if module is model or module is None or module is model.get_output_embeddings():
            continue
        whole = isinstance(module, PreTrainedModel) and module.can_generate()
        found |= dict.fromkeys(backbones(module) if whole else [module])
    return list(found)


def run_with_head(
    model: Any,
    head: Callable[[torch.Tensor], torch.Tensor],
    *,
    skip_lm_head: bool = False,
    **inputs: Any,
) -> tuple[Any, torch.Tensor]:
    """`model(**inputs)`, and what `head` makes of the last hidden state (batch, tokens, hidden).

    Of a body and the decoder in it, the body's output comes last and counts. It is read before the
    LM head runs, so that whatever the head needs is gone before there are logits. The hooks are
    gone when this returns.

    Args:
        model: The language model, or a PeftModel around it.
        head: Called once with the hidden state.
        skip_lm_head: Whether to hand no tokens to the LM head, so that there are no logits.
        **inputs: Handed to the model.

    Returns:
        The model's output and the head's.

    Raises:
        RuntimeError: The model did not run its body.
    """
    base = language_model(model)
    states: list[torch.Tensor] = []
    results: list[torch.Tensor] = []
    here = threading.local()
    here.recording = True  # another thread may run the same model meanwhile

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if hasattr(here, "recording"):
            states[:] = [output[0]]

    def before_lm_head(module: nn.Module, args: Any) -> Any:
        if not hasattr(here, "recording"):
            return args
        if states:
            results[:] = [head(states.pop())]
        return (args[0][..., :0, :],) if skip_lm_head else args

    handles: list[Any] = []
    try:
        for backbone in backbones(base):
            handles.append(backbone.register_forward_hook(keep))
        lm_head = base.get_output_embeddings()
        if lm_head is not None:
            handles.append(lm_head.register_forward_pre_hook(before_lm_head))
        output = model(**inputs, return_dict=True, output_hidden_states=False)
    finally:
        for handle in handles:
            handle.remove()
    if states:  # no LM head that its model knows
        results[:] = [head(states.pop())]
    if not results:
        raise RuntimeError(
            f"{type(base).__name__} ran without calling its base_model or its decoder, so there is "
            "no last hidden state to read values from. Such a model can't have a value head here."
        )
    return output, results.pop()


def lm_head_device(model: nn.Module) -> torch.device:
    """The device that computes the logits."""
    head = language_model(model).get_output_embeddings()
    return list((head or model).parameters())[-1].device
