"""The DPO example through its command line: every engine learns what one process learns."""

import json
import math
from pathlib import Path

import dpo
import pytest
import real_data
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.rails.examples import read_metrics, run_example, save_chat_model

PAIRS = [
    ("How are you today?", "Fine, thank you.", "I went to the shop."),
    ("Why?", "I think it is fine.", ""),
    ("What do you think about that, then?", "I like it.", "fine " * 60),
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_chat_model(
        tmp_path_factory.mktemp("model"), [text for row in PAIRS for text in row]
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [dict(zip(dpo.SCRIPT.keys, PAIRS[number % 3], strict=True)) for number in range(19)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def single(model_folder, pairs, tmp_path_factory):
    """Output folder and standard output of three steps in one process."""
    output = tmp_path_factory.mktemp("runs") / "single"
    done = run_example(
        dpo, "--model", model_folder, "--pairs", pairs, "--steps", 3, "--output", output
    )
    return output, done


def test_training_starts_at_the_reference_and_learns(single, model_folder):
    output, done = single
    assert sorted(path.name for path in output.iterdir()) == ["dpo.png", "metrics.jsonl", "model"]
    rows = read_metrics(output)
    assert [list(row) for row in rows] == [["step", *dpo.PANELS]] * 3
    first, _, last = rows
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < first["loss"]
    assert last["margin"] > 0
    assert (output / "dpo.png").read_bytes().startswith(b"\x89PNG")
    flat = " ".join(done.stdout.split())
    assert "before" in flat
    assert "0.693" in flat
    assert done.stderr == ""


def test_the_saved_policy_loads_and_holds_no_reference(single, model_folder):
    saved = load_file(single[0] / "model" / "model.safetensors")
    before = load_file(model_folder / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(saved[name].shape == before[name].shape for name in before)
    assert all(not torch.equal(saved[name], before[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(single[0] / "model")
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(single[0] / "model").chat_template


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_two_ranks_learn_what_one_process_learns(engine, single, model_folder, pairs, tmp_path):
    output = tmp_path / "run"
    done = run_example(
        dpo,
        *("--model", model_folder, "--pairs", pairs, "--steps", 3),
        *("--engine", engine, "--processes", 2, "--output", output),
    )
    assert done.stderr == ""
    for ours, theirs in zip(read_metrics(output), read_metrics(single[0]), strict=True):
        # At the first step rewards are 0 but for rounding, and which is the greater is chance.
        keys = [key for key in ours if key != "accuracy" or ours["step"] > 1]
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=5e-5)
    before = load_file(model_folder / "model.safetensors")
    after = load_file(output / "model" / "model.safetensors")
    expected = load_file(single[0] / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        moved = (expected[name] - weight).abs().max()
        assert (after[name] - expected[name]).abs().max() < 0.05 * moved


def test_the_loss_is_the_papers(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    torch.manual_seed(1)
    policy = AutoModelForCausalLM.from_pretrained(model_folder)
    reference = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    rows = [dict(zip(dpo.SCRIPT.keys, row, strict=True)) for row in PAIRS]
    encoded = dpo.encode(tokenizer, rows)
    batch = dpo.make_batch(encoded, tokenizer.eos_token_id, torch.device("cpu"), reference)
    losses, chosen, rejected = dpo.dpo_losses(policy, batch)

    def reply_logprob(model, prompt, reply):
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            logprobs = log_softmax(model(ids).logits[0], dim=-1)
        places = range(len(prompt), ids.shape[1])
        return sum(logprobs[place - 1, ids[0, place]] for place in places)

    for number, row in enumerate(rows):
        message = {"role": "user", "content": row["prompt"]}
        prompt = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        ratios = []
        for key in ("chosen", "rejected"):
            reply = tokenizer(row[key] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            reply = reply[: dpo.MAX_LENGTH - len(start)]
            ratios.append(
                reply_logprob(policy, start, reply) - reply_logprob(reference, start, reply)
            )
        expected = -torch.log(torch.sigmoid(dpo.BETA * (ratios[0] - ratios[1])))
        assert losses[number].item() == pytest.approx(expected.item(), rel=1e-4)
        assert chosen[number].item() == pytest.approx(dpo.BETA * ratios[0].item(), abs=1e-4)
        assert rejected[number].item() == pytest.approx(dpo.BETA * ratios[1].item(), abs=1e-4)


def test_only_replies_count(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    (row,) = dpo.encode(
        tokenizer, [{"prompt": "Why?", "chosen": "I think it is fine.", "rejected": "No."}]
    )
    prompt = tokenizer.decode(row["prompt_ids"])
    assert prompt == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for key, text in (("chosen", "I think it is fine."), ("rejected", "No.")):
        counted = [
            token
            for token, counts in zip(row[f"{key}_ids"], row[f"{key}_mask"], strict=True)
            if counts
        ]
        assert tokenizer.decode(counted) == f"{text}<|im_end|>"


def test_real_pairs_are_true_replies_beside_others():
    rows = real_data.preferences()
    assert len(rows) > 1500
    openings = {
        (conversation[0], conversation[1])
        for conversation in real_data.conversations()
        if len(conversation) > 1
    }
    assert all((row["prompt"], row["chosen"]) in openings for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert rows == real_data.preferences()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "zero4"], "dpo.py: Unknown engine 'zero4'"),
        (["--pairs", "nowhere.jsonl"], "dpo.py: --pairs nowhere.jsonl can't be read"),
        (["--completions", "x"], "dpo.py: unrecognized arguments: --completions x"),
        (["--pairs", "two.jsonl"], 'line 1: expected a JSON object with the strings "prompt", '),
    ],
)
def test_bad_options_are_refused_in_one_sentence(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    try:
        code = dpo.main([*arguments, "--output", "out"])
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_example_stays_short_enough_to_read():
    assert len(Path(dpo.__file__).read_text().splitlines()) < 300
