"""Forwards through a ZeRO-3 engine's hooks that leave the training step's trace alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trl_zero3 import _deepspeed_private as private

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def streaming(engine: nn.Module) -> Generator[None]:
    """Let the hooks gather and release layer by layer inside, and restore what they changed.

    The forwards inside follow a trace of their own. Parameters that were whole stay whole, the
    others end up as shards again. Every rank must run the same number of forwards.

    Args:
        engine: A DeepSpeed engine at ZeRO stage 3, its hooks in place.
    """
    offload = private.offload_of(engine)
    if offload is None:
        raise ValueError("streaming takes a DeepSpeed engine at ZeRO stage 3.")
    private.drain(offload)
    parameters = [p for p in offload.module.parameters() if private.is_sharded(p)]
    missing = [p for p in parameters if private.is_missing(p)]
    active = [set(p.ds_active_sub_modules) for p in parameters]
    external = [p.is_external_param for p in parameters]
    try:
        for parameter in parameters:
            # A trace that is still being recorded releases everything, persistent or not, but what
            # belongs to other modules too.
            if not private.is_missing(parameter):
                parameter.is_external_param = True
        with private.forward_state(offload.module), private.own_trace(offload):
            yield
    finally:
        private.release(missing)
        for parameter, modules, was_external in zip(parameters, active, external, strict=True):
            parameter.ds_active_sub_modules.clear()
            parameter.ds_active_sub_modules.update(modules)
            parameter.is_external_param = was_external
