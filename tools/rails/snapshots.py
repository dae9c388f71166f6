"""Everything observable about a wrapped model, as plain values that compare."""

from __future__ import annotations

from typing import Any

from torch import nn

HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def engine_snapshot(model: nn.Module) -> dict[str, Any]:
    """Return what a context manager must put back: hooks, statuses, flags, configs, attributes.

    Args:
        model: Any module or wrapper: DDP, a DeepSpeed engine, FSDP1, FSDP2, compiled, or plain.

    Returns:
        A flat dictionary from a readable path to a plain value.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found.update(_module_facts(name or "<root>", module))
    for name, parameter in model.named_parameters():
        found.update(_parameter_facts(name, parameter))
    found.update(_zero_facts(model))
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each value that two snapshots don't share."""
    lines = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, "<absent>"), after.get(path, "<absent>")
        if old != new:
            lines.append(f"{path}: {old!r} -> {new!r}")
    return lines


def _module_facts(name: str, module: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {f"{name}: class": type(module).__qualname__}
    for dictionary in HOOK_DICTIONARIES:
        hooks = getattr(module, dictionary, None)
        if hooks:
            facts[f"{name}: {dictionary}"] = [(key, id(hook)) for key, hook in hooks.items()]
    # Attribute names catch what is left behind; identities catch what was swapped.
    attributes = {k: v for k, v in vars(module).items() if k not in HOOK_DICTIONARIES}
    facts[f"{name}: attributes"] = sorted(attributes)
    for key, value in attributes.items():
        if isinstance(value, bool | int | str):
            facts[f"{name}.{key}"] = value
        elif callable(value):
            facts[f"{name}.{key}: identity"] = id(value)
    for key in ("config", "generation_config"):
        config = getattr(module, key, None)
        if hasattr(config, "to_dict"):
            facts[f"{name}.{key}"] = (id(config), config.to_dict())
    facts.update(_fsdp_facts(name, module))
    return facts


def _parameter_facts(name: str, parameter: Any) -> dict[str, Any]:
    local = getattr(parameter, "_local_tensor", parameter)
    facts: dict[str, Any] = {
        f"{name}: parameter": (id(parameter), type(parameter).__name__, parameter.requires_grad),
        f"{name}: resident": (tuple(parameter.shape), str(parameter.dtype), local.numel()),
    }
    if hasattr(parameter, "ds_id"):
        facts[f"{name}: ds"] = (
            parameter.ds_id,
            str(parameter.ds_status),
            sorted(map(str, parameter.ds_active_sub_modules)),
            bool(parameter.ds_persist),
            bool(parameter.is_external_param),
        )
    return facts


def _zero_facts(model: Any) -> dict[str, Any]:
    optimizer = getattr(model, "optimizer", None)
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is None:
        return {}
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    facts: dict[str, Any] = {
        "zero: forward hooks": [id(hook) for hook in offload.forward_hooks],
        "zero: backward hooks": [id(hook) for hook in offload.backward_hooks],
        "zero: persistent": sorted(p.ds_id for p in offload.persistent_parameters),
        "zero: forward stack": [id(module) for module in FWD_MODULE_STACK],
        "zero: in forward": [
            getattr(module._parameters, "_in_forward", None) for module in offload.module.modules()
        ],
        "zero: start hook": id(getattr(offload, "fwd_pre_hook", None)),
        "zero: coordinator": id(offload.get_param_coordinator()),
    }
    coordinator = offload.get_param_coordinator()
    prefix = "_PartitionedParameterCoordinator__"
    for key in ("trace_mode", "step_id", "n_available_params", "max_n_available_params"):
        if hasattr(coordinator, prefix + key):
            facts[f"zero: {key}"] = str(getattr(coordinator, prefix + key))
    for key in (
        "inflight_param_registry",
        "submodule_order",
        "param_order",
        "ongoing_fetch_events",
        "param_queue",
    ):
        if hasattr(coordinator, prefix + key):
            facts[f"zero: {key}"] = len(getattr(coordinator, prefix + key) or ())
    for key in ("_in_forward", "inside_no_sync_ctxt", "warn_unscaled_loss", "micro_steps"):
        if hasattr(model, key):
            facts[f"zero engine: {key}"] = getattr(model, key)
    return facts


def _fsdp_facts(name: str, module: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    handle = getattr(module, "_handle", None)
    if handle is not None and hasattr(handle, "flat_param"):
        flat = handle.flat_param
        facts[f"{name}: fsdp1"] = (
            str(module.training_state),
            str(handle._training_state),
            flat.data_ptr() == getattr(flat, "_local_shard", flat).data_ptr(),
            bool(handle._needs_pre_forward_unshard),
            bool(handle._prefetched),
            handle.needs_unshard() if hasattr(flat, "_local_shard") else None,
            handle._pre_forward_order_index,
            handle._post_forward_index,
            len(module._exec_order_data.handles_pre_forward_order),
            len(module._exec_order_data.handles_post_forward_order),
        )
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return facts
    state = state_of()
    facts[f"{name}: fsdp2 state"] = (
        str(state._training_state),
        state._is_root,
        id(state._state_ctx.iter_forward_root) if state._state_ctx.iter_forward_root else None,
        state._state_ctx.is_last_backward,
        len(state._states_to_forward_prefetch),
        len(state._modules_to_run_forward),
        state._state_ctx.post_backward_final_callback_queued,
        len(getattr(state._comm_ctx, "post_forward_order", ())),
        getattr(state._comm_ctx, "all_gather_state", None) is None,
    )
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    for index, group in enumerate(group for group in groups if group is not None):
        facts[f"{name}: fsdp2 group {index}"] = (
            str(group._training_state),
            str(group._sharded_state),
            str(group.post_forward_mesh_info is not None),
            group.unshard_async_op,
            group._all_gather_result is None,
            group._reshard_after_forward_event is None,
            group.reduce_grads,
            group.reshard_after_backward,
            list(group._post_forward_indices),
            [str(p.sharded_state) for p in group.fsdp_params],
        )
    return facts
