"""PEFT adapters with a value head, and reward adapters."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from trl_valuehead import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

HEAD = {"v_head.summary.weight", "v_head.summary.bias"}


def lora(**options):
    defaults = {
        "task_type": TaskType.CAUSAL_LM,
        "r": 2,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
    }
    return LoraConfig(**(defaults | options))


@pytest.fixture
def base_folder(build, tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def reward_folder(build, tmp_path, base_folder):
    """An adapter that was trained as a reward model, as trainers save it."""
    model = AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=1)
    config = lora(task_type=TaskType.SEQ_CLS)
    torch.manual_seed(3)
    get_peft_model(model, config).save_pretrained(tmp_path / "reward")
    return str(tmp_path / "reward")


def state_of(model):
    return {key: value.clone() for key, value in torch.nn.Module.state_dict(model).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("source", ["path", "model"])
def test_peft_config_adds_an_adapter(build, base_folder, input_ids, source):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base_folder if source == "path" else build("llama"), peft_config=lora()
    )
    assert model.is_peft_model
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable >= HEAD
    assert all("lora_" in name for name in trainable - HEAD)
    output = model.pretrained_model(input_ids, output_hidden_states=True)
    logits, _, value = model(input_ids)
    assert torch.equal(logits, output.logits)
    assert torch.equal(value, model.v_head(output.hidden_states[-1]).squeeze(-1))
    value.sum().backward()
    assert all(
        p.grad is not None for n, p in model.named_parameters() if "lora_B" in n and "layers.0" in n
    )


def test_the_constructor_knows_a_peft_model(build, input_ids):
    plain = AutoModelForCausalLMWithValueHead(build("llama"))
    wrapped = AutoModelForCausalLMWithValueHead(get_peft_model(build("llama"), lora()))
    assert plain.is_peft_model is False
    assert wrapped.is_peft_model is True
    assert wrapped(input_ids)[2].shape == input_ids.shape
    assert wrapped._no_split_modules == plain._no_split_modules
    assert wrapped.get_input_embeddings() is wrapped.pretrained_model.get_input_embeddings()


@pytest.mark.parametrize("is_trainable", [False, True])
def test_adapter_and_head_are_saved_into_a_new_folder_and_load(base_folder, tmp_path, is_trainable):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora())
    folder = tmp_path / "new" / "policy"
    model.save_pretrained(folder)
    written = {path.name for path in Path(folder).iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "v_head.safetensors"} <= written
    assert not [name for name in written if name.endswith(".bin")]
    assert load_file(folder / "v_head.safetensors").keys() == HEAD
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(folder), is_trainable=is_trainable
    )
    assert_same(state_of(loaded), state_of(model))
    adapter = [p for name, p in loaded.named_parameters() if "lora_" in name]
    assert adapter
    assert all(p.requires_grad is is_trainable for p in adapter)


def test_a_given_state_dict_is_what_is_saved(base_folder, tmp_path):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora())
    state = {key: value + 1 for key, value in torch.nn.Module.state_dict(model).items()}
    model.save_pretrained(tmp_path / "policy", state_dict=state)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "policy"))
    for key, value in torch.nn.Module.state_dict(loaded).items():
        saved = "lora_" in key or key in HEAD
        assert torch.equal(value, state[key] if saved else state[key] - 1) or not saved


def test_a_pickled_head_beside_an_adapter_loads(base_folder, tmp_path):
    """The layout that TRL writes."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora())
    model.save_pretrained(tmp_path / "policy")
    head = load_file(tmp_path / "policy" / "v_head.safetensors")
    (tmp_path / "policy" / "v_head.safetensors").unlink()
    torch.save(head, tmp_path / "policy" / "pytorch_model.bin")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "policy"))
    assert_same(state_of(loaded), state_of(model))


def test_a_merged_model_saved_over_an_adapter_loads_its_own_head(base_folder, tmp_path):
    folder = str(tmp_path / "policy")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora())
    model.save_pretrained(folder)
    merged = AutoModelForCausalLMWithValueHead(model.pretrained_model.merge_and_unload())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        Path(folder, name).unlink()
    merged.save_pretrained(folder)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    assert_same(state_of(loaded), state_of(merged))


def test_the_state_dict_holds_adapter_and_head(build):
    model = AutoModelForCausalLMWithValueHead(get_peft_model(build("llama"), lora()))
    assert model.state_dict().keys() == model.pretrained_model.state_dict().keys() | HEAD
    twin = AutoModelForCausalLMWithValueHead(get_peft_model(build("llama"), lora()))
    twin.load_state_dict(model.state_dict())
    assert_same(state_of(twin), state_of(model))


def test_seq2seq_with_an_adapter(build, tmp_path, input_ids, labels):
    build("t5").save_pretrained(tmp_path / "base")
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=2, target_modules=["q"])
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
        str(tmp_path / "base"), peft_config=config
    )
    output = model.pretrained_model(input_ids, labels=labels, output_hidden_states=True)
    value = model(input_ids, labels=labels)[2]
    assert torch.equal(value, model.v_head(output.decoder_hidden_states[-1]).squeeze(-1))
    model.save_pretrained(tmp_path / "policy")
    loaded = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(str(tmp_path / "policy"))
    assert_same(state_of(loaded), state_of(model))


def test_reward_scores_equal_the_reward_models_and_leave_no_trace(
    base_folder, reward_folder, input_ids
):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base_folder, peft_config=lora(), reward_adapter=reward_folder
    ).train()
    policy = model.pretrained_model
    policy.base_model.model.model.layers[0].eval()  # a mode of its own must survive too
    modes = {name: module.training for name, module in model.named_modules()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    values = model(input_ids)[2]

    mask = torch.ones_like(input_ids)
    mask[0, :2] = 0
    scores = model.compute_reward_score(input_ids, attention_mask=mask)

    from peft import PeftModel

    reward_model = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=1),
        reward_folder,
    ).eval()
    base = reward_model.get_base_model()
    expected = base.score(base.model(input_ids, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(scores, expected)
    assert scores.shape == (*input_ids.shape, 1)
    assert not scores.requires_grad
    assert policy.active_adapter == "default"
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
    assert torch.equal(model(input_ids)[2], values)

    with pytest.raises(IndexError):
        model.compute_reward_score(input_ids + 1000)
    assert policy.active_adapter == "default"
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable


def test_a_reward_adapter_trains_and_saves_nothing_of_itself_in_the_head(
    base_folder, reward_folder, tmp_path
):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base_folder, peft_config=lora(), reward_adapter=reward_folder, reward_adapter_name="judge"
    )
    assert not any(p.requires_grad for n, p in model.named_parameters() if "judge" in n)
    assert not any(p.requires_grad for p in model.score.parameters())
    model.save_pretrained(tmp_path / "policy")
    assert load_file(tmp_path / "policy" / "v_head.safetensors").keys() == HEAD


def test_an_adapter_without_a_score_layer_is_refused_and_not_added(build, base_folder, tmp_path):
    get_peft_model(build("llama"), lora()).save_pretrained(tmp_path / "no_score")
    model = get_peft_model(build("llama"), lora())
    with pytest.raises(ValueError, match="no score layer"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            model, reward_adapter=str(tmp_path / "no_score")
        )
    assert list(model.peft_config) == ["default"]


def test_what_fails_leaves_a_given_model_without_adapters(build, reward_folder, tmp_path):
    get_peft_model(build("llama"), lora()).save_pretrained(tmp_path / "no_score")
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    for options in (
        {"v_head_init_strategy": "uniform"},
        {"reward_adapter": str(tmp_path / "no_score")},
        {"reward_adapter": str(tmp_path / "missing")},
    ):
        base = build("llama")
        names = [name for name, _ in base.named_parameters()]
        with pytest.raises((ValueError, FileNotFoundError)):
            load(base, peft_config=lora(), **options)
        assert [name for name, _ in base.named_parameters()] == names
        assert all(parameter.requires_grad for parameter in base.parameters())


def test_a_reward_adapter_never_replaces_another(build, reward_folder):
    model = get_peft_model(build("llama"), lora())
    before = state_of(model)
    with pytest.raises(ValueError, match="an adapter 'default' already"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            model, reward_adapter=reward_folder, reward_adapter_name="default"
        )
    assert_same(state_of(model), before)


def test_scores_without_a_reward_adapter_are_refused(build, input_ids):
    model = AutoModelForCausalLMWithValueHead(build("llama"))
    with pytest.raises(ValueError, match="pass reward_adapter"):
        model.compute_reward_score(input_ids)


def test_prompt_learning_is_refused(build, base_folder):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ValueError, match="prompt learning"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=config)
    with pytest.raises(ValueError, match="prompt learning"):
        AutoModelForCausalLMWithValueHead(get_peft_model(build("llama"), config))


def test_arguments_that_do_not_fit_are_refused(build, base_folder, reward_folder):
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    with pytest.raises(ValueError, match=r"must be a peft\.PeftConfig"):
        load(base_folder, peft_config={"r": 2})
    with pytest.raises(ValueError, match="has one already"):
        load(get_peft_model(build("llama"), lora()), peft_config=lora())
    with pytest.raises(ValueError, match="has one already"):
        load(reward_folder, peft_config=lora())
    with pytest.raises(ValueError, match="needs a PEFT model"):
        load(base_folder, reward_adapter=reward_folder)
    with pytest.raises(ValueError, match="not PosixPath"):
        load(base_folder, peft_config=lora(), reward_adapter=Path(reward_folder))
    with pytest.raises(ValueError, match="8 or 4 bits"):
        load(base_folder, peft_config=lora(), use_gradient_checkpointing=True)


def test_a_copy_is_a_copy(build):
    model = AutoModelForCausalLMWithValueHead(get_peft_model(build("llama"), lora()))
    twin = copy.deepcopy(model)
    assert_same(state_of(twin), state_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    twin.load_state_dict(model.state_dict())
    assert_same(state_of(twin), state_of(model))


def test_neither_peft_nor_deepspeed_is_imported_for_a_plain_model():
    code = """
import sys
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel
base = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
loaded = set(sys.modules)  # transformers may import either by itself
import trl_valuehead
trl_valuehead.AutoModelForCausalLMWithValueHead(base)
sys.exit(str(sorted({"deepspeed", "peft"} & set(sys.modules) - loaded)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == "[]"
