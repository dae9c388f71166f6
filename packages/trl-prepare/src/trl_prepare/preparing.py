"""Whatever stands for the reference, prepared as the accelerator's engine wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl_prepare._private_names import MIXED_PRECISION_MARK, REGISTERED_MODELS
from trl_prepare.adapters import AdapterReference
from trl_prepare.deepspeed import prepare_deepspeed
from trl_prepare.freezing import frozen
from trl_prepare.fsdp import prepare_fsdp
from trl_zero3 import unwrap

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn


def prepare_reference_model(
    model_or_none: nn.Module | None, accelerator: Accelerator, policy: nn.Module | None = None
) -> Any:
    """Prepare a reference for the accelerator's engine: frozen, in eval mode, sharded or whole.

    DeepSpeed and FSDP shard it as they do the policy. Under DDP and on one device it gets the
    device and the precision of the policy and no wrapper: what is never trained needs no buckets
    for gradients. The accelerator doesn't save it with its state. Call this on every rank.

    Args:
        model_or_none: The reference, or None for a PEFT policy that is its own reference. What was
            prepared already comes back as it is.
        accelerator: The accelerator that prepared the policy, or will.
        policy: The policy, before or after it was prepared. Needed with None; with a model it
            serves to refuse one that is, or shares parameters with, the policy where it can't.

    Returns:
        A `DeepSpeedEngine`, an FSDP module or the model itself; with None, a callable that runs
        the policy by `reference_context`. All are called with the model's own arguments, and
        `reference_logprobs` takes any of them.

    Raises:
        ValueError: There is neither a model nor a PEFT policy; the model is the policy itself, or
            shares parameters with it under an engine that shards; or the engine refuses it.

    Example:
        >>> from accelerate import Accelerator
        >>> from torch import nn
        >>> reference = prepare_reference_model(nn.Linear(2, 2), Accelerator(cpu=True))
        >>> reference.training, reference.weight.requires_grad
        (False, False)
    """
    if model_or_none is None:
        if policy is None:
            raise ValueError(
                "Neither a reference nor a policy was given: pass a model, or None with a PEFT "
                "policy that is its own reference."
            )
        return AdapterReference(policy)
    model = model_or_none
    engine = accelerator.distributed_type.value
    if policy is not None:
        _check_apart(model, policy, engine)
    if engine == "DEEPSPEED":
        return prepare_deepspeed(model, accelerator)
    if engine == "FSDP":
        return prepare_fsdp(model, accelerator)
    if _is_prepared(model):
        return model.requires_grad_(False).eval()
    # Registered, it would be saved and loaded with the accelerator's state.
    registered = getattr(accelerator, REGISTERED_MODELS)
    before = list(registered)
    try:
        with frozen(model):
            prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
            return prepared.eval()
    finally:
        registered[:] = before


def _is_prepared(model: nn.Module) -> bool:
    return unwrap(model) is not model or MIXED_PRECISION_MARK in vars(model)


def _check_apart(model: nn.Module, policy: nn.Module, engine: str) -> None:
    if unwrap(model) is unwrap(policy):
        raise ValueError(
            "The reference is the policy itself, which would be frozen: make a copy with "
            "create_reference_model, or pass None if it is a PEFT model."
        )
    shared = set(map(id, policy.parameters())).intersection(map(id, model.parameters()))
    if shared and engine in ("DEEPSPEED", "FSDP"):
        raise ValueError(
            f"The reference shares {len(shared)} parameters with the policy, which {engine} would "
            "take for each of them: create the reference without num_shared_layers."
        )
