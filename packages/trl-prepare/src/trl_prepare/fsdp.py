"""A model that only infers, beside a policy that FSDP trains."""

from __future__ import annotations

import copy
import functools
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from trl_prepare.freezing import frozen

if TYPE_CHECKING:
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


def _fsdp2(model: nn.Module, accelerator: Accelerator, plugin: Any) -> nn.Module:
    from accelerate.utils import fsdp2_prepare_model

    return fsdp2_prepare_model(_InferenceAccelerator(accelerator, plugin), model)


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
