"""Every Python block of every README runs, from top to bottom, in one namespace a README."""

import re
import subprocess
import sys

import pytest

from tools.rails.environments import ROOT
from tools.rails.wheels import members

READMES = ["README.md", *(f"packages/{name}/README.md" for name in members())]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
RUN = """
import linecache, sys
namespace = {"__name__": "__main__"}
for number, block in enumerate(BLOCKS, 1):
    name = f"<block {number}>"
    linecache.cache[name] = (len(block), None, block.splitlines(True), name)
    exec(compile(block, name, "exec"), namespace)
"""


def blocks_of(text):
    return [
        re.sub(f"^{block[1]}", "", block[2], flags=re.MULTILINE) for block in BLOCK.finditer(text)
    ]


def test_blocks_are_found_in_order_without_those_of_other_languages():
    text = (
        "```python\na = 1\n```\n\n```bash\nls\n```\n\n"
        "- b\n  ```python\n  if a:\n      b = 2\n  ```\n"
    )
    assert blocks_of(text) == ["a = 1\n", "if a:\n    b = 2\n"]


@pytest.mark.parametrize("path", READMES)
def test_the_blocks_of_a_readme_run(path, tmp_path):
    blocks = blocks_of((ROOT / path).read_text())
    assert blocks or path == "README.md", f"{path} has no example"
    script = tmp_path / "readme.py"
    script.write_text(f"BLOCKS = {blocks!r}\n{RUN}")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
