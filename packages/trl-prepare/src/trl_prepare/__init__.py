"""Reference models: created, and prepared for DeepSpeed and FSDP."""

from trl_prepare.deepspeed import prepare_deepspeed
from trl_prepare.fsdp import prepare_fsdp
from trl_prepare.logprobs import reference_logprobs
from trl_prepare.reference import create_reference_model

__all__ = ["create_reference_model", "prepare_deepspeed", "prepare_fsdp", "reference_logprobs"]
