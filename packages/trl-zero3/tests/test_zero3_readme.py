"""The README's examples run as they stand, in order, in one namespace."""

import re
from importlib.metadata import metadata
from pathlib import Path


def test_readme_runs():
    # Beside the tests in the repository; in the installed distribution's metadata elsewhere.
    file = Path(__file__).parents[1] / "README.md"
    text = file.read_text() if file.is_file() else metadata("trl-zero3").get_payload()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "add_hooks" in namespace
