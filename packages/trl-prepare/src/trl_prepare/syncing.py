"""A reference that follows its policy: shard to shard where their layouts agree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from trl_prepare import _sharding_private as sharding
from trl_prepare.adapters import AdapterReference
from trl_zero3 import gathered, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
BUCKET_ELEMENTS = 8 * 2**20
VALUE_HEAD_MODEL = "pretrained_model"


def sync_reference_model(policy: nn.Module, reference: nn.Module, alpha: float) -> None:
    """Move a reference towards its policy: `(1 - alpha) * reference + alpha * policy`.

    This is the update of TR-DPO (https://arxiv.org/abs/2404.09656) and of target networks. It is
    computed in float32 at least, and is the same to the bit however the two are sharded. Where the
    layouts agree each rank uses its own shards; elsewhere one bounded bucket of the policy is
    gathered at a time. Call it on every rank, between two steps. Buffers are left as they are.

    Args:
        policy: The policy, plain or prepared. It may have more parameters, such as a value head.
        reference: The reference, plain or prepared, with the policy's architecture. Parameters that
            it shares with the policy are left alone.
        alpha: How far to go: 0 changes nothing, 1 makes it the policy.

    Raises:
        ValueError: `alpha` is not between 0 and 1; the policy has no parameter of the same name and
            shape as one of the reference; or ZeRO-3 holds one in a way that is not supported
            (NVMe, quantized, secondary partitions, MiCS). Nothing was changed then.

    Example:
        >>> policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> for model, value in ((policy, 1.0), (reference, 0.0)):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        >>> sync_reference_model(policy, reference, alpha=0.25)
        >>> reference.weight.item()
        0.25
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, where a number between 0 and 1 was expected.")
    if isinstance(reference, AdapterReference):
        raise ValueError(
            "This reference is the policy with its adapters off, which has nothing to move: make "
            "a model of its own with create_reference_model."
        )
    inner = unwrap(policy)
    if hasattr(inner, VALUE_HEAD_MODEL) and not hasattr(unwrap(reference), VALUE_HEAD_MODEL):
        sources = _Parameters(policy, f"{VALUE_HEAD_MODEL}.")
    else:
        sources = _Parameters(policy)
    targets = _Parameters(reference)
    _check(sources, targets)
    groups: dict[tuple[Any, Any], list[str]] = {}
    for name, place in targets.places.items():
        groups.setdefault((sources.places[name].unit, place.unit), []).append(name)
    with torch.no_grad():
        for (source_unit, target_unit), names in groups.items():
            with _summon(source_unit, writeback=False), _summon(target_unit, writeback=True):
                source, target = sources.find(source_unit), targets.find(target_unit)
                _sync([(source[name], target[name]) for name in names], alpha)
        sharding.refresh_zero3(targets.find(None).values(), BUCKET_ELEMENTS)


@dataclass
class _Place:
    """The FSDP1 unit that a parameter is in, if it is in one, and its whole shape."""

    unit: Any
    shape: tuple[int, ...]


class _Parameters:
    """A model's parameters by name; only FSDP1 units must be summoned to find theirs."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward, the last units are still whole
        inner = unwrap(model)
        names = {id(module): _clean(name) for name, module in model.named_modules()}
        base = names[id(inner)]  # "module" inside an engine
        self._names = {key: name.removeprefix(base).lstrip(".") for key, name in names.items()}
        self._prefix = prefix
        self.places: dict[str, _Place] = {}
        # The outermost comes first: FSDP1 makes a root of whatever it meets first.
        units = [module for module in model.modules() if _is_fsdp1(module)]
        self._outside = [] if units and unwrap(units[0]) is inner else [inner]
        for unit in (*units, None):
            with _summon(unit, writeback=False):
                for name, parameter in self.find(unit).items():
                    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                    self.places[name] = _Place(unit, shape)

    def find(self, unit: Any) -> dict[str, Any]:
        """Return the parameters of a unit, which must be summoned, or those outside of any."""
        return dict(self._own(self._outside if unit is None else list(unit.children())))

    def _own(self, modules: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        for module in modules:
            path = self._names[id(module)]
            for name, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{name}" if path else name
                if name.startswith(self._prefix):
                    yield name.removeprefix(self._prefix), parameter
            yield from self._own([m for m in module.children() if not _is_fsdp1(m)])


def _check(sources: _Parameters, targets: _Parameters) -> None:
    for name, place in targets.places.items():
        found = sources.places.get(name)
        if found is None or found.shape != place.shape:
            other = "none of this name" if found is None else f"one of {found.shape}"
            raise ValueError(
                f"The reference has a parameter {name!r} of {place.shape} and the policy has "
                f"{other}: both must be of one architecture, and a PEFT policy needs a PEFT copy."
            )
    for parameters in (sources, targets):
        for name, parameter in parameters.find(None).items():
            reason = sharding.unsupported_zero3(parameter)
            if reason is not None:
                raise ValueError(
                    f"The parameter {name!r} is under ZeRO-3 with {reason}, where it can't be "
                    "read or written shard by shard."
                )


def _sync(pairs: list[tuple[Any, Any]], alpha: float) -> None:
    apart: list[tuple[Any, Any]] = []
    # Tied parameters stand under several names, and move once.
    for source, target in {id(target): (source, target) for source, target in pairs}.values():
        if source is target:
            continue
        if sharding.same_zero3_layout(source, target):
            _mix(target.ds_tensor, source.ds_tensor, alpha)
        elif sharding.is_zero3(source):
            apart.append((source, target))
        else:
            _sync_whole(source, target, alpha)
    for bucket in _buckets(apart):
        with gathered([source for source, _ in bucket]):
            for source, target in bucket:
                _sync_whole(source, target, alpha)


def _sync_whole(source: Any, target: Any, alpha: float) -> None:
    """Sync from a parameter that is whole here, or a DTensor, to one in any form."""
    if isinstance(source, DTensor):
        if (
            isinstance(target, DTensor)
            and source.device_mesh == target.device_mesh
            and source.placements == target.placements
        ):
            _mix(target.to_local(), source.to_local(), alpha)
            return
        source = source.full_tensor()
    if sharding.is_zero3(target):
        shard = target.ds_tensor
        start = sharding.zero3_rank(target) * shard.numel()
        part = source.reshape(-1)[start : start + shard.numel()]  # shorter on the last rank
        _mix(shard.data[: part.numel()], part, alpha)
    elif isinstance(target, DTensor):
        mesh = target.device_mesh
        replicas = [Replicate()] * mesh.ndim
        whole = DTensor.from_local(source.to(mesh.device_type), mesh, replicas, run_check=False)
        _mix(target.to_local(), whole.redistribute(placements=target.placements).to_local(), alpha)
    else:
        _mix(target, source, alpha)


def _mix(target: Tensor, source: Tensor, alpha: float) -> None:
    if alpha == 1:
        target.copy_(source)
        return
    wide = torch.promote_types(torch.promote_types(target.dtype, source.dtype), torch.float32)
    parts = [(target, source)]
    if target.is_contiguous() and source.is_contiguous():
        flat = (tensor.detach().view(-1).split(BUCKET_ELEMENTS) for tensor in (target, source))
        parts = list(zip(*flat, strict=True))
    for part, other in parts:
        # Not one fused operation: it rounds otherwise, and not everywhere alike.
        moved = part.to(wide) * (1 - alpha) + other.to(part.device, wide) * alpha
        part.copy_(moved)


def _buckets(pairs: list[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    bucket: list[tuple[Any, Any]] = []
    filled = 0
    for source, target in pairs:
        if bucket and filled + source.ds_numel > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
            filled = 0
        bucket.append((source, target))
        filled += source.ds_numel
    if bucket:
        yield bucket


def _is_fsdp1(module: object) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _summon(unit: Any, *, writeback: bool) -> AbstractContextManager[Any]:
    if unit is None:
        return nullcontext()
    summon: Any = FullyShardedDataParallel.summon_full_params
    return summon(unit, recurse=False, writeback=writeback)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
