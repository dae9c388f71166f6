"""The DeepSpeed config of a reference, as a function of the training config."""

import copy
import warnings
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    T5Config,
)

from trl_prepare import inference_config


def model_of(config):
    return SimpleNamespace(config=config)


LLAMA = model_of(LlamaConfig(hidden_size=32))
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def zero3(**settings):
    return {"zero_optimization": {"stage": 3} | settings}


def sizes(config):
    return tuple(config["zero_optimization"].get(key) for key in SIZES)


@pytest.mark.parametrize(
    ("config", "hidden_size"),
    [
        (LlamaConfig(hidden_size=32), 32),
        (GPT2Config(n_embd=24), 24),
        (OPTConfig(hidden_size=48, word_embed_proj_dim=16), 48),
        (T5Config(d_model=40), 40),
        (LlavaConfig(text_config=LlamaConfig(hidden_size=56, num_attention_heads=4)), 56),
        (
            EncoderDecoderConfig.from_encoder_decoder_configs(
                BertConfig(hidden_size=24), BertConfig(hidden_size=36)
            ),
            36,
        ),
        (SimpleNamespace(hidden_sizes=[16, 64, 32]), 64),
        (SimpleNamespace(d_model=20), 20),
        (SimpleNamespace(thinker_config=SimpleNamespace(text_config=LLAMA.config)), 32),
    ],
)
def test_bucket_sizes_follow_the_hidden_size_wherever_the_config_keeps_it(config, hidden_size):
    found = sizes(inference_config(zero3(), model_of(config), world_size=2))
    assert found == (hidden_size**2, int(0.9 * hidden_size**2), 10 * hidden_size)
    assert all(type(size) is int for size in found)


def test_explicit_sizes_stay_and_models_without_a_config_leave_deepspeeds_defaults():
    explicit = zero3(reduce_bucket_size=7, stage3_prefetch_bucket_size="auto")
    assert sizes(inference_config(explicit, LLAMA, world_size=1)) == (7, 921, 320)
    assert sizes(inference_config(zero3(), nn.Linear(2, 2), world_size=1)) == (None, None, None)


def test_the_input_is_never_changed():
    training = zero3(reduce_bucket_size="auto", offload_optimizer={"device": "cpu"}) | {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "train_batch_size": "auto",
    }
    before = copy.deepcopy(training)
    config = inference_config(training, LLAMA, world_size=4)
    assert training == before
    config["zero_optimization"]["stage"] = 0
    assert training == before


def test_what_only_training_reads_is_left_out_and_everything_else_stays():
    kept = {
        "steps_per_print": 7,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "aio": {"block_size": 1048576},
    }
    training = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "gradient_clipping": "auto",
        "activation_checkpointing": {"partition_activations": True},
        "data_efficiency": {"enabled": True},
        "curriculum_learning": {"enabled": True},
        "hybrid_engine": {"enabled": True},
        "compression_training": {"layer_reduction": {"enabled": True}},
        "elasticity": {"enabled": True},
        "tensorboard": {"enabled": True},
        "wandb": {"enabled": True},
    }
    zero = zero3(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    config = inference_config(kept | training | zero, LLAMA, world_size=1)
    assert {key: config[key] for key in kept} == kept
    assert not training.keys() & config.keys()
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu"}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_shard_no_parameters_become_0(stage):
    training = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = inference_config(training, LLAMA, world_size=2)
        none = {"zero_optimization": {"stage": stage, "offload_param": {"device": "none"}}}
        inference_config(none, LLAMA, world_size=2)
    assert config["zero_optimization"] == {"stage": 0}


def test_parameter_offload_below_stage_3_is_dropped_aloud():
    training = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    with pytest.warns(UserWarning, match="not offloaded to 'cpu': only stage 3 can do that"):
        config = inference_config(training, LLAMA, world_size=2)
    assert config["zero_optimization"] == {"stage": 0}


def test_a_config_without_zero_optimization_is_one_of_stage_0():
    assert inference_config({}, LLAMA, world_size=1)["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({}, 4, (1, 1, 4)),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 2, (1, 1, 2)),
        ({"train_batch_size": 12}, 2, (6, 1, 12)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 2, (2, 3, 12)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, 2, (2, 3, 12)),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}, 3, (5, 2, 30)),
        ({"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}, 4, (2, 1, 4)),
        ({"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}}, 4, (2, 1, 4)),
    ],
)
def test_batch_sizes_are_ones_that_deepspeed_takes(given, ranks, expected):
    config = inference_config(given, LLAMA, world_size=ranks)
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert tuple(config[key] for key in keys) == expected


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"train_batch_size": 7}, 2),
        ({"train_batch_size": 1}, 2),
        (
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": 1,
            },
            2,
        ),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_refused(given, ranks):
    with pytest.raises(ValueError, match=f"can't be on {ranks} data-parallel ranks"):
        inference_config(given, LLAMA, world_size=ranks)


@pytest.mark.parametrize(
    ("training", "name"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        (zero3(offload_param={"device": "auto"}), "zero_optimization.offload_param.device"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
        ({"comms_logger": {"prof_ops": ["all", "auto"]}}, r"comms_logger.prof_ops\[1\]"),
    ],
)
def test_an_auto_that_can_not_be_resolved_is_named(training, name):
    with pytest.raises(ValueError, match=f"says 'auto' for {name}, which"):
        inference_config(training, LLAMA, world_size=2)


def test_a_world_of_no_ranks_and_a_block_that_is_none_are_refused():
    with pytest.raises(ValueError, match="number of ranks and must be positive: 0"):
        inference_config({}, LLAMA, world_size=0)
    with pytest.raises(ValueError, match="zero_optimization is True, where a block"):
        inference_config({"zero_optimization": True}, LLAMA, world_size=1)
