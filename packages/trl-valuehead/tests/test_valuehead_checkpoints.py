"""Save and load: every layout, bit for bit."""

import json
import logging
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trl_valuehead import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

HEAD = {"v_head.summary.weight", "v_head.summary.bias"}


def wrap(base, **options):
    cls = (
        AutoModelForSeq2SeqLMWithValueHead
        if base.config.is_encoder_decoder
        else AutoModelForCausalLMWithValueHead
    )
    return cls(base, v_head_init_strategy="normal", **options)


def reload(model, folder, **options):
    return type(model).from_pretrained(str(folder), **options)


def assert_equal(loaded, saved):
    expected = saved.state_dict()
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def files(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_what_is_saved_loads_bit_for_bit(any_model, tmp_path):
    model = wrap(any_model)
    folder = tmp_path / "new" / "folder"
    model.save_pretrained(folder)
    assert_equal(reload(model, folder), model)
    assert not [name for name in files(folder) if name.endswith(".bin")]
    assert load_file(folder / "model.safetensors").keys() >= HEAD


def test_half_precision_survives(build, tmp_path):
    model = wrap(build("llama").to(torch.bfloat16))
    model.save_pretrained(tmp_path)
    loaded = reload(model, tmp_path, torch_dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert_equal(loaded, model)


@pytest.mark.parametrize("variant", [None, "policy"])
def test_a_sharded_local_checkpoint_loads(build, tmp_path, variant):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path, max_shard_size="8KB", variant=variant)
    assert "model.safetensors" not in files(tmp_path)
    assert any("index" in name for name in files(tmp_path))
    assert_equal(reload(model, tmp_path, variant=variant), model)


@pytest.mark.parametrize("variant", [None, "policy"])
@pytest.mark.parametrize("sizes", [("8KB", "1GB"), ("1GB", "8KB"), ("8KB", "4KB")])
def test_a_save_over_an_earlier_one_is_what_loads(build, tmp_path, sizes, variant):
    model = wrap(build("llama"))
    for size in sizes:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
    assert_equal(reload(model, tmp_path, variant=variant), model)


def test_a_save_beside_an_adapter_is_refused_before_anything_is_written(build, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter"):
        wrap(build("llama")).save_pretrained(tmp_path)
    assert files(tmp_path) == {"adapter_config.json"}


def test_the_language_model_alone_loads_from_the_same_folder(build, tmp_path, input_ids):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(base(input_ids).logits, model(input_ids)[0])


def test_a_base_checkpoint_gets_a_new_head_and_says_so(build, tmp_path, caplog):
    base = build("llama")
    base.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "trl_valuehead"):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    messages = [record.message for record in caplog.records if record.name.startswith("trl_value")]
    assert len(messages) == 1
    assert str(tmp_path) in messages[0]
    assert "no value head" in messages[0]
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)

    caplog.clear()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "trl_valuehead"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("trl_valuehead")]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("sharded", [False, True])
def test_keys_with_the_wrappers_prefix_load(build, tmp_path, input_ids, name, sharded):
    """As a save with torch's own names leaves them; GPT-2 and T5 have tied weights."""
    model = wrap(build(name))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {
        key if key in HEAD else f"pretrained_model.{key}": value for key, value in state.items()
    }
    if sharded:
        (tmp_path / "model.safetensors").unlink()
        names = sorted(state)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, keys in parts.items():
            save_file({key: state[key] for key in keys}, tmp_path / file, metadata={"format": "pt"})
        weight_map = {key: file for file, keys in parts.items() for key in keys}
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = reload(model, tmp_path)
    assert_equal(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    assert_equal(reload(model, tmp_path / "again"), model)
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    embeddings, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert (embeddings.weight is head.weight) == (name != "llama")


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_state_dict_with_the_prefix_and_shared_tensors_is_saved(build, tmp_path, name):
    """What accelerator.get_state_dict gives for ZeRO-3 and FSDP1."""
    model = wrap(build(name))
    state = torch.nn.Sequential(model).state_dict()
    state = {key.removeprefix("0."): value for key, value in state.items()}
    assert any(key.startswith("pretrained_model.") for key in state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert_equal(reload(model, tmp_path), model)


def test_a_given_state_dict_is_what_is_saved_and_stays_as_it_is(build, tmp_path):
    model = wrap(build("llama"))
    state = {key: value + 1 for key, value in model.state_dict().items()}
    keys = list(state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert list(state) == keys
    loaded = reload(model, tmp_path).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_state_dict_without_the_head_is_refused(build, tmp_path):
    model = wrap(build("llama"))
    with pytest.raises(ValueError, match=r"lacks v_head\.summary\.weight"):
        model.save_pretrained(tmp_path / "new", state_dict=model.pretrained_model.state_dict())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", [{"safe_serialization": False}, {"push_to_hub": True}])
def test_pickles_and_uploads_are_refused_before_anything_is_written(build, tmp_path, option):
    with pytest.raises(ValueError, match=r"push_to_hub|safetensors"):
        wrap(build("llama")).save_pretrained(tmp_path / "new", **option)
    assert not (tmp_path / "new").exists()


def test_other_ranks_write_nothing(build, tmp_path):
    wrap(build("llama")).save_pretrained(tmp_path / "new", is_main_process=False)
    assert not (tmp_path / "new").exists()


def test_pickled_checkpoints_load_without_running_code(build, tmp_path):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_equal(reload(model, tmp_path), model)

    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"v_head.summary.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        reload(model, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_not_read_where_there_are_safetensors(build, tmp_path):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    assert_equal(reload(model, tmp_path), model)


def test_a_head_of_another_width_is_an_error(build, tmp_path):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["v_head.summary.weight"] = torch.zeros(1, 3)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"size mismatch for summary\.weight"):
        reload(model, tmp_path)
    del state["v_head.summary.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"Missing key.*summary\.weight"):
        reload(model, tmp_path)


def test_a_checkpoint_from_the_hub_loads_from_the_cache(build, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = wrap(build("llama"))
    repository = tmp_path / "models--someone--policy"
    model.save_pretrained(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(
        "someone/policy", cache_dir=str(tmp_path)
    )
    assert_equal(loaded, model)


def test_a_subfolder_is_looked_into(build, tmp_path):
    model = wrap(build("llama"))
    model.save_pretrained(tmp_path / "policy")
    assert_equal(reload(model, tmp_path, subfolder="policy"), model)


@pytest.mark.parametrize("name", ["{tmp_path}/missing", "./missing"])
def test_a_missing_folder_is_named(tmp_path, name):
    name = name.format(tmp_path=tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(name)):
        AutoModelForCausalLMWithValueHead.from_pretrained(name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_state_dict_loads_back_under_both_names(build, name):
    source, target, nested = wrap(build(name)), wrap(build(name)), wrap(build(name))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    state = source.state_dict()
    assert state.keys() == source.pretrained_model.state_dict().keys() | HEAD
    assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(target, source)
    outer = torch.nn.Sequential(nested)
    assert outer.state_dict().keys() == {f"0.{key}" for key in torch.nn.Module.state_dict(source)}
    outer.load_state_dict(torch.nn.Sequential(source).state_dict())
    assert_equal(nested, source)


def test_load_state_dict_reports_the_names_of_state_dict(build):
    model = wrap(build("llama"))
    state = model.state_dict()
    removed = state.pop("lm_head.weight")
    state["extra.weight"] = removed
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert result.unexpected_keys == ["extra.weight"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_accelerate_saves_and_loads_the_training_state(build, tmp_path, name):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(wrap(build(name)))
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_push_to_hub_uploads_everything_and_leaves_the_model_alone(build, tmp_path, monkeypatch):
    model = wrap(build("llama"))
    before = [name for name, _ in model.named_modules()]
    calls = []

    class Created:
        repo_id = "someone/policy"

    def upload(self, *, repo_id, folder_path, **options):
        calls.append((repo_id, options["commit_message"], options["revision"]))
        for file in Path(folder_path).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return "address"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: Created)
    monkeypatch.setattr(
        HfApi, "create_branch", lambda self, repo_id, **options: calls.append(options)
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    address = model.push_to_hub(
        "policy", commit_message="trained", revision="ppo", max_shard_size="8KB"
    )
    assert address == "address"
    assert calls == [
        {"branch": "ppo", "exist_ok": True},
        ("someone/policy", "trained", "ppo"),
    ]
    assert [name for name, _ in model.named_modules()] == before
    assert not hasattr(model.pretrained_model, "v_head")
    assert_equal(reload(model, tmp_path), model)
