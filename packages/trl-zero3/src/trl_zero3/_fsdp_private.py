"""The names of FSDP that are not its public API, all in one place; read in torch 2.13.

FSDP2 keeps its groups in `_fsdp_param_groups`; before torch 2.12 it was one `_fsdp_param_group`.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl_zero3._torch_private import hook_entries
from trl_zero3.memory import Size

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

STATE_FIELDS = ("_training_state",)
GROUP_FIELDS = ("_training_state", "post_forward_mesh_info", "_reshard_after_forward_event")
CONTEXT_FIELDS = ("iter_forward_root", "post_backward_final_callback_queued")
COMMUNICATION_FIELDS = ("all_gather_state",)
FSDP1_STATE_FIELDS = ("training_state",)
FSDP1_HANDLE_FIELDS = (
    "_training_state",
    "_needs_pre_forward_unshard",
    "_post_forward_index",
    "_pre_forward_order_index",
)
FSDP1_ORDER_FIELDS = ("current_order_index", "warn_status")
FSDP1_ORDER_LISTS = ("handles_post_forward_order", "handles_pre_forward_order")


def is_fsdp1(module: object) -> bool:
    """Say whether this is FSDP1's wrapper; nothing is if FSDP was never imported."""
    return _is_instance(module, "FullyShardedDataParallel")


def is_fsdp2(module: object) -> bool:
    """Say whether `fully_shard` was applied to this very module."""
    return _is_instance(module, "FSDPModule")


def is_dtensor(value: object) -> bool:
    """Say whether a tensor is spread over ranks; none is if nobody imported that kind."""
    return _is_instance(value, "DTensor", "tensor")


def fsdp2_prepare(root: Any) -> None:
    """Do what FSDP2 puts off until the first forward."""
    if root._get_fsdp_state()._is_root is None:
        root._get_fsdp_state()._lazy_init()


def fsdp2_states(root: Any) -> list[Any]:
    """Return the states in the tree of a module, each once."""
    found = {id(s): s for m in root.modules() if is_fsdp2(m) for s in [m._get_fsdp_state()]}
    return list(found.values())


def fsdp2_groups(states: Iterable[Any]) -> list[Any]:
    """Return the parameter groups of these states, in the order of the module tree."""
    groups: list[Any] = []
    for state in states:
        if hasattr(state, "_fsdp_param_groups"):
            groups.extend(state._fsdp_param_groups)
        elif state._fsdp_param_group is not None:
            groups.append(state._fsdp_param_group)
    return groups


@contextmanager
def fsdp2_idle(states: list[Any], groups: list[Any]) -> Generator[None]:
    """Start the body from the state between two steps, and bring back what there was.

    Inside, a forward doesn't reshard what it used.
    """
    contexts = _unique(state._state_ctx for state in states)
    communications = _unique(state._comm_ctx for state in states)
    lists = [group._post_forward_indices for group in groups]
    lists += [communication.post_forward_order for communication in communications]
    with (
        _kept(states, STATE_FIELDS),
        _kept(groups, GROUP_FIELDS),
        _kept(contexts, CONTEXT_FIELDS),
        _kept(communications, COMMUNICATION_FIELDS),
        _kept_collections(lists),
        _kept_collections([state._modules_to_run_forward for state in states]),
    ):
        _make_idle(states, groups, contexts)
        for group in groups:
            group.post_forward_mesh_info = None
        yield


def fsdp2_unshard(groups: list[Any]) -> None:
    """Gather groups, the next one always on its way while one is waited for."""
    for index, group in enumerate(groups):
        group.unshard(async_op=True)
        if index:
            groups[index - 1].wait_for_unshard()
    if groups:
        groups[-1].wait_for_unshard()


@contextmanager
def fsdp2_gradients(groups: list[Any]) -> Generator[None]:
    """Forget what a backward inside leaves on whole parameters: the next one would add to it."""
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    before = {id(p): p._unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")}
    try:
        yield
    finally:
        for parameter in parameters:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = before.get(id(parameter))


def fsdp2_hook_entries(states: list[Any]) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield where the hooks sit that only gather, or that shard when the state is saved.

    The forward hooks of a policy that casts do more, and stay.
    """
    for group in fsdp2_groups(states):
        yield from hook_entries(group._module_to_pre_save_state_dict_hook_handle.values())
    for state in states:
        policy = state._mp_policy
        if policy.param_dtype is None and policy.output_dtype is None:
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                # Where modules share a group, one handle stands for all of their hooks.
                yield from hook_entries(getattr(handle, "handles", [handle]))


def fsdp2_reshard(groups: list[Any]) -> None:
    """Go back to shards, whatever state an interrupted gather or forward left."""
    for group in groups:
        group.wait_for_unshard()
        group._to_sharded()


def fsdp2_ranks(groups: list[Any]) -> list[int]:
    """Return the ranks that these groups are sharded or replicated over."""
    meshes = [group.mesh_info.mesh.mesh.flatten().tolist() for group in groups]
    return max(meshes, key=len, default=[])


def fsdp2_size(group: Any, world_size: int | None = None) -> Size:
    """Return how large a parameter group is, on this many ranks."""
    ranks = world_size or getattr(group.mesh_info, "shard_mesh_size", 1)
    numel = shard = whole = 0
    for parameter in group.fsdp_params:
        padded = list(parameter._orig_size)
        numel += math.prod(padded)
        padded[parameter.fsdp_placement.dim] = -(-padded[parameter.fsdp_placement.dim] // ranks)
        dtype = group.mp_policy.param_dtype or parameter.sharded_param.dtype
        if not parameter.offload_to_cpu:
            shard += math.prod(padded) * parameter.sharded_param.dtype.itemsize
        whole += math.prod(padded) * ranks * dtype.itemsize
    return Size(numel, shard, whole)


def fsdp2_parameters(group: Any) -> list[Any]:
    """Return a group's parameters, whichever of their two forms the modules hold."""
    forms = ("sharded_param", "_unsharded_param")
    found = [getattr(parameter, form, None) for parameter in group.fsdp_params for form in forms]
    return [parameter for parameter in found if parameter is not None]


def fsdp1_groups(root: Any) -> list[Any]:
    """Return the process groups that FSDP1 shards and, if hybrid, replicates over."""
    groups = (root.process_group, getattr(root, "_inter_node_pg", None))
    return [group for group in groups if group is not None]


def fsdp1_handles(root: Any) -> list[Any]:
    """Return the handles of the units in the tree of a root, its own first."""
    states = [module for module in root.modules() if is_fsdp1(module)]
    return [state._handle for state in states if state._handle is not None]


def fsdp1_size(handle: Any, world_size: int | None = None) -> Size:
    """Return how large a unit is, on this many ranks."""
    ranks = (world_size or handle.world_size) if handle.uses_sharded_strategy else 1
    numel = handle.flat_param._unpadded_unsharded_size.numel()
    shard = -(-numel // ranks) * handle.flat_param.element_size()
    offloaded = handle._offload_params and handle.device.type != "cpu"
    return Size(numel, 0 if offloaded else shard, shard * ranks)


def fsdp1_states(root: Any) -> list[Any]:
    """Return the FSDP1 wrappers in the tree of their root, made ready; the wrapper is the state."""
    from torch.distributed.fsdp import _runtime_utils

    _runtime_utils._lazy_init(root, root)
    return list(root._all_fsdp_states)


@contextmanager
def fsdp1_idle(states: list[Any]) -> Generator[None]:
    """Start the body from the state between two steps, and bring back what there was.

    On leaving, units that a raising forward left whole become shards again.
    """
    from torch.distributed.fsdp import _runtime_utils

    handles = [state._handle for state in states if state._handle is not None]
    owners = [state for state in states if state._handle is not None]
    sharded = [handle.needs_unshard() for handle in handles]
    orders = _unique(state._exec_order_data for state in states)
    lists = [getattr(order, name) for order in orders for name in FSDP1_ORDER_LISTS]
    with (
        _kept(states, FSDP1_STATE_FIELDS),
        _kept(handles, FSDP1_HANDLE_FIELDS),
        _kept(orders, FSDP1_ORDER_FIELDS),
        _kept_collections(lists),
    ):
        for state in states:
            state.training_state = type(state.training_state).IDLE
        for handle in handles:
            handle._training_state = type(handle._training_state).IDLE
        try:
            yield
        finally:
            for state, handle, was_sharded in zip(owners, handles, sharded, strict=True):
                if was_sharded and not handle.needs_unshard():
                    _runtime_utils._reshard(state, handle, free_unsharded_flat_param=True)


def fsdp1_is_summoned(root: Any) -> bool:
    """Say whether an outer context already holds the root's own parameters whole."""
    return root.training_state.name == "SUMMON_FULL_PARAMS"


def _make_idle(states: list[Any], groups: list[Any], contexts: list[Any]) -> None:
    for item in (*states, *groups):
        item._training_state = type(item._training_state).IDLE
    for context in contexts:
        context.iter_forward_root = None


@contextmanager
def _kept(objects: list[Any], names: tuple[str, ...]) -> Generator[None]:
    values = [[getattr(item, name) for name in names] for item in objects]
    try:
        yield
    finally:
        for item, kept in zip(objects, values, strict=True):
            for name, value in zip(names, kept, strict=True):
                setattr(item, name, value)


@contextmanager
def _kept_collections(collections: list[Any]) -> Generator[None]:
    """Empty lists and sets inside, and fill them again: others hold these very objects."""
    contents = [list(collection) for collection in collections]
    try:
        for collection in collections:
            collection.clear()
        yield
    finally:
        for collection, content in zip(collections, contents, strict=True):
            collection.clear()
            (collection.extend if isinstance(collection, list) else collection.update)(content)


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in objects}.values())


def _is_instance(value: object, name: str, module: str = "fsdp") -> bool:
    kind = getattr(sys.modules.get(f"torch.distributed.{module}"), name, None)
    return kind is not None and isinstance(value, kind)
