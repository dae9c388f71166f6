"""What the accelerator's DeepSpeed config and FSDP plugin mean for a model that only infers."""

import json

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

SIZES = {
    "reduce_bucket_size": 32 * 32,
    "stage3_prefetch_bucket_size": 921,
    "stage3_param_persistence_threshold": 320,
}


def make_plain_module():
    from torch import nn

    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def prepared(accelerator, cases):
    """Prepare a model for each (config, kind of model); tell what the engine took, or the error."""
    import copy

    from trl_prepare import prepare_deepspeed

    plugin = accelerator.state.deepspeed_plugin
    outcomes = []
    for config, kind in cases:
        plugin.hf_ds_config.config = plugin.deepspeed_config = config
        before = copy.deepcopy(config)
        model = random_llama() if kind == "llama" else make_plain_module()
        try:
            engine = prepare_deepspeed(model, accelerator)
        except ValueError as error:
            outcome = {
                "error": str(error),
                "untouched": model.training and all(p.requires_grad for p in model.parameters()),
            }
        else:
            outcome = {
                "stage": engine.zero_optimization_stage(),
                "reduce_bucket_size": engine.zero_reduce_bucket_size(),
                "stage3_prefetch_bucket_size": int(engine.zero_prefetch_bucket_size()),
                "stage3_param_persistence_threshold": engine.zero_param_persistence_threshold(),
                "batch": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()),
                "bf16": engine.bfloat16_enabled(),
                "dtype": str(next(engine.module.parameters()).dtype),
                "optimizer": type(engine.optimizer).__name__,
                "scheduler": engine.lr_scheduler,
                "offload": engine.zero_offload_optimizer(),
                "partitioned": all(hasattr(p, "ds_id") for p in engine.module.parameters()),
            }
        outcomes.append(outcome | {"config kept": config == before})
    return outcomes


def train_config(stage=3, **changes):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
    } | changes


def zero3(**changes):
    return train_config(zero_optimization={"stage": 3} | changes)


def outcomes_of(*cases, **options):
    ranks = run_on_ranks(prepared, engine="zero3", cases=cases, **options)
    assert all(rank == ranks[0] for rank in ranks)
    assert all(outcome.pop("config kept") for outcome in ranks[0])
    return ranks[0]


def sizes(outcome):
    return {key: outcome[key] for key in SIZES}


def test_zero3_bucket_sizes_follow_the_hidden_size_and_explicit_ones_are_kept():
    auto = dict.fromkeys(SIZES, "auto")
    explicit = {"reduce_bucket_size": 7000, "stage3_prefetch_bucket_size": 50}
    absent, resolved, kept, unknown = outcomes_of(
        (zero3(), "llama"),
        (zero3(**auto), "llama"),
        (zero3(**explicit), "llama"),
        (zero3(**explicit), "plain"),
    )
    assert sizes(absent) == sizes(resolved) == SIZES
    assert sizes(kept) == SIZES | explicit
    assert unknown["reduce_bucket_size"] == 7000
    assert all(o["stage"] == 3 and o["partitioned"] for o in (absent, resolved, kept, unknown))


def test_every_other_auto_is_resolved():
    batch = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    derived, total, clipped, gathered = outcomes_of(
        (train_config(**batch), "llama"),
        (train_config(**batch | {"train_batch_size": 6}), "llama"),
        (train_config(gradient_clipping="auto"), "llama"),
        (zero3(stage3_gather_16bit_weights_on_model_save="auto"), "llama"),
    )
    assert derived["batch"] == (2, 1)
    assert total["batch"] == (6, 3)
    assert clipped["dtype"] == gathered["dtype"] == "torch.float32"


def precision_that_accelerate_resolved(accelerator):
    from trl_prepare import prepare_deepspeed

    plugin = accelerator.state.deepspeed_plugin
    plugin.deepspeed_config |= {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    plugin.set_mixed_precision("bf16")  # as `Accelerator(mixed_precision="bf16")` does
    engine = prepare_deepspeed(random_llama(), accelerator)
    return engine.bfloat16_enabled(), str(next(engine.module.parameters()).dtype)


def test_a_reference_has_the_policys_precision():
    ranks = run_on_ranks(precision_that_accelerate_resolved, engine="zero3")
    assert ranks == [(True, "torch.bfloat16")] * 2


def test_an_auto_that_nothing_resolves_is_refused_by_its_name():
    size, device, stage, precision = outcomes_of(
        (zero3(reduce_bucket_size="auto"), "plain"),
        (zero3(offload_param={"device": "auto"}), "llama"),
        (train_config(stage="auto"), "llama"),
        (train_config(fp16={"enabled": "auto"}, bf16={"enabled": "auto"}), "llama"),
    )
    assert "'auto' for zero_optimization.reduce_bucket_size," in size["error"]
    assert "'auto' for zero_optimization.offload_param.device," in device["error"]
    assert "'auto' for zero_optimization.stage," in stage["error"]
    assert "'auto' for fp16.enabled, bf16.enabled," in precision["error"]
    assert all(outcome["untouched"] for outcome in (size, device, stage, precision))


def test_what_only_an_optimizer_needs_is_left_out():
    training = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    three, two = outcomes_of(
        (zero3(**offload) | training, "llama"),
        (train_config(zero_optimization={"stage": 2} | offload) | training, "llama"),
    )
    assert three["optimizer"] == "DeepSpeedZeRoOffload"  # which shards, and steps nothing
    assert two["optimizer"] == "NoneType"
    for outcome in (three, two):
        assert outcome["scheduler"] is None
        assert outcome["offload"] is None


def test_stages_below_three_and_configs_without_a_stage_keep_the_model_whole():
    without = train_config()
    del without["zero_optimization"]
    auto = {"reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}}
    cases = [
        (train_config(zero_optimization={"stage": stage} | auto), "llama") for stage in (0, 1, 2)
    ]
    for outcome in outcomes_of(*cases, (without, "llama"), (without, "plain")):
        assert outcome["stage"] == 0
        assert not outcome["partitioned"]


def quantized_models(accelerator, folder):
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from trl_prepare import prepare_deepspeed

    by_hand = nn.Linear(4, 4, bias=False)
    by_hand.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    outcomes = []
    for model in (by_hand, AutoModelForCausalLM.from_pretrained(folder).train()):
        required = [p.requires_grad for p in model.parameters()]
        try:
            prepare_deepspeed(model, accelerator)
            outcomes.append(None)
        except ValueError as error:
            kept = required == [p.requires_grad for p in model.parameters()]
            outcomes.append((str(error), kept and model.training))
    return outcomes


@pytest.fixture
def bitnet_folder(tmp_path):
    """A checkpoint of packed ternary weights, which transformers loads on a CPU."""
    import torch
    from safetensors.torch import load_file, save_file

    random_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        weights[name] = torch.zeros(rows // 4, columns, dtype=torch.uint8)
        weights[f"{name}_scale"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "modules_to_not_convert": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_quantized_models_are_refused_under_zero3(bitnet_folder):
    for by_hand, by_transformers in run_on_ranks(
        quantized_models, engine="zero3", folder=bitnet_folder
    ):
        for message, kept in (by_hand, by_transformers):
            assert message.startswith("ZeRO-3 can't shard a quantized model: load it without")
            assert kept


def quantized_below_zero3(accelerator, folder):
    from transformers import AutoModelForCausalLM

    from trl_prepare import prepare_deepspeed

    model = AutoModelForCausalLM.from_pretrained(folder)
    return prepare_deepspeed(model, accelerator).module is model


def test_quantized_models_are_prepared_below_zero3(bitnet_folder):
    ranks = run_on_ranks(quantized_below_zero3, engine="zero2", folder=bitnet_folder)
    assert ranks == [True, True]


def failing_preparation(accelerator):
    import torch

    from trl_prepare import prepare_deepspeed, prepare_fsdp

    model = random_llama().train()
    model.lm_head.eval()
    model.lm_head.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    state = accelerator.state
    if accelerator.distributed_type.value == "DEEPSPEED":
        plugin, prepare = state.deepspeed_plugin, prepare_deepspeed
        plugin.deepspeed_config["train_batch_size"] = 7  # is not 1 x 1 x 2
    else:
        plugin, prepare = state.fsdp_plugin, prepare_fsdp
        plugin.mixed_precision_policy = plugin.reshard_after_forward = "no such value"
    try:
        prepare(model, accelerator)
        error = None
    except Exception as raised:
        error = type(raised).__name__
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    training = {name: module.training for name, module in model.named_modules()}
    return error, flags == before and training == modes and isinstance(model, torch.nn.Module)


@pytest.mark.parametrize("engine", ["zero3", "fsdp1"])
def test_an_engine_that_fails_to_start_leaves_the_model_trainable(engine):
    for error, restored in run_on_ranks(failing_preparation, engine=engine):
        assert error is not None
        assert restored


def wrapped_as_the_plugin_says(accelerator, version, **changes):
    import torch
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from trl_prepare import prepare_fsdp

    plugin = accelerator.state.fsdp_plugin
    for name, value in changes.items():
        setattr(plugin, name, value)
    model = prepare_fsdp(random_llama(), accelerator)
    wrappers = FSDPModule if version == 2 else FullyShardedDataParallel
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    return loss, [n for n, module in model.named_modules() if isinstance(module, wrappers)]


LAYERS = ["_fsdp_wrapped_module.model.layers.0", "_fsdp_wrapped_module.model.layers.1"]
HALF_LAYERS = {"transformer_cls_names_to_wrap": ["LlamaMLP"]}


def test_fsdp_units_are_those_that_the_plugin_names():
    import torch

    ids = torch.arange(20).reshape(2, 10)
    expected = random_llama().eval()(input_ids=ids, labels=ids).loss.item()
    cases = [
        (1, {}, LAYERS),
        (1, HALF_LAYERS, [f"{layer}.mlp" for layer in LAYERS]),
        (1, {"ignored_modules": r"model\.layers\.0"}, LAYERS[1:]),
        (1, {"auto_wrap_policy": None}, []),
        (2, HALF_LAYERS, ["model.layers.0.mlp", "model.layers.1.mlp"]),
    ]
    for version, changes, units in cases:
        ranks = run_on_ranks(
            wrapped_as_the_plugin_says, engine=f"fsdp{version}", version=version, **changes
        )
        for loss, found in ranks:
            assert loss == pytest.approx(expected, rel=1e-5)
            layers = [name.replace("_fsdp_wrapped_module.mlp", "mlp") for name in found]
            assert [name for name in layers if "layers" in name] == units
