"""The wrapper behaves like the model inside, and refuses what it can't do."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Model, PreTrainedModel, T5Model

import trl_valuehead
from trl_valuehead import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    _private_names,
)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_what_is_read_on_a_model_is_the_language_models(build, name):
    base = build(name)
    cls = AutoModelForSeq2SeqLMWithValueHead if name == "t5" else AutoModelForCausalLMWithValueHead
    model = cls(base)
    for attribute in (
        "_no_split_modules",
        "_tied_weights_keys",
        "base_model_prefix",
        "config",
        "device",
        "dtype",
        "generation_config",
        "is_gradient_checkpointing",
        "main_input_name",
        "name_or_path",
        "supports_gradient_checkpointing",
    ):
        assert getattr(model, attribute) == getattr(base, attribute), attribute
    assert model.can_generate()
    assert model.get_input_embeddings() is base.get_input_embeddings()
    assert model.get_output_embeddings() is base.get_output_embeddings()
    for method in (
        "enable_input_require_grads",
        "gradient_checkpointing_enable",
        "gradient_checkpointing_disable",
        "prepare_inputs_for_generation",
        "resize_token_embeddings",
        "tie_weights",
    ):
        assert getattr(model, method) == getattr(base, method), method
    assert model.is_encoder_decoder == base.config.is_encoder_decoder
    assert not hasattr(model, "hf_device_map")
    assert not hasattr(model, "no_such_name")
    assert not hasattr(model, "_hf_hook")


def test_private_names_of_transformers_are_still_there():
    for name in _private_names.READ_BY_ACCELERATE:
        assert hasattr(PreTrainedModel, name), name
    assert hasattr(AutoModelForCausalLM, _private_names.MODEL_MAPPING)


def test_generation_settings_that_are_set_are_used(build, input_ids):
    model = AutoModelForCausalLMWithValueHead(build("llama"))
    settings = GenerationConfig(max_new_tokens=2, eos_token_id=None, pad_token_id=0)
    model.generation_config = settings
    assert model.pretrained_model.generation_config is settings
    assert model.generate(input_ids).shape[1] == input_ids.shape[1] + 2


def test_resized_embeddings_are_saved(build, tmp_path):
    model = AutoModelForCausalLMWithValueHead(build("gpt2"))
    model.resize_token_embeddings(70)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 70
    assert loaded.get_output_embeddings().weight.shape[0] == 70


def test_a_copy_shares_nothing(build, input_ids):
    model = AutoModelForCausalLMWithValueHead(build("llama"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    twin.gradient_checkpointing_enable()
    assert not torch.equal(twin(input_ids)[2], model(input_ids)[2])
    assert not model.is_gradient_checkpointing


def test_unknown_keywords_are_errors(build, tmp_path):
    base = build("llama")
    with pytest.raises(TypeError, match="summary_dropout;"):
        AutoModelForCausalLMWithValueHead(base, summary_dropout=0.1)
    with pytest.raises(TypeError, match="torch_dtype would not be used"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, torch_dtype=torch.bfloat16)
    base.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="nonsense"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, nonsense=1)
    with pytest.raises(TypeError, match="no keyword max_shard_sise"):
        AutoModelForCausalLMWithValueHead(base).save_pretrained(tmp_path / "new", max_shard_sise=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("summary_dropout_prob", 1.5),
        ("v_head_init_strategy", "uniform"),
        ("v_head_initializer_range", -1.0),
    ],
)
def test_options_of_the_head_are_checked_before_anything_is_loaded(tmp_path, option, value):
    with pytest.raises(ValueError, match=option):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **{option: value})


@pytest.mark.parametrize("argument", [None, 3, torch.nn.Linear(2, 2)])
def test_what_is_no_language_model_is_refused(argument):
    with pytest.raises(TypeError, match="PreTrainedModel or a PeftModel"):
        AutoModelForCausalLMWithValueHead(argument)
    with pytest.raises(TypeError, match="PreTrainedModel or a PeftModel"):
        AutoModelForCausalLMWithValueHead.from_pretrained(argument)


def test_models_of_the_other_kind_or_without_lm_head_are_refused(build):
    with pytest.raises(TypeError, match="is an encoder-decoder model"):
        AutoModelForCausalLMWithValueHead(build("t5"))
    with pytest.raises(TypeError, match="is not an encoder-decoder model"):
        AutoModelForSeq2SeqLMWithValueHead(build("llama"))
    with pytest.raises(ValueError, match=r"no LM head.*AutoModelForSeq2SeqLM"):
        AutoModelForSeq2SeqLMWithValueHead(T5Model(build("t5").config))
    with pytest.raises(ValueError, match=r"no LM head.*AutoModelForCausalLM"):
        AutoModelForCausalLMWithValueHead(GPT2Model(build("gpt2").config))


def test_offloaded_models_are_refused(build):
    base = build("llama")
    for device_map in ({"model": 0, "lm_head": "cpu"}, {"model": "cpu", "lm_head": "disk"}):
        base.hf_device_map = device_map
        with pytest.raises(ValueError, match="offload"):
            AutoModelForCausalLMWithValueHead(base)


def test_a_device_map_that_is_all_cpu_is_no_offload(build, tmp_path, input_ids):
    build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert model(input_ids)[2].device == torch.device("cpu")


def test_the_head_lies_beside_the_lm_head(build):
    base = build("llama")
    base.lm_head.to("meta")  # the one other device that every machine has
    base.hf_device_map = {"model": 0, "lm_head": 1}
    model = AutoModelForCausalLMWithValueHead(base)
    assert model.v_head.summary.weight.device.type == "meta"
    assert base.get_input_embeddings().weight.device.type == "cpu"


def test_dropout_and_initialisation_keywords_reach_the_head(build, tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path,
        summary_dropout_prob=0.25,
        v_head_init_strategy="normal",
        v_head_initializer_range=0.0,
    )
    assert model.v_head.dropout.p == 0.25
    assert model.v_head.summary.weight.abs().sum() == 0


def test_names_of_trl_are_here():
    for name in trl_valuehead.__all__:
        assert hasattr(trl_valuehead, name)
    assert trl_valuehead.__all__ == sorted(trl_valuehead.__all__)
    for name in (
        "add_and_load_reward_modeling_adapter",
        "compute_reward_score",
        "forward",
        "from_pretrained",
        "generate",
        "post_init",
        "push_to_hub",
        "save_pretrained",
        "state_dict",
        "supported_args",
        "supported_modules",
        "supported_rm_modules",
        "transformers_parent_class",
    ):
        assert hasattr(PreTrainedModelWrapper, name), name
