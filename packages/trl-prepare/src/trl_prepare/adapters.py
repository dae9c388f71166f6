"""A PEFT policy that is its own reference: with its adapters off, or with a frozen copy of them."""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trl_prepare._private_names import ZERO3_PARAMETER_MARK
from trl_prepare.freezing import evaluating
from trl_zero3 import unwrap

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn

REFERENCE_ADAPTER = "ref"


@contextmanager
def reference_context(policy: nn.Module) -> Generator[Any]:
    """Make a PEFT policy its own reference inside: adapters off, in eval mode, without gradients.

    If it has an adapter named "ref", as `add_reference_adapter` makes it, that one is active
    instead. Afterwards adapters, training modes and `requires_grad` are exactly as they were, so
    the policy goes on training on any engine. No parameter is touched, nothing is communicated.

    Args:
        policy: A PEFT model, or a model with a value head around one, as it is or in DDP, a
            DeepSpeed engine, FSDP1, FSDP2 or `torch.compile`.

    Yields:
        The policy.

    Raises:
        ValueError: The policy is no PEFT model, its adapters are merged, or they train biases of
            the base model, which stay when adapters are off.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> settings = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> policy = get_peft_model(base, settings)
        >>> x = torch.ones(1, 2)
        >>> trained = policy(x)
        >>> with reference_context(policy):
        ...     reference = policy(x)
        >>> torch.equal(reference, policy.base_model.model[0].base_layer(x))
        True
        >>> torch.equal(policy(x), trained)
        True
    """
    peft_model = find_peft_model(policy)
    _check_separable(peft_model)
    with _kept_adapters(peft_model), evaluating(policy), torch.no_grad():
        if _has_reference(peft_model):
            with _kept_flags(peft_model.parameters()):
                peft_model.set_adapter(REFERENCE_ADAPTER)
            yield policy
        else:
            flags = _kept_flags(peft_model.parameters())
            with flags, peft_model.disable_adapter():
                # PEFT freezes what it turns off. An engine that gathers it now would remember.
                flags.restore()
                yield policy


class AdapterReference:
    """A PEFT policy to be called as its own reference, by `reference_context`."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        with reference_context(policy):  # which refuses what can't be
            pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the policy returned before it was trained."""
        with reference_context(self.policy):
            return self.policy(*args, **kwargs)


def add_reference_adapter(policy: nn.Module) -> None:
    """Copy the active adapter into a frozen one named "ref", which then serves as the reference.

    It is for a policy that starts from an adapter that was trained already. Call it before the
    policy is prepared for an engine. PEFT's `save_pretrained` saves the copy too, unless its
    `selected_adapters` says otherwise.

    Args:
        policy: A PEFT model, or a model with a value head around one.

    Raises:
        ValueError: The policy is no PEFT model, is wrapped or sharded already, has an adapter
            "ref", has several active adapters, has merged ones, or trains biases of its base.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> settings = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> policy = get_peft_model(base, settings)  # as if its adapter had been trained
        >>> start = policy(torch.ones(1, 2))
        >>> add_reference_adapter(policy)
        >>> _ = torch.nn.init.ones_(policy.base_model.model[0].lora_B["default"].weight)
        >>> with reference_context(policy):
        ...     torch.equal(policy(torch.ones(1, 2)), start)
        True
    """
    peft_model = find_peft_model(policy)
    _check_separable(peft_model)
    if unwrap(policy) is not policy or _is_sharded(policy):
        raise ValueError(
            "An engine, a wrapper or a compiler has taken this policy already, and would not know "
            "new parameters: call add_reference_adapter before preparing it."
        )
    if REFERENCE_ADAPTER in peft_model.peft_config:
        raise ValueError(f"This policy has an adapter named {REFERENCE_ADAPTER!r} already.")
    active = peft_model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"The active adapters are {active}, of which a reference can hold one: make one of "
            "them active with set_adapter, or merge them."
        )
    config = copy.deepcopy(peft_model.peft_config[active[0]])
    config.inference_mode = True
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others, as PiSSA, would change the base once more
    before = {id(tensor) for _, tensor in _tensors(peft_model)}
    with _kept_flags(peft_model.parameters()), _kept_adapters(peft_model):
        try:
            peft_model.add_adapter(REFERENCE_ADAPTER, config)
            _copy_tensors(peft_model, active[0], before)
        except BaseException:
            # PEFT forgets the name of what it failed to add, and keeps the layers.
            peft_model.peft_config.setdefault(REFERENCE_ADAPTER, config)
            peft_model.delete_adapter(REFERENCE_ADAPTER)
            raise


def find_peft_model(policy: nn.Module) -> Any:
    """Return the PEFT model that this policy is or holds, refusing any other."""
    inner: Any = unwrap(policy)
    inner = getattr(inner, "pretrained_model", inner)  # of a value-head model
    peft = sys.modules.get("peft")  # without it, nothing is a PEFT model
    if peft is None or not isinstance(inner, peft.PeftModel):
        raise ValueError(
            f"{type(inner).__name__} is no PEFT model, so it can't be its own reference: make one "
            "with create_reference_model, or load the model again."
        )
    return inner


def _check_separable(peft_model: Any) -> None:
    if any(getattr(layer, "merged", False) is True for layer in peft_model.modules()):
        raise ValueError(
            "This policy's adapters are merged into its weights: call unmerge_adapter first."
        )
    for name in peft_model.active_adapters:
        bias = getattr(peft_model.peft_config[name], "bias", "none")
        if bias not in (None, "none") and isinstance(bias, str):
            raise ValueError(
                f"The adapter {name!r} trains biases of the base model (bias={bias!r}), which stay "
                "when adapters are off: prepare a reference of its own instead."
            )


def _has_reference(peft_model: Any) -> bool:
    if REFERENCE_ADAPTER not in peft_model.peft_config:
        return False
    # One that trains is a policy that happens to have this name.
    return not any(
        parameter.requires_grad
        for name, parameter in peft_model.named_parameters()
        if REFERENCE_ADAPTER in name.split(".")
    )


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        hasattr(parameter, ZERO3_PARAMETER_MARK) or isinstance(parameter, DTensor)
        for parameter in model.parameters()
    )


class _kept_flags:
    """Bring `requires_grad` back on leaving, or when told to; new parameters end up frozen."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self) -> None:
        for parameter, flag in self._flags:
            parameter.requires_grad = flag

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.restore()


@contextmanager
def _kept_adapters(peft_model: Any) -> Generator[None]:
    """Bring back which adapters are active and which layers have them off."""
    flags = _kept_flags(peft_model.parameters())
    active = peft_model.active_adapter
    attributes = set(vars(peft_model))
    layers = [
        (layer, layer.disable_adapters, layer.active_adapters)
        for layer in peft_model.modules()
        if isinstance(getattr(layer, "disable_adapters", None), bool)  # elsewhere it is a method
    ]
    try:
        yield
    finally:
        with flags:
            if peft_model.active_adapter != active:
                peft_model.set_adapter(active)
            for layer, disabled, names in layers:
                if layer.active_adapters != names:
                    layer.set_adapter(names)
                if layer.disable_adapters != disabled:
                    layer.enable_adapters(not disabled)
            # With learned prompts PEFT puts back as an attribute what was a method.
            for name in set(vars(peft_model)) - attributes:
                delattr(peft_model, name)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def _copy_tensors(peft_model: Any, source: str, before: set[int]) -> None:
    """Copy an adapter's tensors into those that the reference adapter brought."""
    tensors = dict(_tensors(peft_model))
    for name, tensor in tensors.items():
        if id(tensor) in before:
            continue
        parts = name.split(".")
        twins = [
            tensors.get(".".join([*parts[:index], source, *parts[index + 1 :]]))
            for index, part in enumerate(parts)
            if part == REFERENCE_ADAPTER
        ]
        twin = next((twin for twin in twins if twin is not None and id(twin) in before), None)
        if twin is None:
            raise ValueError(
                f"The adapter {source!r} has nothing like {name!r}, which a copy of it has: this "
                "kind of adapter can't be copied, so prepare a reference of its own instead."
            )
        with torch.no_grad():
            tensor.data = twin.detach().clone()
        tensor.requires_grad = False
