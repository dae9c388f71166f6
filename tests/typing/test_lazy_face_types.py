"""What a type checker makes of `trl_models`: real types for its names, an error for any other."""

import subprocess
from pathlib import Path

from tools.rails.environments import hatch_environment

PROGRAM = """
from typing import reveal_type
from trl_models import ForwardRedirection, SUPPORTED_ARCHITECTURES, create_reference_model
import trl_models

reveal_type(create_reference_model)
reveal_type(SUPPORTED_ARCHITECTURES)
ForwardRedirection().on_after_inner_forwards
trl_models.create_reference_modell
from trl_models import unwrap_model
"""


def test_names_have_their_types_and_misspelt_ones_are_errors(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    (tmp_path / "pyrefly.toml").touch()  # nothing of this repository's settings applies
    python, environment = hatch_environment("default")
    done = subprocess.run(
        [Path(python).with_name("pyrefly"), "check", "--output-format=min-text", file.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    errors = [line for line in lines if "ERROR" in line]
    assert len(errors) == 3, done.stdout + done.stderr
    assert "on_after_inner_forwards" in errors[0]
    assert "create_reference_modell" in errors[1]
    assert "unwrap_model" in errors[2]
    revealed = [line for line in lines if "revealed type" in line]
    assert "num_shared_layers: int | None" in revealed[0]
    assert "AutoModelForSeq2SeqLMWithValueHead" in revealed[1]
