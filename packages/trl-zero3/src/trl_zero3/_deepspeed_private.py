"""The names of DeepSpeed that are not its public API, all in one place.

All of them were read in DeepSpeed 0.16.4 and 0.19.8; a comment says where only one has a name.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trl_zero3._torch_private import gather_each
from trl_zero3._torch_private import hook_entries as handle_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

# Class-private names of PartitionedParameterCoordinator.
AVAILABLE_COUNT = "_PartitionedParameterCoordinator__n_available_params"
# What the hooks keep on each module, whether or not a gradient is wanted: two counts, and two
# functions, which 0.16.4 makes in the first forward.
MODULE_STATE = ("applied_pre_backward_ref_cnt", "ds_grads_remaining", "pre_bwd_fn", "post_bwd_fn")
_GENERATION_COORDINATOR = "_trl_zero3_generation_coordinator"


def is_engine(model: object) -> bool:
    """Say whether this is a DeepSpeed engine; nothing is if DeepSpeed was never imported."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return engine is not None and isinstance(model, engine)


def offload_of(engine: object) -> Any | None:
    """Return the object that owns a ZeRO-3 engine's hooks and residency; None at other stages."""
    optimizer = getattr(engine, "optimizer", None)
    # Without an optimizer, stage 3 puts the offload object itself in the optimizer's place.
    offload = getattr(optimizer, "parameter_offload", optimizer)
    ours = hasattr(offload, "forward_hooks") and hasattr(offload, "get_param_coordinator")
    return offload if ours else None


def is_inside_of_engine(model: nn.Module) -> bool:
    """Say whether some ZeRO-3 engine has numbered this module and put its hooks on it."""
    return "ds_id" in vars(model)


def hook_entries(engine: object, offload: Any) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield where each of the engine's own hooks sits: a hook dictionary and the key in it."""
    handles = [*offload.forward_hooks, *offload.backward_hooks]
    start = vars(offload).get("fwd_pre_hook")  # 0.19.8; 0.16.4 keeps no handle of it
    # 0.19.8: they set up and end the engine's forward, and may be None
    outer = [vars(engine).get(f"module_forward_{when}_hook") for when in ("pre", "post")]
    yield from handle_entries(handle for handle in (*handles, start, *outer) if handle is not None)
    if start is None:
        dictionary = offload.module._forward_pre_hooks
        for key, hook in dictionary.items():
            if _wraps(hook, "_start_of_forward_hook"):
                yield dictionary, key


def has_its_hooks(offload: Any) -> bool:
    """Say whether the hooks that the offload object registered are all still in place."""
    handles = [*offload.forward_hooks, *offload.backward_hooks]
    return bool(handles) and all(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles)


def drain(offload: Any) -> None:
    """Wait for the parameters in flight and release them, as the engine does before a forward."""
    offload.get_param_coordinator()._clean_inflight_param_registry()


@contextmanager
def own_trace(offload: Any) -> Generator[None]:
    """Let forwards inside record and follow a trace of their own, not the training step's.

    The coordinator caches by its own identity what to release at each step of a trace, so a trace
    put into the old coordinator would be followed with the other trace's answers: another
    coordinator stands in. It is kept, since that cache never forgets one.
    """
    training = offload.param_coordinator
    generation = vars(offload).get(_GENERATION_COORDINATOR)
    if generation is None:
        generation = copy(training)
        if generation.is_invalid_trace():
            generation._clear_trace_structures()  # else both would record into one list
        else:
            generation._invalidate_trace()
        setattr(offload, _GENERATION_COORDINATOR, generation)
    setattr(generation, AVAILABLE_COUNT, 0)
    if generation is training:  # a context inside a context
        yield
        return
    offload.param_coordinator = generation
    try:
        yield
    finally:
        try:
            generation._clean_inflight_param_registry()
            if generation.is_record_trace():
                generation._invalidate_trace()  # half a trace, if the body raised
        finally:
            offload.param_coordinator = training


@contextmanager
def forward_state(model: nn.Module) -> Generator[None]:
    """Put back what forwards leave behind, also one that raises: stack, flags and counts."""
    from deepspeed.runtime.zero import parameter_offload

    stack = list(parameter_offload.FWD_MODULE_STACK)
    modules = list(model.modules())
    # ZeRO-3's own kind of dictionary, which has the flag
    parameters: list[Any] = [module._parameters for module in modules]
    flags = [getattr(own, "_in_forward", None) for own in parameters]
    states = [{key: vars(module).get(key) for key in MODULE_STATE} for module in modules]
    try:
        yield
    finally:
        parameter_offload.FWD_MODULE_STACK[:] = stack
        for own, flag in zip(parameters, flags, strict=True):
            if flag is not None:
                own._in_forward = flag
        for module, state in zip(modules, states, strict=True):
            for key, value in state.items():
                if value is not None:
                    vars(module)[key] = value
                else:
                    vars(module).pop(key, None)


@contextmanager
def plain_linears(model: nn.Module) -> Generator[None]:
    """Let linear layers inside call torch's own function.

    DeepSpeed puts another in its place, for the whole process, which keeps less for the backward
    and takes a tenth of a millisecond longer each time: as much as the layer itself for one token.
    """
    if torch.nn.functional.linear.__module__ != "deepspeed.runtime.zero.linear":
        yield
        return
    layers = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    try:
        for layer in layers:
            vars(layer)["forward"] = MethodType(_plain_linear, layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _plain_linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return torch._C._nn.linear(input, layer.weight, layer.bias)


_plain_linear.__name__ = "forward"  # by which the method of a saved layer is found again


def is_sharded(parameter: nn.Parameter) -> bool:
    """Say whether ZeRO-3 holds this parameter, gathered or not."""
    return hasattr(parameter, "ds_status")


def is_missing(parameter: Any) -> bool:
    """Say whether only a shard of the parameter is here."""
    return parameter.ds_status.name == "NOT_AVAILABLE"


def is_in_flight(parameter: Any) -> bool:
    """Say whether the parameter is being gathered at this moment."""
    return parameter.ds_status.name == "INFLIGHT"


def unsupported(parameter: Any) -> str | None:
    """Return why a parameter can't be gathered here, if it can't."""
    if parameter.nvme_swapper is not None:
        return "offload to NVMe"
    if hasattr(parameter.ds_tensor, "ds_quant_scale"):
        return "quantized weights (zero_quantized_nontrainable_weights)"
    if hasattr(parameter, "comm"):  # 0.16.4
        return "MiCS, which shards over a part of the ranks"
    return None


def is_deepcompiled(engine: Any) -> bool:
    """Say whether gathering is compiled into the engine's graphs; 0.16.4 has no DeepCompile."""
    return getattr(engine, "_deepcompile_active", False)


def gathering_ranks(parameters: list[Any]) -> list[int]:
    """Return the ranks that gather these parameters; experts may be gathered by fewer."""
    groups = {id(group): group for p in parameters for group in [p.ds_process_group]}.values()
    return max((dist.get_process_group_ranks(group) for group in groups), key=len, default=[])


def whole_numel(parameter: Any) -> int:
    """Return how many elements the parameter has when it is whole, whoever holds it."""
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def ranks_that_share(parameter: Any) -> int:
    """Return over how many ranks the parameter is sharded."""
    return dist.get_world_size(parameter.ds_process_group) if is_sharded(parameter) else 1


def is_offloaded(parameter: Any) -> bool:
    """Say whether the shard lies in the memory of another device."""
    return is_sharded(parameter) and parameter.ds_tensor.device.type != parameter.device.type


def gather(parameters: list[Any]) -> Callable[[], None]:
    """Start to gather these parameters, all missing, with one launch for each process group.

    They are gathered straight into place. DeepSpeed's own coalesced gather copies them once more,
    and with hierarchical partitioning it reads a second set of shards, which may be out of date.

    Returns:
        What waits for them and puts them in place.
    """
    started = []
    by_group: dict[Any, list[Any]] = {}
    for parameter in parameters:
        by_group.setdefault(parameter.ds_process_group, []).append(parameter)
    for group, members in by_group.items():
        world_size = dist.get_world_size(group)
        shards = [p.ds_tensor.detach().to(p.device).view(-1) for p in members]
        wholes = [shard.new_empty(shard.numel() * world_size) for shard in shards]
        # As bytes, so that one launch takes all dtypes.
        wait = gather_each(
            [whole.view(torch.uint8) for whole in wholes],
            [shard.view(torch.uint8) for shard in shards],
            group,
        )
        started.append((wait, members, wholes))

    def finish() -> None:
        for wait, members, wholes in started:
            wait()
            for parameter, whole in zip(members, wholes, strict=True):
                parameter.data = whole.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
                parameter.ds_status = type(parameter.ds_status).AVAILABLE

    return finish


def release(parameters: list[Any]) -> None:
    """Go back to the shards of these parameters; what was written to them is forgotten."""
    from deepspeed.runtime.zero.partition_parameters import free_param

    for parameter in parameters:
        if not is_missing(parameter):
            parameter.ds_active_sub_modules.clear()  # DeepSpeed refuses to free one in use
            free_param(parameter)


def _wraps(hook: Any, name: str) -> bool:
    """Say whether a hook is this function, or DeepSpeed's profiling wrapper around it."""
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(getattr(function, "__name__", None) == name for function in (hook, *inner))
