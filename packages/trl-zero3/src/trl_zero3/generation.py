"""How a model generates inside a context: cached, with its own settings, synced where needed."""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

_ABSENT = object()
_WRAPS = "_trl_zero3_wraps"


@contextmanager
def disable_gradient_checkpointing(
    model: nn.Module, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Generator[None]:
    """Switch gradient checkpointing off inside, and back on exactly where it was on.

    Each module's own flag is switched, so the arguments given when it was enabled, and layers that
    had it off, come back as they were.

    Args:
        model: Any module; one without gradient checkpointing is left alone.
        gradient_checkpointing_kwargs: Not needed: what was there before comes back. Accepted since
            TRL's function takes it.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> model.gradient_checkpointing = True
        >>> with disable_gradient_checkpointing(model):
        ...     model.gradient_checkpointing
        False
        >>> model.gradient_checkpointing
        True
    """
    checkpointing = [m for m in model.modules() if _own(m, "gradient_checkpointing")]
    with _attribute(checkpointing, "gradient_checkpointing", False):
        yield


@contextmanager
def kept_training_modes(model: nn.Module) -> Generator[None]:
    """Bring every module's training flag back, whatever the body calls."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def generation_config_for(model: nn.Module, generation_kwargs: dict[str, Any] | None) -> Any | None:
    """Make the generation config that holds inside: the model's own, cached, with the overrides.

    Raises:
        ValueError: There are overrides, but no config to override or none of that name.
    """
    config = _generation_config(model)
    if config is None:
        if generation_kwargs:
            raise ValueError(
                f"generation_kwargs were given, but this {type(model).__name__} has no "
                "generation_config to override: leave them out."
            )
        return None
    config = deepcopy(config)
    if config.use_cache is False:
        config.use_cache = True  # trainers switch it off for the training forward
    if generation_kwargs:
        unknown = config.update(**generation_kwargs)
        if unknown:
            raise ValueError(
                f"generation_kwargs {sorted(unknown)} are not settings of "
                f"{type(config).__name__}: remove or correct them."
            )
    return config


@contextmanager
def generation_settings(
    model: nn.Module, config: Any | None, *, collective: bool
) -> Generator[None]:
    """Use this generation config inside, and sync the ranks in `generate` exactly if needed.

    Args:
        model: The module that is handed to the user.
        config: From `generation_config_for`.
        collective: Forwards inside involve communication, so every rank must run as many.
    """
    original = _generation_config(model)
    owners = (
        []
        if original is None
        else [m for m in model.modules() if vars(m).get("generation_config") is original]
    )
    generating: list[Any] = [module for module in model.modules() if _takes_synced_gpus(module)]
    before = [(module, vars(module).get("generate", _ABSENT)) for module in generating]
    try:
        for module in generating:
            vars(module)["generate"] = _synced(module.generate, collective)
        with _attribute(owners, "generation_config", config):
            yield
    finally:
        for module, value in before:
            _set_or_delete(module, "generate", value)


def _generation_config(model: nn.Module) -> Any | None:
    """Return the outermost config, which wrappers that have none of their own delegate to."""
    configs = (vars(module).get("generation_config") for module in model.modules())
    return next((config for config in configs if config is not None), None)


def _takes_synced_gpus(module: nn.Module) -> bool:
    generate = _own(module, "generate")
    return callable(generate) and "synced_gpus" in inspect.signature(generate).parameters


def _synced(generate: Callable[..., Any], collective: bool) -> Callable[..., Any]:
    """Give `generate` the right default of `synced_gpus`; wrap the original, never a wrapper."""
    generate = getattr(generate, _WRAPS, generate)
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def with_default(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        asked = bound.arguments.get("synced_gpus")
        if asked is None:
            if "synced_gpus" in bound.arguments:  # None, perhaps by position
                bound.arguments["synced_gpus"] = collective
                return generate(*bound.args, **bound.kwargs)
            kwargs["synced_gpus"] = collective
        elif collective and not asked:
            raise ValueError(
                "synced_gpus=False would hang as soon as one rank finishes before another, since "
                "every forward here communicates with other ranks: leave it out."
            )
        return generate(*args, **kwargs)

    setattr(with_default, _WRAPS, generate)
    return with_default


def _own(module: nn.Module, name: str) -> Any:
    """Look a name up on the instance and its class only: wrappers delegate the others inside."""
    return vars(module).get(name, getattr(type(module), name, None))


@contextmanager
def _attribute(modules: list[nn.Module], name: str, value: Any) -> Generator[None]:
    before = [(module, vars(module).get(name, _ABSENT)) for module in modules]
    try:
        for module in modules:
            vars(module)[name] = value
        yield
    finally:
        for module, old in before:
            _set_or_delete(module, name, old)


def _set_or_delete(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
