"""Names that other libraries keep private, each tested to be there still."""

from __future__ import annotations

import re
from typing import Any

# torch 2.6 to 2.13: what a module runs around its own forward and backward. State-dict hooks are
# no part of it.
CALL_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

# transformers 5: says that the hooks behind `output_hidden_states` and `output_attentions` are
# there; without it they are installed at the next forward that needs them.
OUTPUT_CAPTURING_FLAG = "_output_capturing_hooks_installed"

# DeepSpeed 0.16 to 0.19: set on each parameter that ZeRO-3 shards.
ZERO3_PARAMETER_MARK = "ds_id"

# accelerate 1.6 to 1.15: `prepare_model` keeps a model's own forward here where it mixes precision.
MIXED_PRECISION_MARK = "_original_forward"

# accelerate 1.6 to 1.15: the list of models that `save_state` saves.
REGISTERED_MODELS = "_models"

# torch 2.6 to 2.13: what a module runs around saving and loading, where FSDP2 puts hooks too.
STATE_DICT_HOOKS = (
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)

# What engines leave on modules: FSDP2 of torch 2.6 to 2.13, DeepSpeed 0.16 to 0.19.
ENGINE_ATTRIBUTES = re.compile(
    "__composable_api_state_key|_is_fsdp_managed_module$|_fsdp_use_orig_params$"
    "|ds_|_external_params$|pre_bwd_fn$|post_bwd_fn$|applied_pre_backward_ref_cnt$"
    "|_original_parameters$|all_parameters$"
)


def is_of_fsdp(hook: Any) -> bool:
    """Say whether a state-dict hook is FSDP2's."""
    # Those that run before loading are wrapped.
    function = getattr(hook, "hook", hook)
    return getattr(function, "__module__", "").startswith("torch.distributed.fsdp")
