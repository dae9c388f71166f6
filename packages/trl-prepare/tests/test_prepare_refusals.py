"""What the functions say on one process, where no engine runs, and the names they lean on."""

import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ensure_weights_retied, fsdp2_prepare_model
from torch import nn

import trl_prepare
from trl_prepare import _private_names, prepare_deepspeed, prepare_fsdp


@pytest.mark.parametrize("prepare", [prepare_deepspeed, prepare_fsdp])
def test_an_accelerator_without_the_engine_is_refused_and_the_model_is_as_it_was(prepare):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="this one runs NO: pass a"):
        prepare(model, Accelerator(cpu=True))
    assert model.training
    assert model.weight.requires_grad


def test_importing_the_package_imports_neither_deepspeed_nor_peft():
    code = "import sys, trl_prepare; print({'deepspeed', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-prepare\[deepspeed\]'"):
        prepare_deepspeed(nn.Linear(2, 2), Accelerator(cpu=True))


def test_exports_are_sorted_and_there():
    assert trl_prepare.__all__ == sorted(trl_prepare.__all__)
    assert all(callable(getattr(trl_prepare, name)) for name in trl_prepare.__all__)


@pytest.mark.parametrize("name", _private_names.CALL_HOOKS)
def test_torch_still_keeps_hooks_under(name):
    module = nn.Linear(2, 2)
    assert getattr(module, name) == {}


def test_the_hook_dictionaries_are_all_that_torch_runs_around_a_call():
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    filled = {
        name
        for name, value in vars(module).items()
        if name.endswith(("hooks", "_with_kwargs", "_always_called")) and value
    }
    assert filled == set(_private_names.CALL_HOOKS)


def test_transformers_still_marks_installed_capturing_hooks():
    from packaging.version import Version
    from transformers import AutoModelForCausalLM, LlamaConfig, __version__

    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
    marked = any(_private_names.OUTPUT_CAPTURING_FLAG in vars(m) for m in model.modules())
    assert marked == (Version(__version__) >= Version("5"))


def test_deepspeed_still_knows_sharded_parameters_by_their_mark():
    from deepspeed.runtime.zero.utils import is_zero_param

    parameter = nn.Parameter(torch.ones(1))
    assert not is_zero_param(parameter)
    setattr(parameter, _private_names.ZERO3_PARAMETER_MARK, 0)
    assert is_zero_param(parameter)


def test_accelerate_still_has_the_functions_that_sharding_uses():
    assert callable(ensure_weights_retied)
    assert callable(fsdp2_prepare_model)
