"""References that are copied from policies which ZeRO-3 or FSDP2 shards already."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

ENGINES = ["zero3", "fsdp2"]
IDS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27]]


def make_policy(kind):
    import torch

    torch.manual_seed(7)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return get_peft_model(random_llama(), config).train()
    if kind == "value head":
        from trl_valuehead import AutoModelForCausalLMWithValueHead

        return AutoModelForCausalLMWithValueHead.from_pretrained(random_llama()).train()
    model = random_llama(tie_word_embeddings=kind == "tied").train()
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    if kind == "hooked":
        model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    return model


def logits_of(model, device):
    import torch

    with torch.no_grad():
        output = model(input_ids=torch.tensor(IDS, device=device))
    return output[0] if isinstance(output, tuple) else output.logits


def local_parts(model):
    """Return this rank's part of each parameter, by name."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parts = {}
    for name, parameter in model.named_parameters():
        part = getattr(parameter, "ds_tensor", parameter)
        part = part.to_local() if hasattr(part, "to_local") else part
        parts[name] = part.detach().clone()
    return parts


def copied_while_training(accelerator, kind, twice=False):
    import torch
    from torch.distributed.fsdp import FSDPModule

    from trl_prepare import create_reference_model, prepare_reference_model

    plain = make_policy("untied" if kind == "hooked" else kind)
    attributes = [set(vars(module)) for module in plain.modules()]
    policy = make_policy(kind)
    handle = None
    if kind == "hooked":
        handle = next(iter(policy.model.layers[0]._forward_hooks))
        policy.model.layers[0]._forward_hooks[handle] = lambda *_: None
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    ids = torch.tensor(IDS, device=accelerator.device)

    def step():
        output = policy(input_ids=ids, labels=ids)
        loss = output[1] if isinstance(output, tuple) else output.loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step()]
    if handle is not None:
        accelerator.unwrap_model(policy).model.layers[0]._forward_hooks[handle] = lambda *_: 1 / 0
    reference = create_reference_model(policy)
    if handle is not None:
        accelerator.unwrap_model(policy).model.layers[0]._forward_hooks[handle] = lambda *_: None
    if twice and isinstance(reference, FSDPModule):
        logits_of(reference, accelerator.device)
        reference = create_reference_model(reference)
    shards = local_parts(reference)
    same = local_parts(accelerator.unwrap_model(policy))
    strange = {
        name
        for module, known in zip(reference.modules(), attributes, strict=True)
        for name in set(vars(module)) - known
        if not (isinstance(module, FSDPModule) or "fsdp" in name)
    }
    facts = {
        "class": type(reference).__name__.removeprefix("FSDP"),
        "equal shards": list(shards) == list(same)
        and all(torch.equal(shards[name], same[name]) for name in same),
        "bytes": sum(shard.nbytes for shard in shards.values()),
        "strange attributes": strange,
        "training": any(module.training for module in reference.modules()),
        "trainable": sum(p.requires_grad for p in reference.parameters()),
        "checkpointing": any(
            getattr(module, "gradient_checkpointing", False) for module in reference.modules()
        ),
        "units": [
            [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
            for model in (reference, accelerator.unwrap_model(policy))
        ],
    }
    reference = prepare_reference_model(reference, accelerator, policy=policy)
    policy.eval()  # an engine's returns None
    expected = logits_of(policy, accelerator.device)
    policy.train()
    first = logits_of(reference, accelerator.device)
    losses += [step(), step()]
    later = logits_of(reference, accelerator.device)
    unmoved = local_parts(accelerator.unwrap_model(reference))
    return facts | {
        "furthest": (first - expected).abs().max().item(),
        "kept": torch.equal(first, later),
        "unmoved": all(torch.equal(unmoved[name], shards[name]) for name in shards),
        "losses": losses,
    }


def train_alone(accelerator, kind):
    import torch

    policy = make_policy("untied" if kind == "hooked" else kind)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.3)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    ids = torch.tensor(IDS, device=accelerator.device)
    losses = []
    for _ in range(3):
        output = policy(input_ids=ids, labels=ids)
        loss = output[1] if isinstance(output, tuple) else output.loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "kind", ["untied", "tied", "lora", "value head", "checkpointing", "hooked"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_copy_is_sharded_like_the_policy_and_stays_while_it_trains(engine, kind):
    ranks = run_on_ranks(copied_while_training, engine=engine, kind=kind)
    alone = run_on_ranks(train_alone, engine=engine, kind=kind)
    whole = sum(parameter.nbytes for parameter in make_policy(kind).parameters())
    assert whole <= sum(rank["bytes"] for rank in ranks) <= 1.1 * whole
    for rank, losses in zip(ranks, alone, strict=True):
        assert rank["class"] == type(make_policy(kind)).__name__
        assert rank["equal shards"]
        assert rank["strange attributes"] == set()
        assert not rank["training"]
        assert rank["trainable"] == 0
        assert not rank["checkpointing"]
        assert rank["units"][0] == rank["units"][1]
        assert (rank["units"][0] != []) == (engine == "fsdp2")
        assert rank["furthest"] == 0
        assert rank["kept"]
        assert rank["unmoved"]
        assert rank["losses"] == losses
        assert losses[2] < losses[0]


def test_a_sharded_reference_can_be_copied_again():
    for rank in run_on_ranks(copied_while_training, engine="fsdp2", kind="tied", twice=True):
        assert rank["equal shards"]
        assert rank["furthest"] == 0


def before_an_engine(accelerator):
    """A model whose parameters `deepspeed.zero.Init` partitioned, with no engine around it."""
    import deepspeed
    import torch

    from trl_prepare import create_reference_model, prepare_reference_model

    config = accelerator.state.deepspeed_plugin.deepspeed_config
    policy = make_policy("tied")
    expected = logits_of(policy.eval(), accelerator.device)
    deepspeed.zero.Init(module=policy, config_dict_or_path=config)
    reference = create_reference_model(policy)
    assert all(p.numel() == 0 for p in reference.parameters())
    reference = prepare_reference_model(reference, accelerator)
    return torch.equal(logits_of(reference, accelerator.device), expected)


def test_a_policy_that_is_partitioned_but_has_no_engine_yet_is_copied():
    assert run_on_ranks(before_an_engine, engine="zero3") == [True, True]


def with_fsdp2_settings(accelerator, **changes):
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

    from trl_prepare import create_reference_model

    plugin = accelerator.state.fsdp_plugin
    if changes.pop("offload", False):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    if changes.pop("mixed", False):
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, value in changes.items():
        setattr(plugin, name, value)
    policy = make_policy("untied")
    policy, _ = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.3))
    reference = create_reference_model(policy)

    def count_whole(model):
        return sum(not hasattr(parameter, "to_local") for parameter in model.parameters())

    before = [count_whole(reference), count_whole(policy)]
    expected = logits_of(policy.eval(), accelerator.device)
    logits = logits_of(reference, accelerator.device)
    units = [m for m in reference.modules() if isinstance(m, FSDPModule)]
    return {
        "equal": torch.equal(logits, expected),
        "whole": before,
        "as whole as the policy": count_whole(reference) == count_whole(policy),
        "units": len(units),
        "dtypes": [str(logits.dtype), str(expected.dtype)],
    }


@pytest.mark.parametrize(
    ("changes", "whole", "dtype"),
    [
        ({"offload": True}, 0, "torch.float32"),
        ({"mixed": True}, 0, "torch.bfloat16"),
        ({"reshard_after_forward": False}, 0, "torch.float32"),
        ({"ignored_modules": r"model\.layers\.0\.mlp"}, 3, "torch.float32"),
    ],
    ids=["offload", "mixed precision", "no resharding", "ignored modules"],
)
def test_the_policys_own_fsdp2_settings_are_the_copys(changes, whole, dtype):
    for rank in run_on_ranks(with_fsdp2_settings, engine="fsdp2", **changes):
        assert rank["equal"]
        assert rank["whole"][0] == rank["whole"][1]
        assert rank["whole"][0] in (0, whole)  # accelerate 1.6 ignores nothing under FSDP2
        assert rank["as whole as the policy"]
        assert rank["units"] > 2
        assert rank["dtypes"] == [dtype, dtype]


def storage_of_a_copy(accelerator):
    import torch

    from tools.bench.measures import StorageMeter
    from trl_prepare import create_reference_model

    model = random_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=12)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    policy, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    with StorageMeter() as meter:
        reference = create_reference_model(policy)
        held = meter.current()
    return type(reference).__name__, whole, layer, held, meter.peak


@pytest.mark.parametrize("engine", ENGINES)
def test_no_more_than_a_layer_is_ever_whole(engine):
    for _, whole, layer, held, peak in run_on_ranks(storage_of_a_copy, engine=engine):
        assert held <= whole / 2 + layer / 8
        assert peak <= whole / 2 + 1.6 * layer  # FSDP2 pads a shard while the layer is there
