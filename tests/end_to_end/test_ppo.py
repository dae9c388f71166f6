"""The PPO example through its command line: every engine learns what one process learns."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ppo
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tools.rails.examples import read_metrics, run_example, save_chat_model
from trl_models import AutoModelForCausalLMWithValueHead

QUESTIONS = ["How are you today?", "What do you think about that, then?", "Why?"]
COMPLETIONS = [
    "I think it is fine.",
    "Fine, thank you, and I think it is.",
    "...",
    "",
    "fine " * 50,
]


def run_ppo(*arguments):
    return run_example(ppo, *arguments)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), QUESTIONS + COMPLETIONS)


@pytest.fixture(scope="module")
def completions(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "completions.jsonl"
    pairs = [(QUESTIONS[i % 3], COMPLETIONS[i % 5]) for i in range(19)]
    rows = (json.dumps({"prompt": prompt, "completion": reply}) for prompt, reply in pairs)
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture(scope="module")
def single(model_folder, completions, tmp_path_factory):
    """Output folder and standard output of two steps in one process."""
    output = tmp_path_factory.mktemp("runs") / "single"
    done = run_ppo(
        *("--model", model_folder, "--completions", completions),
        *("--steps", 2, "--output", output),
    )
    return output, done


def test_a_run_leaves_metrics_a_picture_and_a_model_that_loads(single, model_folder):
    output, done = single
    assert sorted(path.name for path in output.iterdir()) == ["metrics.jsonl", "model", "ppo.png"]
    rows = read_metrics(output)
    keys = ["step", "reward", "kl", "policy_loss", "value_loss"]
    assert [list(row) for row in rows] == [keys, keys]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["kl"] == 0 < rows[1]["kl"]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert (output / "ppo.png").read_bytes().startswith(b"\x89PNG")

    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(output / "model"))
    saved = load_file(output / "model" / "model.safetensors")
    assert torch.equal(model.v_head.summary.weight, saved["v_head.summary.weight"])
    assert model.v_head.summary.weight.abs().max() > 0
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    prompt = ppo.encode(tokenizer, QUESTIONS[0])
    (sample,) = ppo.generate(model, tokenizer, [prompt], greedy=True)
    text = ppo.text_of(tokenizer, sample.reply)
    flat = " ".join(done.stdout.split())
    assert f"the model answers: {' '.join(text.split())}" in flat
    assert "mean reward, 16 replies" in flat
    assert done.stderr == ""


def test_the_reward_of_recorded_completions_is_the_rule(single, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    first_16 = [COMPLETIONS[i % 5] for i in range(16)]
    expected = []
    for text in first_16:
        tokens = len(tokenizer(text)["input_ids"]) + 1
        cut = tokens > ppo.REPLY_LIMIT
        says_something = any(character.isalnum() for character in text)
        expected.append(1 - tokens / ppo.REPLY_LIMIT if says_something and not cut else 0.0)
    assert 0 < sum(reward == 0 for reward in expected) < 16
    assert read_metrics(single[0])[0]["reward"] == pytest.approx(sum(expected) / 16)


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_two_ranks_learn_what_one_process_learns(
    engine, single, model_folder, completions, tmp_path
):
    output = tmp_path / "run"
    done = run_ppo(
        *("--model", model_folder, "--completions", completions, "--steps", 2),
        *("--engine", engine, "--processes", 2, "--output", output),
    )
    assert done.stderr == ""
    for ours, theirs in zip(read_metrics(output), read_metrics(single[0]), strict=True):
        # Policy losses are sums of whitened advantages: near 0 after cancelling terms near 1.
        assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)

    before = load_file(model_folder / "model.safetensors")
    after = load_file(output / "model" / "model.safetensors")
    expected = load_file(single[0] / "model" / "model.safetensors")
    assert (
        after.keys()
        == expected.keys()
        == before.keys()
        | {
            "v_head.summary.weight",
            "v_head.summary.bias",
        }
    )
    for name, weight in before.items():
        moved = (expected[name] - weight).abs().max()
        assert moved > ppo.LEARNING_RATE
        assert (after[name] - expected[name]).abs().max() < 0.02 * moved


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_two_ranks_generate_and_train(engine, model_folder, tmp_path):
    output = tmp_path / "run"
    run_ppo(
        *("--model", model_folder, "--engine", engine, "--processes", 2, "--steps", 2),
        *("--output", output, "--seed", 3),
    )
    rows = read_metrics(output)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["kl"] < 1e-9
    assert all(math.isfinite(value) for row in rows for value in row.values())
    before = load_file(model_folder / "model.safetensors")
    after = load_file(output / "model" / "model.safetensors")
    assert all(not torch.equal(after[name], before[name]) for name in before)


def change_tokenizer(folder, target, **changes):
    """Save a tokenizer with a change beside the model's files."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(target)
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def refused(capsys, output, *arguments):
    """Return the one sentence that a refused run writes."""
    try:
        code = ppo.main([*map(str, arguments), "--output", str(output)])
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("ppo.py: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    assert not output.exists()
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "zero4"], "Unknown engine 'zero4': choose one of single, ddp, zero2"),
        (["--engine", "ddp", "--processes", "9999"], "9999 processes were asked for"),
        (["--processes", "2"], "'single' runs one process, not 2"),
        (["--engine", "ddp", "--processes", "0"], "0 processes were asked for"),
        (["--steps", "0"], "--steps must be 1 or more, not 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--stepps", "2"], "unrecognized arguments: --stepps 2"),
        (["--model", "./nowhere"], "--model ./nowhere is neither a folder with a model"),
        (["--completions", "nowhere.jsonl"], "--completions nowhere.jsonl can't be read"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, tmp_path / "out", *arguments)


def test_a_model_without_chat_template_or_eos_is_refused(capsys, model_folder, tmp_path):
    bare = change_tokenizer(model_folder, tmp_path / "bare", chat_template=None)
    assert "has no chat template" in refused(capsys, tmp_path / "out", "--model", bare)
    endless = change_tokenizer(model_folder, tmp_path / "endless", eos_token=None)
    assert "has no eos token" in refused(capsys, tmp_path / "out", "--model", endless)


def test_a_folder_without_a_model_is_refused(capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"--model {empty} is neither" in refused(capsys, tmp_path / "out", "--model", empty)


def test_missing_deepspeed_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    message = refused(capsys, tmp_path / "out", "--engine", "zero3")
    assert "needs DeepSpeed, which is not installed" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "line 2: expected a JSON object"),
        ('{"prompt": "a", "completion": 3}\n', "line 1: expected a JSON object"),
        ("prompt,completion\n", "line 1: expected a JSON object"),
        ("[]\n", "line 1: expected a JSON object"),
    ],
)
def test_malformed_completions_are_refused(content, message, capsys, tmp_path):
    file = tmp_path / "completions.jsonl"
    file.write_text(content)
    assert message in refused(capsys, tmp_path / "out", "--completions", file)


def test_an_output_that_is_a_file_is_refused(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    message = refused(capsys, file / "out", "--steps", "1")
    assert "no folder can be written there" in message
    assert file.read_text() == "kept"


def test_the_command_exits_with_2_and_writes_nothing(tmp_path):
    command = [sys.executable, ppo.__file__, "--engine", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ppo.py: Unknown engine 'none'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("launched", "finalized"), [(True, ""), (False, "finalized\n")])
def test_only_a_launched_rank_ends_without_finalization(launched, finalized, tmp_path):
    (tmp_path / "script.py").write_text(
        "import atexit, engines\n"
        "atexit.register(print, 'finalized')\n"
        "print('last words')\n"
        "engines.end_process(3)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(ppo.__file__).parent)}
    environment.pop("LOCAL_RANK", None)
    if launched:
        environment["LOCAL_RANK"] = "0"
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "last words\n" + finalized)


def test_the_example_stays_short_enough_to_read():
    assert len(Path(ppo.__file__).read_text().splitlines()) < 400


def test_advantages_by_hand():
    # Two replies; the second is one token shorter. Undiscounted, lambda 0.95.
    rewards_BR = torch.tensor([[0.1, 0.0, 1.0], [0.0, 0.5, 9.0]])
    values_BR = torch.tensor([[0.2, 0.3, 0.4], [0.1, 0.2, 9.0]])
    mask_BR = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    errors = [[0.1 + 0.3 - 0.2, 0.4 - 0.3, 1.0 - 0.4], [0.2 - 0.1, 0.5 - 0.2]]
    first = [errors[0][0] + 0.95 * (errors[0][1] + 0.95 * errors[0][2])]
    first += [errors[0][1] + 0.95 * errors[0][2], errors[0][2]]
    second = [errors[1][0] + 0.95 * errors[1][1], errors[1][1], 0.0]
    expected_BR = torch.tensor([first, second])
    torch.testing.assert_close(ppo.advantages_of(rewards_BR, values_BR, mask_BR), expected_BR)
