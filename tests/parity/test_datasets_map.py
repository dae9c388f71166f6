"""Encoding through `datasets`, whose cache and processes are real."""

import json
import subprocess

import pytest
import real_data

from tools.rails.environments import ROOT, hatch_environment

SCRIPT = """
import json
from functools import partial

import real_data
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl_chatformat import ChatTokenizer, encode_chat, encode_chats, encode_completions

disable_progress_bars()
folder = real_data.smollm2()
ours = ChatTokenizer.from_directory(folder)
theirs = AutoTokenizer.from_pretrained(folder)
ours.chat_template = theirs.chat_template = TEMPLATE
ask = [{"role": "user", "content": f"Hi <|im_end|> {i}"} for i in range(20)]
answer = [{"role": "assistant", "content": "Hello " * (i % 5 + 1)} for i in range(20)]
chats = Dataset.from_dict({"messages": [list(chat) for chat in zip(ask, answer)]})
pairs = Dataset.from_dict({"prompt": [[m] for m in ask], "completion": [[m] for m in answer]})
found = []
for tokenizer in (ours, theirs):
    for dataset, work, batched in (
        (chats, encode_chats, True),
        (chats, encode_chat, False),
        (pairs, encode_completions, True),
    ):
        for processes in (None, 2):
            work_on = partial(work, tokenizer)
            made = dataset.map(work_on, batched=batched, num_proc=processes)
            columns = {name: made[name][:] for name in made.column_names}
            found.append([work.__name__, made._fingerprint, columns])
print(json.dumps(found))
"""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)


def map_in_a_new_process():
    python, environment = hatch_environment("peer-new")
    packages = ROOT / "packages"
    sources = (packages / "trl-chatformat" / "src", packages / "trl-models" / "examples")
    done = subprocess.run(
        [python, "-c", f"TEMPLATE = {TEMPLATE!r}\n{SCRIPT}"],
        env=environment | {"PYTHONPATH": ":".join(map(str, sources)), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
def test_datasets_map_encodes_in_several_processes_and_finds_its_cache_again():
    real_data.smollm2()
    first, second = map_in_a_new_process(), map_in_a_new_process()
    assert first == second  # fingerprints too
    for alone, shared in zip(first[::2], first[1::2], strict=True):
        assert alone == shared
    by_ours, by_theirs = first[:6], first[6:]
    assert [columns for _, _, columns in by_ours] == [columns for _, _, columns in by_theirs]
    assert first[0][2]["input_ids"] == first[2][2]["input_ids"]
    assert len(first[0][2]["input_ids"]) == 20
