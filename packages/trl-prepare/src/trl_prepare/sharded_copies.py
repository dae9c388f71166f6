"""Frozen copies of models that ZeRO-3 or FSDP2 shards, made of this rank's shards alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from trl_prepare import _private_names as private
from trl_prepare import _sharding_private as sharding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.fsdp import FSDPModule as Unit


def copy_zero3(policy: nn.Module) -> nn.Module:
    """Copy a module whose parameters ZeRO-3 has partitioned; no engine is around the copy yet.

    Raises:
        ValueError: A parameter is partitioned in a way that can't be copied.
    """
    parameters: list[Any] = list(policy.parameters())
    for parameter in parameters:
        reason = sharding.unsupported_zero3(parameter)
        if reason is not None:
            raise ValueError(
                f"A policy under ZeRO-3 with {reason} can't be copied: load the reference on its "
                "own with from_pretrained, then prepare it."
            )
    twins: dict[int, Any] = {id(parameter): _twin(parameter) for parameter in parameters}
    reference = _copy_without_engine(policy, twins)
    partitioned = next(p for p in parameters if sharding.is_zero3(p))
    for parameter in parameters:
        twin = twins[id(parameter)]
        if sharding.is_zero3(parameter):
            twin.data = torch.empty(
                parameter.ds_shape, dtype=parameter.dtype, device=parameter.device
            )
            # Whole for a moment, one at a time; the values come from the shard.
            partitioned.convert_to_zero_parameters(param_list=[twin])
            twin.ds_tensor.data.copy_(parameter.ds_tensor.data)
        else:
            twin.data = parameter.detach().clone()
    return reference


def copy_fsdp2(policy: nn.Module) -> nn.Module:
    """Copy a module that `fully_shard` was applied to, with the same units on the same mesh.

    Raises:
        ValueError: A parameter is spread over another mesh as well, as by tensor parallelism.
    """
    units: list[Unit] = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # after a forward, the last ones are still whole
    settings = sharding.fsdp2_units(policy)
    parameters: dict[int, Any] = {id(p): p for p in policy.parameters()}
    meshes = {p.device_mesh for p in parameters.values() if isinstance(p, DTensor)}
    if meshes != {settings[0].mesh}:
        raise ValueError(
            "This policy's parameters are spread by more than FSDP2, which can't be copied: load "
            "the reference on its own with from_pretrained, then prepare it."
        )
    twins: dict[int, Any] = {key: _twin(parameter) for key, parameter in parameters.items()}
    sharded_as = {
        id(twins[key]): p.placements[-1] for key, p in parameters.items() if isinstance(p, DTensor)
    }
    ignored = {twins[key] for key, p in parameters.items() if not isinstance(p, DTensor)}
    reference = _copy_without_engine(policy, twins)
    copies = dict(zip(policy.modules(), reference.modules(), strict=True))
    device = torch.device(settings[0].mesh.device_type)
    waiting = {id(twin): parameters[key] for key, twin in twins.items()}
    # The root comes first in the list, and is sharded last.
    for unit in reversed(settings):
        modules = [copies[module] for module in unit.modules]
        whole: list[nn.Parameter] = []
        for module in modules:
            for twin in module.parameters():
                parameter = waiting.pop(id(twin), None)
                if isinstance(parameter, DTensor):
                    twin.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    whole.append(twin)
                elif parameter is not None:
                    twin.data = parameter.detach().clone()
        options: dict[str, Any] = {"ignored_params": ignored} if ignored else {}
        fully_shard(
            modules,
            mesh=unit.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=unit.mp_policy,
            offload_policy=unit.offload_policy,
            shard_placement_fn=_look_up(sharded_as),
            **options,
        )
        for twin in whole:  # the modules have its shard now
            twin.data = torch.empty(0, dtype=twin.dtype, device=device)
    copied: dict[str, Any] = dict(reference.named_parameters())
    sources: dict[str, Any] = dict(policy.named_parameters())
    for name, source in sources.items():
        if isinstance(source, DTensor):
            with torch.no_grad():
                copied[name].to_local().copy_(source.to_local())
    return reference


def _look_up(placements: dict[int, Any]) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: placements[id(parameter)]


def _twin(parameter: Any) -> nn.Parameter:
    """Return an empty parameter of the same kind, with no elements yet."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=False)


def _copy_without_engine(model: nn.Module, twins: dict[int, nn.Parameter]) -> nn.Module:
    """Copy a tree of modules with other parameters, without what an engine put on the modules."""
    memo: dict[int, Any] = dict(twins)
    for module in model.modules():
        kind = _plain_class(module)
        memo[id(module)] = kind.__new__(kind)
        # By the memo, since handles of hooks lead to these dictionaries too.
        for name in private.CALL_HOOKS:
            hooks = getattr(module, name)
            memo[id(hooks)] = type(hooks)()
        for name in private.STATE_DICT_HOOKS:
            hooks = getattr(module, name)
            others = ((key, hook) for key, hook in hooks.items() if not private.is_of_fsdp(hook))
            memo[id(hooks)] = type(hooks)(others)
        memo[id(module._parameters)] = {
            name: None if parameter is None else twins[id(parameter)]
            for name, parameter in module._parameters.items()
        }
    for module in model.modules():
        state = {
            name: value
            for name, value in module.__getstate__().items()
            if not private.ENGINE_ATTRIBUTES.match(name)
        }
        memo[id(module)].__setstate__(copy.deepcopy(state, memo))
    return memo[id(model)]


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
