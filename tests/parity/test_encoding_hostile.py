"""Conversations made to break out of their turns, on real tokenizers of every kind."""

import subprocess
import sys

import pytest

from tools.hostile_chats import run
from tools.rails.environments import ROOT
from tools.rails.real_tokenizers import KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_five_hundred_conversations_of_each_kind(kind):
    result = run(kind, seconds=120, count=500)
    assert result.hostile + result.harmless == 500
    assert result.hostile > 100
    assert result.harmless > 50
    assert result.neutralised > result.hostile


def test_a_leak_would_be_seen():
    # What the plain path makes of the same conversations is exactly what must not come out.
    from tools.hostile_chats import Checker

    checker = Checker(KINDS["smollm2"](), seed=0)
    checker.encode = lambda chats: {
        "input_ids": checker.tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True)[
            "input_ids"
        ],
        "neutralised": [0] * len(chats),
    }
    with pytest.raises(AssertionError, match="control ids"):
        checker.check([checker.make_chat(hostile=True) for _ in range(50)])


@pytest.mark.full
def test_a_million_conversations_or_as_many_as_there_is_time_for():
    command = [sys.executable, "-m", "tools.hostile_chats", "--seconds", "600", "--seed", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == sorted(KINDS)
