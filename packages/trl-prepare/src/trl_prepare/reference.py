"""A frozen copy of the policy, whole where the policy is whole and sharded where it is sharded."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trl_prepare._private_names import CALL_HOOKS, OUTPUT_CAPTURING_FLAG
from trl_prepare._sharding_private import is_zero3
from trl_prepare.sharded_copies import copy_fsdp2, copy_zero3
from trl_zero3 import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LAYER_PATTERNS = (
    "transformer.h.{layer}",
    "model.decoder.layers.{layer}",
    "gpt_neox.layers.{layer}",
    "model.layers.{layer}",
)


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """Copy a policy into a frozen reference in eval mode.

    The copy has the policy's weights, tied where the policy's are, and its config. It has no
    hooks, gradients or gradient checkpointing, and no wrapper (DDP, a DeepSpeed engine,
    torch.compile) that the policy may have.

    A policy that ZeRO-3 or FSDP2 shards gives a reference that is sharded in the same way, made of
    each rank's own shards: never more than one layer of it is whole. Every rank must call this.
    Under FSDP2 it is ready to run; under ZeRO-3 `prepare_reference_model` puts an engine around it.

    Args:
        model: The policy: a transformers, PEFT, value-head or plain module, as it is or prepared.
        num_shared_layers: Share everything up to this layer, counted in the order of
            `named_parameters()`: 0 shares what comes before the first layer, 2 that and layers 0
            and 1. The shared parameters are the policy's own, hence frozen in the policy too.
            Weights tied to one on the other side are copied, and go on training.
        pattern: How the name of a layer starts, with `{layer}` for its number; by default that of
            GPT-2, OPT, GPT-NeoX or Llama, whichever the model has.

    Returns:
        The reference: a module of the unwrapped policy's class.

    Raises:
        ValueError: The policy is sharded by FSDP1 or in another way that can't be copied, or is
            sharded and `num_shared_layers` was given; no parameter's name matches the pattern for
            layer `num_shared_layers`; `pattern` lacks `{layer}` or was given without
            `num_shared_layers`; or the layers to share are trained by a wrapper already.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4,
        ... )
        >>> policy = AutoModelForCausalLM.from_config(config)
        >>> reference = create_reference_model(policy, num_shared_layers=1)
        >>> reference.training, any(p.requires_grad for p in reference.parameters())
        (False, False)
        >>> shared = policy.model.layers[0].mlp.up_proj.weight
        >>> reference.model.layers[0].mlp.up_proj.weight is shared, shared.requires_grad
        (True, False)
        >>> policy.model.layers[1].mlp.up_proj.weight.requires_grad
        True
    """
    copy_sharded = _copier_of(model)
    policy = unwrap(model)
    if copy_sharded is not None:
        if num_shared_layers is not None or pattern is not None:
            raise ValueError(
                "An engine shards this policy, and a parameter of it can't be in a second sharded "
                "model: leave num_shared_layers out, or share layers before preparing the policy."
            )
        reference = copy_sharded(policy)
        _forget_training(reference)
        return reference.eval()
    shared = _shared_parameters(policy, num_shared_layers, pattern)
    if model is not policy and any(parameter.requires_grad for parameter in shared):
        raise ValueError(
            f"num_shared_layers freezes layers that {type(model).__name__} already trains: make "
            "the reference before wrapping the policy."
        )
    # A memo entry makes deepcopy keep the parameter itself.
    reference = copy.deepcopy(policy, {id(parameter): parameter for parameter in shared})
    for module in reference.modules():
        for hooks in CALL_HOOKS:
            getattr(module, hooks).clear()
    _forget_training(reference)
    return reference.requires_grad_(False).eval()


def _forget_training(reference: nn.Module) -> None:
    modules: Iterable[Any] = reference.modules()
    for module in modules:
        vars(module).pop(OUTPUT_CAPTURING_FLAG, None)
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def _copier_of(model: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    """Return what copies a sharded model; None if it is whole."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return copy_fsdp2
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        engine = "FSDP1"
    elif any(is_zero3(parameter) for parameter in model.parameters()):
        return copy_zero3
    elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        engine = "a device mesh"
    else:
        return None
    raise ValueError(
        f"create_reference_model can't copy a model that is sharded by {engine}: make the "
        "reference before preparing the policy, or load it on its own with from_pretrained, then "
        "prepare it with prepare_reference_model."
    )


def _shared_parameters(
    model: nn.Module, num_shared_layers: int | None, pattern: str | None
) -> list[nn.Parameter]:
    if num_shared_layers is None:
        if pattern is not None:
            raise ValueError(
                f"The pattern {pattern!r} has no effect without num_shared_layers: give both."
            )
        return []
    if pattern is not None and "{layer}" not in pattern:
        raise ValueError(
            f"The pattern {pattern!r} must contain '{{layer}}' where a layer's number stands."
        )
    # Tied parameters are listed under each of their names.
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    patterns = LAYER_PATTERNS if pattern is None else (pattern,)
    first = _first_match(names, patterns, num_shared_layers)
    if first is None:
        tried = ", ".join(repr(candidate) for candidate in patterns)
        raise ValueError(
            f"No parameter of {type(model).__name__} is in a layer {num_shared_layers} named like "
            f"{tried}: num_shared_layers must be below the number of layers, and pattern must "
            "name them."
        )
    unshared = {id(parameter) for _, parameter in named[first:]}
    return [parameter for _, parameter in named[:first] if id(parameter) not in unshared]


def _first_match(names: list[str], patterns: tuple[str, ...], layer: int) -> int | None:
    for pattern in patterns:
        prefix = re.escape(pattern.replace("{layer}", str(layer)))
        # Layer 1 is not layer 10, and "h.1" is not "mlph.1".
        whole = re.compile(rf"(?<!\w){prefix}(?!\d)")
        for index, name in enumerate(names):
            if whole.search(name):
                return index
    return None
