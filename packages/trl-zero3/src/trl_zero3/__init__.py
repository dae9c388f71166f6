"""DeepSpeed ZeRO-3 hooks, and any wrapped model unwrapped for generation."""

from trl_zero3.gathering import gathered
from trl_zero3.generation import disable_gradient_checkpointing
from trl_zero3.hooks import add_hooks, remove_hooks, suspended_hooks
from trl_zero3.memory import GatherWontFit
from trl_zero3.parameters import get_all_parameters, iter_params
from trl_zero3.planning import GatherCost, gather_cost
from trl_zero3.unwrapping import unwrap, unwrap_model_for_generation

__all__ = [
    "GatherCost",
    "GatherWontFit",
    "add_hooks",
    "disable_gradient_checkpointing",
    "gather_cost",
    "gathered",
    "get_all_parameters",
    "iter_params",
    "remove_hooks",
    "suspended_hooks",
    "unwrap",
    "unwrap_model_for_generation",
]
