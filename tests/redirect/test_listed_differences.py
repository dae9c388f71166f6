"""The READMEs of trl-redirect and trl-valuehead name the test of each difference from TRL."""

import re

import pytest

from tools.rails.environments import ROOT

FOLDERS = ("packages/{}/tests", "tests")


@pytest.mark.parametrize("name", ["trl-redirect", "trl-valuehead"])
def test_every_difference_has_a_test_of_that_name(name):
    text = (ROOT / "packages" / name / "README.md").read_text()
    section = text.partition("\n## Differences from TRL")[2].partition("\n## ")[0]
    rows = [
        line for line in section.splitlines() if line.startswith("| ") and "TRL 0.18" not in line
    ]
    defined = {
        found
        for folder in FOLDERS
        for file in (ROOT / folder.format(name)).rglob("test_*.py")
        for found in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert len(rows) > 5
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row
