"""Whole parameters where ZeRO-3 keeps shards: gathered once, in buckets, and released again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from trl_zero3 import _deepspeed_private as private

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

BUCKET_BYTES = 128 * 2**20


@contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES
) -> Generator[None]:
    """Hold these parameters whole inside the body.

    Only what is missing is gathered and only that is released, so a context inside a context costs
    nothing and takes nothing from the outer one, and persistent parameters stay. Parameters that
    ZeRO-3 doesn't hold are left alone. What the body writes to a gathered parameter is forgotten.
    Every rank must enter; leaving involves no communication.

    Args:
        params: Parameters, or a module or engine for all of its own.
        bucket_bytes: How much to gather with one launch; the memory needed on top of the gathered
            parameters is one bucket.

    Raises:
        ValueError: `bucket_bytes` is not positive, or a parameter is partitioned in a way that is
            not supported (hierarchical, NVMe, quantized).
        RuntimeError: A parameter is just being gathered by its engine, which was not given.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> with gathered(layer):  # nothing here is sharded
        ...     tuple(layer.weight.shape)
        (2, 2)
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    offload = private.offload_of(params) if isinstance(params, nn.Module) else None
    sharded = _sharded(params)
    for parameter in sharded:
        reason = private.unsupported(parameter)
        if reason is not None:
            raise ValueError(f"Parameters can't be gathered under ZeRO-3 with {reason}.")
    if offload is not None:
        private.drain(offload)
    elif any(private.is_in_flight(parameter) for parameter in sharded):
        raise RuntimeError(
            "Some of these parameters are just being gathered by their engine: call "
            "gathered(engine), which waits for them first."
        )
    missing = [parameter for parameter in sharded if private.is_missing(parameter)]
    try:
        for bucket in _buckets(missing, bucket_bytes):
            private.gather(bucket)
        yield
    finally:
        private.release(missing)


def _sharded(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
) -> list[Any]:
    """Return those that ZeRO-3 holds, once each, in the order that all ranks share."""
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    held: list[Any] = [parameter for parameter in params if private.is_sharded(parameter)]
    return sorted(set(held), key=lambda parameter: parameter.ds_id)


def _buckets(parameters: list[Any], limit: int) -> Iterator[list[Any]]:
    bucket: list[Any] = []
    filled = 0
    for parameter in parameters:
        size = parameter.ds_numel * parameter.element_size()
        if bucket and filled + size > limit:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket
