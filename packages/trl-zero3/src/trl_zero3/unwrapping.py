"""The model inside its wrappers, and a context in which it can generate."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trl_zero3 import _deepspeed_private, _fsdp_private
from trl_zero3.fsdp import summoned, unsharded
from trl_zero3.gathering import gathered
from trl_zero3.generation import (
    disable_gradient_checkpointing,
    generation_configs_for,
    generation_settings,
    kept_training_modes,
)
from trl_zero3.hooks import suspended_hooks
from trl_zero3.streaming import streaming

if TYPE_CHECKING:
    from collections.abc import Generator

    from accelerate import Accelerator
    from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, a DeepSpeed engine, FSDP and `torch.compile`, in any order.

    A PEFT model stays a PEFT model, and a model with a value head keeps it: they are models, not
    wrappers of the engine.

    Args:
        model: Any module.

    Raises:
        TypeError: It is no module.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> unwrap(torch.compile(layer)) is layer
        True
    """
    return _layers(model)[-1]


@contextmanager
def unwrap_model_for_generation(
    model: nn.Module,
    accelerator: Accelerator | None,
    gather_deepspeed3_params: bool = True,
    generation_kwargs: dict[str, Any] | None = None,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    check_memory: bool = True,
) -> Generator[Any]:
    """Yield the model inside its wrappers, ready to generate; afterwards the engine is as it was.

    Under ZeRO-3 and FSDP2 the parameters are gathered once, and no communication remains inside:
    ranks may generate as much or as little as they like. Under FSDP1, and under ZeRO-3 without
    gathering, layers still gather, and `generate` keeps the ranks in step by `synced_gpus`.
    Gradient checkpointing is off inside and caching on. Whether the body returns or raises, hooks,
    residency, traces, flags, training modes and configs are restored, without communication, and
    the next training step gathers what it would have gathered anyway.

    Where parameters were gathered, a body that raises on one rank ends with an error on all: the
    ranks agree when they leave, after everything is restored, over a group of their own. Where
    layers gather, the other ranks wait for it until the time limit of the process group.

    Args:
        model: The model as it was prepared: plain, in DDP, a DeepSpeed engine, FSDP1, FSDP2,
            compiled. With DeepSpeed this must be the engine, not the module inside it.
        accelerator: Not needed: the wrappers are read off the model. Accepted since TRL's function
            takes it.
        gather_deepspeed3_params: Under ZeRO-3, gather all parameters first; otherwise layers are
            gathered one by one in each forward, which is slower and needs less memory.
        generation_kwargs: Override the model's generation config inside.
        gradient_checkpointing_kwargs: Not needed: the arguments that were there before come back.
            Accepted since TRL's function takes it.
        check_memory: Refuse, on all ranks alike, to gather what does not fit on one of them.

    Raises:
        ValueError: `generation_kwargs` can't apply, the model is the inside of a DeepSpeed engine,
            or its parameters are partitioned in a way that is not supported. Inside, `generate`
            raises it for an explicit `synced_gpus=False` where that would hang.
        TypeError: The model is no module.
        GatherWontFit: There is not enough free memory on some rank.
        RuntimeError: Gathering was not wanted, but the engine's own hooks are off. On leaving, the
            body raised on another rank.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> with unwrap_model_for_generation(torch.compile(layer), None) as unwrapped:
        ...     unwrapped is layer
        True
    """
    layers = _layers(model)
    unwrapped = layers[-1]
    engine = next((layer for layer in layers if _deepspeed_private.is_engine(layer)), None)
    if engine is None and _deepspeed_private.is_inside_of_engine(unwrapped):
        raise ValueError(
            "This model is the inside of a DeepSpeed engine, from where its hooks can't be "
            "reached: pass the engine itself."
        )
    if engine is not None and _deepspeed_private.is_deepcompiled(engine):
        raise ValueError(
            "DeepCompile has put gathering into the compiled graphs of this engine, from where it "
            "can't be taken out: generate before engine.compile(), or without DeepCompile."
        )
    configs = generation_configs_for(unwrapped, generation_kwargs)
    with ExitStack() as stack:
        stack.enter_context(kept_training_modes(model))
        if engine is not None:
            collective = stack.enter_context(
                _deepspeed(engine, gather_deepspeed3_params, check_memory)
            )
        else:
            # Of `deepspeed.zero.Init`, without an engine.
            stack.enter_context(gathered(unwrapped, check_memory=check_memory))
            stack.enter_context(unsharded(model, check_memory))
            collective = stack.enter_context(summoned(model, check_memory))
        stack.enter_context(disable_gradient_checkpointing(unwrapped))
        if not collective:  # tensor parallelism, whose layers add up their results
            collective = any(map(_fsdp_private.is_dtensor, unwrapped.parameters()))
        collective = collective and torch.distributed.get_world_size() > 1
        stack.enter_context(generation_settings(unwrapped, configs, collective=collective))
        yield unwrapped


@contextmanager
def _deepspeed(engine: nn.Module, gather: bool, check_memory: bool) -> Generator[bool]:
    """Make an engine's parameters usable and yield whether forwards inside still communicate."""
    offload = _deepspeed_private.offload_of(engine)
    if offload is None:  # a stage that keeps parameters whole
        yield False
    elif gather:
        with (
            gathered(engine, check_memory=check_memory),
            suspended_hooks(engine),
            _deepspeed_private.plain_linears(offload.module),
        ):
            yield False
    elif not _deepspeed_private.has_its_hooks(offload):
        if any(map(_deepspeed_private.is_missing, offload.module.parameters())):
            raise RuntimeError(
                "This engine's ZeRO-3 hooks are off, so nothing would gather its parameters: put "
                "them back with add_hooks, or leave gather_deepspeed3_params on."
            )
        yield False  # inside a context that gathered
    else:
        with streaming(engine):
            yield True


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the model and what its wrappers wrap, from the outside in."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{type(model).__name__} was given, where a torch.nn.Module was expected: pass the "
            "model, as it was prepared."
        )
    layers = [model]
    while (inner := _inside(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _inside(model: Any) -> nn.Module | None:
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return model.module
    if _deepspeed_private.is_engine(model) or _fsdp_private.is_fsdp1(model):
        return model.module
    # torch.compile registers it as a submodule, accelerate's regional compilation hides it.
    return model._modules.get("_orig_mod", vars(model).get("_orig_mod"))
