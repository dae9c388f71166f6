"""A model that only infers, beside a policy that FSDP trains."""

from __future__ import annotations

import copy
import functools
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from trl_prepare.freezing import frozen

if TYPE_CHECKING:
    from collections.abc import Generator

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch import nn

WRAP_POLICIES = (transformer_auto_wrap_policy, size_based_auto_wrap_policy)


def prepare_fsdp(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Shard a reference or reward model with FSDP like the policy, frozen and in eval mode.

    FSDP1 wraps the model; FSDP2 shards it in place, one unit per layer, and needs no optimizer.
    The model keeps the dtype that it has. Call it on every rank. The accelerator's plugin is read,
    never changed, so the model may have other layer classes than the policy.

    Args:
        model: A module that isn't wrapped yet. If it is wrapped by FSDP already, it is set to eval
            mode and returned.
        accelerator: An accelerator with an FSDP plugin, which decides the version of FSDP and how
            it shards.

    Returns:
        Under FSDP1 a `FullyShardedDataParallel` around the model; under FSDP2 the model itself,
        now an `FSDPModule`.

    Raises:
        ValueError: The accelerator has no FSDP plugin.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> prepare_fsdp(torch.nn.Linear(2, 2), Accelerator(cpu=True))
        Traceback (most recent call last):
        ...
        ValueError: prepare_fsdp needs an accelerator that runs FSDP, but this one runs NO: pass a \
FullyShardedDataParallelPlugin to Accelerator.
    """
    if isinstance(model, FullyShardedDataParallel | FSDPModule):
        return model.eval()
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        raise ValueError(
            "prepare_fsdp needs an accelerator that runs FSDP, but this one runs "
            f"{accelerator.distributed_type.value}: pass a FullyShardedDataParallelPlugin to "
            "Accelerator."
        )
    plugin = _plugin_for(model, plugin)
    # Frozen first: what FSDP would upcast to fp32 for an optimizer stays as it is.
    with frozen(model):
        shard = _fsdp1 if plugin.fsdp_version == 1 else _fsdp2
        return shard(model, accelerator, plugin).eval()


def _plugin_for(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Any:
    plugin = copy.copy(plugin)
    # Preparing the policy binds its layer classes into the plugin: undo that for this model.
    policy = plugin.auto_wrap_policy
    if isinstance(policy, functools.partial) and policy.func in WRAP_POLICIES:
        plugin.auto_wrap_policy = policy.func
    if plugin.auto_wrap_policy is transformer_auto_wrap_policy:
        there = {type(module).__name__ for module in model.modules()}
        names = there.intersection(plugin.transformer_cls_names_to_wrap or ())
        own: Any = getattr(model, "_no_split_modules", None) or ()
        names = names or there.intersection(own)
        names -= _unusable_names(model, names, plugin.fsdp_version)
        plugin.transformer_cls_names_to_wrap = sorted(names)
        if not names:
            plugin.auto_wrap_policy = None
    plugin.activation_checkpointing = False
    return plugin


def _fsdp1(model: nn.Module, accelerator: Accelerator, plugin: Any) -> nn.Module:
    from accelerate.utils import ensure_weights_retied

    retie: Any = ensure_weights_retied
    plugin.set_auto_wrap_policy(model)
    device = accelerator.device
    ignored = plugin.ignored_modules
    if isinstance(ignored, str):
        ignored = [m for name, m in model.named_modules() if re.fullmatch(ignored, name)]
        for module in ignored:
            module.to(device)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=plugin.sharding_strategy or plugin.reshard_after_forward,
        cpu_offload=plugin.cpu_offload,
        auto_wrap_policy=plugin.auto_wrap_policy,
        mixed_precision=plugin.mixed_precision_policy,
        sync_module_states=plugin.sync_module_states,
        backward_prefetch=plugin.backward_prefetch,
        forward_prefetch=plugin.forward_prefetch,
        use_orig_params=plugin.use_orig_params,
        param_init_fn=retie(plugin.param_init_fn, model, device),
        ignored_modules=ignored,
        limit_all_gathers=plugin.limit_all_gathers,
        # FSDP1 takes no index on CPU.
        device_id=torch.device("cpu") if device.type == "cpu" else device,
    )


def _unusable_names(model: nn.Module, names: set[str], version: int) -> set[str]:
    """Return the classes whose units would tear apart what must be one unit, as BertEmbeddings."""
    # FSDP1 can't run weights that are tied over units; accelerate makes units of FSDP2's ends.
    apart = tied_owners(model) if version == 1 else [{end} for end in _ends(model)]
    unusable: set[str] = set()
    for module in model.modules():
        name = type(module).__name__
        if name in names:
            inside = set(module.modules())
            for owners in apart:
                cuts = owners & inside and not owners <= inside
                if cuts or (version == 2 and owners <= inside - {module}):
                    unusable.add(name)
    return unusable


def _ends(model: nn.Module) -> set[nn.Module]:
    ends = (getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    return {end for end in ends if end is not None}


def _fsdp2(model: nn.Module, accelerator: Accelerator, plugin: Any) -> nn.Module:
    from accelerate.utils import fsdp2_prepare_model

    groups = [owners for owners in tied_owners(model) if not owners <= _ends(model)]
    if groups:
        # accelerate keeps two ends together; T5 ties four modules, BERT a weight and a bias.
        if plugin.cpu_ram_efficient_loading:
            for tensor in (*model.parameters(), *model.buffers()):
                distributed.broadcast(tensor.detach(), src=0)
            plugin.cpu_ram_efficient_loading = False
        place = {module: index for index, module in enumerate(model.modules())}
        for owners in groups:
            # All ranks must gather a unit's parameters in one order.
            modules = sorted(owners, key=place.__getitem__)
            fully_shard(modules, **_sharding_of(model, accelerator, plugin))
    with _hidden_ends(model):
        return fsdp2_prepare_model(_InferenceAccelerator(accelerator, plugin), model)


@contextmanager
def _hidden_ends(model: nn.Module) -> Generator[None]:
    """Don't let accelerate shard an end again that lies inside of a unit already."""
    hidden: list[str] = []
    for end in ("input", "output"):
        name = f"get_{end}_embeddings"
        weight = getattr(getattr(model, name, lambda: None)(), "weight", None)
        if isinstance(weight, DTensor):
            vars(model)[name] = lambda: None
            hidden.append(name)
    try:
        yield
    finally:
        for name in hidden:
            del vars(model)[name]


def _sharding_of(model: nn.Module, accelerator: Accelerator, plugin: Any) -> dict[str, Any]:
    """Return how accelerate would shard a unit of this model."""
    settings: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
    }
    mesh: Any = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        names: Any = accelerator.parallelism_config
        settings["mesh"] = mesh[tuple(names.fsdp_dim_names)]
    if (ignored := plugin.ignored_modules) is not None:
        if isinstance(ignored, str):
            named = model.named_modules()
            ignored = [module for name, module in named if re.fullmatch(ignored, name)]
        settings["ignored_params"] = {p for module in ignored for p in module.parameters()}
    return settings


def tied_owners(model: nn.Module) -> list[set[nn.Module]]:
    """Return the modules that hold a parameter in common with others, in sets that don't meet."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    groups: list[set[nn.Module]] = []
    for group in owners.values():
        if len(group) > 1:
            for other in [other for other in groups if other & group]:
                groups.remove(other)
                group |= other
            groups.append(group)
    return groups


class _InferenceAccelerator:
    """An accelerator with another plugin, as `fsdp2_prepare_model` reads it.

    accelerate 1.6 upcasts even a frozen model to fp32 where `mixed_precision` isn't "no"; the
    plugin's own policy, which does the mixing, is left as it is.
    """

    mixed_precision = "no"

    def __init__(self, accelerator: Accelerator, plugin: Any) -> None:
        self._accelerator = accelerator
        self.state = SimpleNamespace(fsdp_plugin=plugin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
