"""Frozen models, and models that are in eval mode for a while."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextlib.contextmanager
def frozen(model: nn.Module) -> Generator[None]:
    """Freeze the parameters and set eval mode; an exception in the body takes both back."""
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    model.requires_grad_(False)
    model.eval()
    try:
        yield
    except BaseException:
        for parameter in required:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
        raise


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put a model in eval mode inside; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
