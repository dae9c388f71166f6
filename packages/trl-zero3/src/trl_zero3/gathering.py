"""Whole parameters where ZeRO-3 keeps shards: gathered once, in buckets, and released again."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trl_zero3 import _deepspeed_private as private
from trl_zero3._fsdp_private import is_dtensor
from trl_zero3.agreement import agreement_group, ending_together
from trl_zero3.memory import Launch, Size, check_fits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

# Buckets of this size, several at a time, were the fastest over gloo.
BUCKET_BYTES = 16 * 2**20
IN_FLIGHT = 4


@contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    check_memory: bool = True,
) -> Generator[None]:
    """Hold these parameters whole inside the body.

    Only what is missing is gathered and only that is released, so a context inside a context costs
    nothing and takes nothing from the outer one, and persistent parameters stay. Parameters that
    ZeRO-3 doesn't hold are left alone. What the body writes to a gathered parameter is forgotten.

    Where something is missing every rank must enter, and if the body raises on one rank the context
    raises on all. The parameters are restored first, without communication.

    Args:
        params: Parameters, or a module or engine for all of its own.
        bucket_bytes: How much to gather with one launch.
        check_memory: Refuse, on all ranks alike, what does not fit on one of them.

    Raises:
        ValueError: `bucket_bytes` is not positive, or a parameter is partitioned in a way that is
            not supported (NVMe, quantized, MiCS).
        TypeError: Something given is no parameter.
        GatherWontFit: There is not enough free memory.
        RuntimeError: On entry, a parameter is just being gathered by its engine, which was not
            given. On leaving, the body raised on another rank.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> with gathered(layer):  # nothing here is sharded
        ...     tuple(layer.weight.shape)
        (2, 2)
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    offload = private.offload_of(params) if isinstance(params, nn.Module) else None
    parameters = sharded_parameters(params)
    for parameter in parameters:
        reason = private.unsupported(parameter)
        if reason is not None:
            raise ValueError(f"Parameters can't be gathered under ZeRO-3 with {reason}.")
    if offload is not None:
        private.drain(offload)
    elif any(private.is_in_flight(parameter) for parameter in parameters):
        raise RuntimeError(
            "Some of these parameters are just being gathered by their engine: call "
            "gathered(engine), which waits for them first."
        )
    missing = [parameter for parameter in parameters if private.is_missing(parameter)]
    if not missing:
        yield
        return
    device = missing[0].device
    group = agreement_group(private.gathering_ranks(missing), device)
    if check_memory:
        check_fits(zero3_launches(missing, bucket_bytes), device, group)
    with ending_together(group):
        try:
            _gather(missing, bucket_bytes)
            yield
        finally:
            private.release(missing)


def zero3_launches(
    missing: list[Any], bucket_bytes: int = BUCKET_BYTES, world_size: int | None = None
) -> list[Launch]:
    """Return what `gathered` would launch for these parameters, on this many ranks."""
    launches: list[Launch] = []
    fetched: deque[int] = deque(maxlen=IN_FLIGHT)  # shards that come from another device
    for bucket in _buckets(missing, bucket_bytes):
        sizes = {parameter: zero3_size(parameter, world_size) for parameter in bucket}
        fetched.append(sum(sizes[p].shard for p in bucket if private.is_offloaded(p)))
        launches.append(Launch(sum(size.whole for size in sizes.values()), sum(fetched)))
    return launches


def zero3_size(parameter: Any, world_size: int | None = None) -> Size:
    """Return how large a parameter is, on this many ranks."""
    ranks = world_size or private.ranks_that_share(parameter)
    numel = private.whole_numel(parameter)
    # Of a tensor-parallel parameter only this rank's part is ever here.
    local = parameter.to_local().numel() if is_dtensor(parameter) else numel
    shard = -(-local // ranks) * parameter.element_size()
    return Size(numel, shard, shard * ranks)


def sharded_parameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
) -> list[Any]:
    """Return those that ZeRO-3 holds, once each, in the order that all ranks share."""
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    params = list(params)
    for parameter in params:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"gathered takes a module, a parameter or several parameters, and "
                f"{type(parameter).__name__} is none: pass `module.parameters()`."
            )
    held: list[Any] = [parameter for parameter in params if private.is_sharded(parameter)]
    return sorted(set(held), key=lambda parameter: parameter.ds_id)


def _gather(missing: list[Any], bucket_bytes: int) -> None:
    started: deque[Callable[[], None]] = deque()
    for bucket in _buckets(missing, bucket_bytes):
        started.append(private.gather(bucket))
        if len(started) == IN_FLIGHT:
            started.popleft()()
    for finish in started:
        finish()


def _buckets(parameters: list[Any], limit: int) -> Iterator[list[Any]]:
    bucket: list[Any] = []
    filled = 0
    for parameter in parameters:
        size = private.whole_numel(parameter) * parameter.element_size()
        if bucket and filled + size > limit:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket
