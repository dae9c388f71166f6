"""Reference models: created, and prepared for DeepSpeed and FSDP."""

from trl_prepare.adapters import add_reference_adapter, reference_context
from trl_prepare.deepspeed import prepare_deepspeed
from trl_prepare.deepspeed_config import inference_config
from trl_prepare.fsdp import prepare_fsdp
from trl_prepare.logprobs import reference_logprobs
from trl_prepare.preparing import prepare_reference_model
from trl_prepare.reference import create_reference_model
from trl_prepare.syncing import sync_reference_model

__all__ = [
    "add_reference_adapter",
    "create_reference_model",
    "inference_config",
    "prepare_deepspeed",
    "prepare_fsdp",
    "prepare_reference_model",
    "reference_context",
    "reference_logprobs",
    "sync_reference_model",
]
