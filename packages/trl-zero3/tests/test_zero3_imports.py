"""What importing the package offers and what it leaves alone."""

import subprocess
import sys

import trl_zero3


def test_exports_are_sorted_and_there():
    assert trl_zero3.__all__ == sorted(trl_zero3.__all__)
    assert all(callable(getattr(trl_zero3, name)) for name in trl_zero3.__all__)


def test_import_and_use_load_neither_deepspeed_nor_transformers_nor_peft():
    script = (
        "import sys, torch, trl_zero3\n"
        "with trl_zero3.unwrap_model_for_generation(torch.nn.Linear(2, 2), None):\n"
        "    loaded = {'deepspeed', 'transformers', 'peft'} & set(sys.modules)\n"
        "print(sorted(loaded))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
