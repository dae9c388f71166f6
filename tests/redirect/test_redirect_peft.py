"""Redirection with PEFT's own models, which trl-redirect recognises without depending on PEFT."""

import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_redirect import ForwardRedirection


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def model():
    return get_peft_model(Model(), LoraConfig(target_modules=["linear"], init_lora_weights=False))


@pytest.mark.parametrize("outer", [None, torch.nn.DataParallel])
def test_a_peft_model_around_the_inner_module_is_refused(model, outer):
    inner = model.get_base_model()
    wrapper = outer(model) if outer else model
    with pytest.raises(ValueError, match="Pass the PeftModel as original_module"):
        ForwardRedirection()(wrapper, inner, lambda x: inner(x), torch.ones(1, 4))
    assert "forward" not in inner.__dict__


def test_a_peft_model_inside_the_wrapper_is_fine(model):
    x = torch.ones(1, 4)
    wrapper = torch.nn.DataParallel(model)
    loss = ForwardRedirection()(wrapper, model, lambda x: model(x).sum(), x)
    assert torch.equal(loss, model(x).sum())
    loss.backward()
    adapter = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert adapter
    assert all(p.grad is not None for p in adapter.values())


def test_a_redirection_never_imports_peft():
    code = """
import sys
import torch
from trl_redirect import ForwardRedirection
model = torch.nn.Linear(2, 2)
ForwardRedirection()(model, model, lambda x: x, torch.ones(1, 2))
print("peft" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert printed.stdout.split() == [b"False"]
