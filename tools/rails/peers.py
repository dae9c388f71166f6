"""Run one function on ours and on TRL's, in TRL's own environment, and bring both results back."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tools.rails.ranks import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = {
    "trl_chatformat": ("ChatMlSpecialTokens", "FORMAT_MAPPING", "setup_chat_format"),
    "trl_prepare": ("create_reference_model", "prepare_deepspeed", "prepare_fsdp"),
    "trl_redirect": ("_ForwardRedirection",),
    "trl_valuehead": (
        "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead",
        "PreTrainedModelWrapper",
        "ValueHead",
    ),
    "trl_zero3": (
        "add_hooks",
        "get_all_parameters",
        "iter_params",
        "remove_hooks",
        "unwrap_model_for_generation",
    ),
}
# Where TRL 0.18 and 1.16 have the same names.
TRL = ("trl.models.utils", "trl.models.modeling_value_head", "trl.models.modeling_base")


def run_both(
    function: Callable[..., Any],
    *,
    engine: str | None = None,
    environment: str = "peer-old",
    **arguments: Any,
) -> tuple[Any, Any]:
    """Call a function with `library="ours"`, then `library="trl"`, in the same processes.

    Args:
        function: As `run_on_ranks` takes it; it finds what it tests with `find(library, name)`.
        engine: As `run_on_ranks` takes it.
        environment: "peer-old" has TRL 0.18.2, "peer-new" has TRL 1.16.0.
        arguments: The function's other keyword arguments.

    Returns:
        What rank 0 returned for ours, and for TRL's.
    """
    sources = [name.replace("_", "-") for name in OURS]
    ours, theirs = (
        run_on_ranks(
            function,
            engine=engine,
            environment=environment,
            sources=sources,
            library=library,
            **arguments,
        )[0]
        for library in ("ours", "trl")
    )
    return ours, theirs


def find(library: str, name: str) -> Any:
    """Return the public function or class of this name, "ours" or "trl"'s.

    Raises:
        ImportError: The library has no such name.
    """
    if library == "ours":
        modules = [module for module, names in OURS.items() if name in names]
    else:
        modules = [module for module in TRL if importlib.util.find_spec(module)]
    for module in map(importlib.import_module, modules):
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"{library} has no {name}.")
