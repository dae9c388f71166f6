"""Generation on the set-ups that people combine with an engine: right, and without trace."""

import subprocess
import sys

import pytest
import torch

from tests.distributed.generation_helpers import (
    full_weights,
    greedy,
    prepared,
    tiny_model,
    train_step,
)
from tools.rails.collectives import CountCollectives
from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

STEPS = 4


def mixture_of_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=99,
    )
    return MixtralForCausalLM(config)


def sharded_by_torch(model, shape=None, **settings):
    """Apply FSDP2 by hand: to each layer, then to the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if shape is not None:
        settings["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def with_sgd(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hierarchical(accelerator):
    return prepared(accelerator, tiny_model(), zero={"zero_hpz_partition_size": 2})


def offloaded_zero3(accelerator):
    zero = {f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")}
    return prepared(accelerator, tiny_model(), zero=zero)


def experts(accelerator):
    return prepared(accelerator, mixture_of_experts())


def hybrid_fsdp2(accelerator):
    return with_sgd(sharded_by_torch(tiny_model(), (2, 2)))


def offloaded_fsdp2(accelerator):
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = CPUOffloadPolicy(pin_memory=False)
    return with_sgd(sharded_by_torch(tiny_model(), offload_policy=policy))


def hybrid_fsdp1(accelerator):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = tiny_model()
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return with_sgd(wrapped)


def train_on(accelerator, setup, generate):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = globals()[setup](accelerator)
    plain = mixture_of_experts() if setup == "experts" else tiny_model()
    losses, inside = [], []
    for step in range(STEPS):
        if generate:
            plain.load_state_dict(full_weights(model))
            before = engine_snapshot(model) if step else None
            with (
                unwrap_model_for_generation(model, accelerator) as unwrapped,
                CountCollectives() as collectives,
            ):
                tokens = greedy(unwrapped, 1 + accelerator.process_index)
            assert tokens == greedy(plain, 1 + accelerator.process_index)
            if step:
                assert differences(before, engine_snapshot(model)) == []
            inside.append(dict(collectives.counts))
        losses.append(train_step(accelerator, model, optimizer, seed=step))
    return losses, inside


@pytest.mark.parametrize(
    ("engine", "setup", "processes"),
    [
        ("zero3", "hierarchical", 2),
        ("zero3", "offloaded_zero3", 2),
        ("zero3", "experts", 2),
        ("zero3", "hierarchical", 4),
        ("fsdp2", "experts", 2),
        ("ddp", "offloaded_fsdp2", 2),
        ("ddp", "hybrid_fsdp2", 4),
        ("ddp", "hybrid_fsdp1", 4),
    ],
)
def test_a_set_up_generates_like_the_plain_model_and_trains_as_if_it_had_not(
    engine, setup, processes
):
    both = [
        run_on_ranks(train_on, engine=engine, processes=processes, setup=setup, generate=generate)
        for generate in (False, True)
    ]
    for (losses, _), (same_losses, inside) in zip(*both, strict=True):
        assert same_losses == losses
        assert len(set(losses)) == STEPS
        if setup == "hybrid_fsdp1":
            assert all("allgather" in counts for counts in inside)
        else:
            assert inside == [{}] * STEPS


def generate_compiled(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap, unwrap_model_for_generation

    model, _ = prepared(accelerator, tiny_model())
    compiled = torch.compile(model, backend="eager")
    with unwrap_model_for_generation(compiled, accelerator) as unwrapped:
        assert unwrapped is unwrap(model)
        assert greedy(unwrapped) == greedy(tiny_model())
    before = engine_snapshot(model)
    with (
        unwrap_model_for_generation(compiled, accelerator) as unwrapped,
        CountCollectives() as collectives,
    ):
        greedy(unwrapped)
    return differences(before, engine_snapshot(model)), dict(collectives.counts)


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_a_compiled_engine_is_unwrapped_through_both(engine):
    assert run_on_ranks(generate_compiled, engine=engine) == [([], {}), ([], {})]


def generate_quantized(accelerator, packages, folder):
    """Train LoRA over a base of 4 bits, as bitsandbytes does it, and generate in between."""
    sys.path.insert(0, packages)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    def quantized():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map={"": "cpu"},
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
                bnb_4bit_quant_storage=torch.bfloat16,
            ),
        )
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=4,
                target_modules=["q_proj", "v_proj"],
                task_type="CAUSAL_LM",
                init_lora_weights=False,
            ),
        )
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        return adapted

    expected = greedy(quantized())
    model, optimizer = prepared(accelerator, quantized())
    with unwrap_model_for_generation(model, accelerator) as unwrapped:
        kind = type(unwrapped.base_model.model.model.layers[0].mlp.up_proj).__name__
        assert greedy(unwrapped) == expected
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(3)]
    before = engine_snapshot(model)
    with (
        unwrap_model_for_generation(model, accelerator) as unwrapped,
        CountCollectives() as collectives,
    ):
        greedy(unwrapped, 1 + accelerator.process_index)
    assert differences(before, engine_snapshot(model)) == []
    return kind, dict(collectives.counts), len(set(losses))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_lora_over_a_quantized_base_generates_and_trains(engine, bitsandbytes, tmp_path):
    random_llama(num_hidden_layers=3, hidden_size=64, intermediate_size=128).to(
        torch.bfloat16
    ).save_pretrained(tmp_path)
    results = run_on_ranks(
        generate_quantized, engine=engine, fresh=True, packages=bitsandbytes, folder=str(tmp_path)
    )
    assert results == [("Linear4bit", {}, 3)] * 2


@pytest.fixture(scope="module")
def bitsandbytes(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("packages"))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([sys.executable, *install, "bitsandbytes==0.50.2"], check=True)
    return folder


def tensor_parallel(mesh, model):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, plan | {"down_proj": RowwiseParallel()})
    return model


def generate_in_parallel(accelerator, sharded):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    shape = (2, accelerator.num_processes // 2)[:: 1 if sharded else -1]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"], tiny_model())
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    model, optimizer = with_sgd(model)
    expected = greedy(tiny_model())
    tokens = 1 + 3 * mesh["data"].get_local_rank()
    losses = []
    for step in range(3):
        losses.append(train_step(accelerator, model, optimizer, seed=step) if step else None)
        before = engine_snapshot(model) if step else None
        with (
            unwrap_model_for_generation(model, accelerator) as unwrapped,
            CountCollectives() as collectives,
        ):
            generated = greedy(unwrapped, tokens)
            with pytest.raises(ValueError, match="would hang"):
                greedy(unwrapped, synced_gpus=False)
        assert collectives.gathers() == 0, "only the layers' own sums remain"
        assert collectives.counts["allreduce"] > 0
        if step:
            assert differences(before, engine_snapshot(model)) == []
        else:
            assert generated == [row[: 3 + tokens] for row in expected]
    return losses


@pytest.mark.parametrize(("sharded", "processes"), [(False, 2), (True, 4)])
def test_tensor_parallel_models_generate_in_step(sharded, processes):
    results = run_on_ranks(generate_in_parallel, engine="ddp", processes=processes, sharded=sharded)
    assert all(len(set(losses)) == 3 for losses in results)
