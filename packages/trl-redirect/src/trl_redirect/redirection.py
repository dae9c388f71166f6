"""Run a function in place of a module's `forward`, through whatever wraps the module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

_ABSENT: Any = object()
_installing = threading.Lock()
_thread = threading.local()  # .calls: this thread's pending calls, innermost last


class _Call:
    """One redirected call, pending until the inner module is reached."""

    __slots__ = ("detour", "run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.detour: _Detour | None = None

    def begin(self, module: nn.Module) -> None:
        with _installing:
            detour = module.__dict__.get("forward")
            if not isinstance(detour, _Detour):
                detour = _Detour(module)
                # Into the dictionary itself: nn.Module.__setattr__ only slows this down.
                module.__dict__["forward"] = detour
            detour.pending += 1
            self.detour = detour
        _pending_calls().append(self)

    def end(self) -> bool:
        """Give the module its forward back; False if that was done before."""
        detour, self.detour = self.detour, None
        if detour is None:
            return False
        calls = _pending_calls()
        if self in calls:
            calls.remove(self)
        with _installing:
            detour.pending -= 1
            if detour.pending == 0:
                detour.uninstall()
        return True


class _Detour:
    """A module's `forward` for as long as a redirected call to that module is pending."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = module.__dict__.get("forward", _ABSENT)
        self.__wrapped__ = module.forward  # what inspect.signature follows
        self.pending = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in reversed(_pending_calls()):
            if call.detour is self:
                # The function may inspect or call the real forward: it is back before it runs.
                call.end()
                return call.run(*args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    def uninstall(self) -> None:
        attributes = self.module.__dict__
        if attributes.get("forward") is not self:
            return  # replaced by the user meanwhile: theirs now
        if self.previous is _ABSENT:
            del attributes["forward"]
        else:
            attributes["forward"] = self.previous


def _pending_calls() -> list[_Call]:
    try:
        return _thread.calls
    except AttributeError:
        _thread.calls = []
        return _thread.calls


class ForwardRedirection:
    """Runs a function through a wrapper's `forward`, in place of the wrapped module's own.

    A wrapper such as DistributedDataParallel does its work around the wrapped module's `forward`:
    it gathers parameters, prepares the reduction of gradients, moves inputs. A loss that is taken
    by any other way skips that work. A redirection calls the wrapper, and at the moment when the
    wrapper calls the wrapped module, the function runs instead.

    The function runs at the wrapper's first call of the module; the wrapper's later calls, and
    every call that the function itself makes, reach the real `forward`. That is back before the
    function starts, and whatever was set on the module by hand comes back as it was. Redirections
    may be nested, and several threads may redirect through one module: each thread runs its own
    function. The wrapper must call the module in the thread that called the wrapper.

    Subclasses may override `on_after_inner_forward` and `on_after_outer_forward`.

    Args:
        context: A factory of context managers, entered around the function; for example
            `accelerator.autocast`, because the autocast that accelerate puts into a module's
            `forward` is not entered by a function that replaces that `forward`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> wrapper = torch.nn.Sequential(model)  # stands for DistributedDataParallel(model)
        >>> def loss(x):
        ...     return model(x).pow(2).mean()
        >>> x = torch.ones(2, 3)
        >>> redirected = ForwardRedirection()(wrapper, model, loss, x)
        >>> torch.equal(redirected, loss(x))
        True
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        if context is not None and not callable(context):
            raise TypeError(
                f"context must be a callable that makes a context manager, not {context!r}; "
                "for example pass accelerator.autocast without calling it."
            )
        self.context = context

    def __call__(
        self,
        wrapper_module: nn.Module,
        original_module: nn.Module,
        method: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `wrapper_module`, and run `method` where it calls `original_module`.

        Args:
            wrapper_module: The module to call, with `original_module` inside; or that module
                itself, whose hooks then run around the function.
            original_module: The module whose `forward` is replaced for this call.
            method: Called with the arguments that the wrapper hands on to `original_module`.
            *args: Given to `wrapper_module`.
            **kwargs: Given to `wrapper_module`.

        Returns:
            What `wrapper_module` returns: as a rule what `method` returned.

        Raises:
            TypeError: An argument has the wrong type; nothing was called.
            ValueError: A wrapper stands in between that changes the arguments (a PeftModel) or runs
                the module again in the backward pass (an activation-checkpoint wrapper); nothing
                was called.
            RuntimeError: The wrapper returned without having called `original_module`.
        """
        _check(wrapper_module, original_module, method)

        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if self.context is None:
                result = method(*inner_args, **inner_kwargs)
            else:
                with self.context():
                    result = method(*inner_args, **inner_kwargs)
            self.on_after_inner_forward(wrapper_module, original_module)
            return result

        call = _Call(run)
        try:
            call.begin(original_module)
            result = wrapper_module(*args, **kwargs)
            missed = call.end()
        finally:
            call.end()
        if missed:
            raise RuntimeError(
                f"original_module ({type(original_module).__name__}) was not reached: calling "
                f"wrapper_module ({type(wrapper_module).__name__}) did not call its forward in "
                "this thread, so the function never ran. Pass the module that the wrapper calls."
            )
        self.on_after_outer_forward(wrapper_module, original_module)
        return result

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: nn.Module) -> None:
        """Called when the function has returned, still inside the wrapper's `forward`."""

    def on_after_outer_forward(self, wrapper_module: nn.Module, original_module: nn.Module) -> None:
        """Called when the wrapper has returned and the module has its `forward` back."""


_ForwardRedirection = ForwardRedirection  # its name in TRL


def redirect(
    wrapper: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    redirect_context: Callable[[], AbstractContextManager[Any]] | None = None,
    **kwargs: Any,
) -> Any:
    """Call `wrapper`, and run `method` where it calls the model that it wraps.

    The model is found by following what DistributedDataParallel, DeepSpeedEngine, FSDP and
    torch.compile wrap; where there is no such wrapper, `wrapper` itself is the model. A model with
    a submodule of its own named `module` must be given to `ForwardRedirection` by hand.

    Args:
        wrapper: The module to call.
        method: Called with the arguments that `wrapper` hands on to the model.
        *args: Given to `wrapper`.
        redirect_context: The `context` of `ForwardRedirection`.
        **kwargs: Given to `wrapper`.

    Returns:
        What `wrapper` returns: as a rule what `method` returned.

    Raises:
        TypeError: As `ForwardRedirection` does.
        ValueError: As `ForwardRedirection` does.
        RuntimeError: As `ForwardRedirection` does.

    Example:
        >>> import torch
        >>> from collections import OrderedDict
        >>> model = torch.nn.Linear(3, 1)
        >>> # stands for DistributedDataParallel(model), which has it as `module`, too
        >>> wrapper = torch.nn.Sequential(OrderedDict(module=model))
        >>> x = torch.ones(2, 3)
        >>> loss = redirect(wrapper, lambda x: model(x).pow(2).mean(), x)
        >>> torch.equal(loss, model(x).pow(2).mean())
        True
    """
    inner = wrapper
    if isinstance(wrapper, nn.Module):
        while (module := _wrapped(inner)) is not None:
            inner = module
    return ForwardRedirection(redirect_context)(wrapper, inner, method, *args, **kwargs)


# Where wrappers keep what they wrap: DistributedDataParallel, DataParallel and DeepSpeedEngine;
# torch.compile; FullyShardedDataParallel; torch.distributed's activation checkpointing. The last
# two are private (torch 2.6 to 2.13).
_CHECKPOINTED = "_checkpoint_wrapped_module"
_INNER_NAMES = ("module", "_orig_mod", "_fsdp_wrapped_module", _CHECKPOINTED)


def _wrapped(module: nn.Module) -> nn.Module | None:
    for name in _INNER_NAMES:
        inner = module._modules.get(name)
        if inner is not None:
            return inner
    return None


def _check(wrapper: nn.Module, original: nn.Module, method: Callable[..., Any]) -> None:
    for name, module in (("wrapper_module", wrapper), ("original_module", original)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} must be a torch.nn.Module, not {type(module).__name__}.")
    if not callable(method):
        raise TypeError(f"method must be callable, not {type(method).__name__}.")

    module: nn.Module | None = wrapper
    while module is not None and module is not original:
        reason = _refusal(module)
        if reason:
            raise ValueError(reason)
        module = _wrapped(module)


def _refusal(module: nn.Module) -> str | None:
    # A model of PEFT's can't be here before PEFT is imported.
    peft_model = getattr(sys.modules.get("peft"), "PeftModel", None)
    if peft_model is not None and isinstance(module, peft_model):
        return (
            "A PeftModel stands between wrapper_module and original_module: its forward adds "
            "arguments of its own, which the function never asked for. Pass the PeftModel as "
            "original_module."
        )
    if _CHECKPOINTED in module._modules:
        return (
            "An activation-checkpoint wrapper stands around original_module: it runs the forward "
            "again in the backward pass, when the redirection is over. Apply activation "
            "checkpointing to layers inside original_module."
        )
    return None
