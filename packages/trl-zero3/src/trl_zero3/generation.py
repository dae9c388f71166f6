"""How a model generates inside a context: cached, with its own settings, synced where needed."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from copy import deepcopy
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from torch import nn

_ABSENT = object()


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
    with _attribute(dict.fromkeys(checkpointing, False), "gradient_checkpointing"):
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


def generation_configs_for(
    model: nn.Module, generation_kwargs: dict[str, Any] | None
) -> dict[nn.Module, Any]:
    """Make the generation configs that hold inside: each module's own, cached, with the overrides.

    Returns:
        The config of each module that has one; modules that share one go on sharing it.

    Raises:
        ValueError: There are overrides, but no config to override or none of that name.
    """
    found = {m: vars(m).get("generation_config") for m in model.modules()}
    originals = {module: config for module, config in found.items() if config is not None}
    if generation_kwargs and not originals:
        raise ValueError(
            f"generation_kwargs were given, but this {type(model).__name__} has no "
            "generation_config to override: leave them out."
        )
    changed = {
        id(config): _changed(config, generation_kwargs or {}) for config in originals.values()
    }
    return {module: changed[id(config)] for module, config in originals.items()}


@contextmanager
def generation_settings(
    model: nn.Module, configs: dict[nn.Module, Any], *, collective: bool
) -> Generator[None]:
    """Use these generation configs inside, and sync the ranks in `generate` exactly if needed.

    Args:
        model: The module that is handed to the user.
        configs: From `generation_configs_for`.
        collective: Forwards inside involve communication, so every rank must run as many.
    """
    synced = {m: _SyncedGenerate(m, collective) for m in model.modules() if _takes_synced_gpus(m)}
    with _attribute(synced, "generate"), _attribute(configs, "generation_config"):
        yield


def _changed(config: Any, overrides: dict[str, Any]) -> Any:
    config = deepcopy(config)
    if config.use_cache is False:
        config.use_cache = True  # trainers switch it off for the training forward
    unknown = config.update(**overrides) if overrides else None
    if unknown:
        raise ValueError(
            f"generation_kwargs {sorted(unknown)} are not settings of "
            f"{type(config).__name__}: remove or correct them."
        )
    return config


class _SyncedGenerate:
    """A module's `generate` with the right default of `synced_gpus`; it wraps no other of its kind.

    It finds what to call through the module, and leaves copies of the module without itself.
    """

    def __init__(self, module: Any, collective: bool) -> None:
        present = vars(module).get("generate")
        self._own = present._own if isinstance(present, _SyncedGenerate) else present
        self._module = module
        self._collective = collective

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._own or MethodType(type(self._module).generate, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate = self.__wrapped__
        given = inspect.signature(generate).bind_partial(*args, **kwargs)
        asked = given.arguments.get("synced_gpus")
        if self._collective and asked is not None and not asked:
            raise ValueError(
                "synced_gpus=False would hang as soon as one rank finishes before another, since "
                "every forward here communicates with other ranks: leave it out."
            )
        if asked is None:
            given.arguments["synced_gpus"] = self._collective
        return generate(*given.args, **given.kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self.__wrapped__,)


def _as_it_is(generate: Callable[..., Any]) -> Callable[..., Any]:
    return generate


def _takes_synced_gpus(module: nn.Module) -> bool:
    generate = _own(module, "generate")
    try:
        return callable(generate) and "synced_gpus" in inspect.signature(generate).parameters
    except ValueError:  # a builtin that tells no signature
        return False


def _own(module: nn.Module, name: str) -> Any:
    """Look a name up on the instance and its class only: wrappers delegate the others inside."""
    return vars(module).get(name, getattr(type(module), name, None))


@contextmanager
def _attribute(values: Mapping[nn.Module, Any], name: str) -> Generator[None]:
    """Give modules an attribute inside, each its own value."""
    before = [(module, vars(module).get(name, _ABSENT)) for module in values]
    try:
        for module, value in values.items():
            vars(module)[name] = value
        yield
    finally:
        for module, old in before:
            if old is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = old
