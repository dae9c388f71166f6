"""ZeRO-3 parameters gathered for a while, or streamed through the hooks."""

import contextlib

import pytest

from tests.distributed.generation_helpers import greedy, prepared, prompt, tiny_model, train_step
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks


def statuses(model):
    return {name: parameter.ds_status.name for name, parameter in model.named_parameters()}


def gather_some(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import gathered

    plain = tiny_model()
    model, optimizer = prepared(accelerator, tiny_model())
    layer = model.module.model.layers[1]
    with gathered(layer):
        for name, parameter in plain.model.layers[1].named_parameters():
            assert parameter.equal(layer.get_parameter(name))
    train_step(accelerator, model, optimizer)
    before, status = engine_snapshot(model), statuses(model)
    assert set(status.values()) == {"AVAILABLE", "NOT_AVAILABLE"}, "the norms are persistent"
    with CountCollectives() as collectives, gathered(model):
        assert set(statuses(model).values()) == {"AVAILABLE"}
        assert (collectives.gathers(), collectives.others()) == (1, 1), "a gather, an agreement"
        with gathered(layer.mlp.up_proj.weight), gathered([layer.mlp.up_proj.weight]):
            pass
        with contextlib.suppress(KeyError), gathered(layer.parameters()):
            raise KeyError
        assert set(statuses(model).values()) == {"AVAILABLE"}
        with pytest.raises(ValueError, match="must be positive"), gathered(model, bucket_bytes=0):
            pass
    assert (collectives.gathers(), collectives.others()) == (1, 2), "and one on leaving"
    assert differences(before, engine_snapshot(model)) == []

    matrices = [p for name, p in model.named_parameters() if status[name] == "NOT_AVAILABLE"]
    with CountCollectives() as collectives, gathered(model, bucket_bytes=1):
        pass
    assert collectives.gathers() == len(matrices)
    one = matrices[0].ds_numel * 4
    with CountCollectives() as collectives, gathered(matrices[:1] + matrices, bucket_bytes=2 * one):
        pass
    assert 1 < collectives.gathers() < len(matrices)
    assert differences(before, engine_snapshot(model)) == []

    with gathered(layer), torch_no_grad():
        layer.mlp.up_proj.weight.zero_()
    with gathered(layer):
        kept = layer.mlp.up_proj.weight.abs().sum().item() > 0
    return kept


def torch_no_grad():
    import torch

    return torch.no_grad()


def test_only_what_is_missing_is_gathered_in_buckets_and_released():
    assert run_on_ranks(gather_some, engine="zero3") == [True, True]


def gather_tied(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    expected = greedy(tiny_model(tie_word_embeddings=True))
    model, optimizer = prepared(accelerator, tiny_model(tie_word_embeddings=True))
    before = engine_snapshot(model)
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert inside.lm_head.weight is inside.model.embed_tokens.weight
        assert greedy(inside) == expected
    assert differences(before, engine_snapshot(model)) == []
    return train_step(accelerator, model, optimizer)


def test_tied_weights_are_gathered_once_and_stay_tied():
    assert all(loss > 0 for loss in run_on_ranks(gather_tied, engine="zero3"))


def leave_parameters_busy(accelerator):
    import torch

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import gathered, unwrap_model_for_generation

    class InLayerError(Exception):
        pass

    def fail(*_):
        raise InLayerError

    def parameters(snapshot):
        return {k: v for k, v in snapshot.items() if k.endswith((": ds", ": resident"))}

    model, optimizer = prepared(accelerator, tiny_model())
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(3)]
    with unwrap_model_for_generation(model, accelerator) as inside:
        expected = greedy(inside)

    # With the hooks in place, a layer that raises stays listed as a user of its parameters.
    before = parameters(engine_snapshot(model))
    body = model.module.model.layers[1].mlp
    with (
        pytest.raises(InLayerError),
        gathered(model),
        torch.no_grad(),
        body.register_forward_hook(fail),
    ):
        model(input_ids=prompt())
    after = parameters(engine_snapshot(model))
    assert differences(before, after) == []

    # A training forward that raises leaves prefetched parameters in flight.
    with pytest.raises(InLayerError), body.register_forward_pre_hook(fail):
        model(input_ids=prompt())
    assert "INFLIGHT" in statuses(model).values()
    with pytest.raises(RuntimeError, match="just being gathered"), gathered(model.module):
        pass
    for _ in range(2):
        with unwrap_model_for_generation(model, accelerator) as inside:
            assert greedy(inside) == expected
            assert set(statuses(model).values()) == {"AVAILABLE"}
        assert "INFLIGHT" not in statuses(model).values()
    losses += [train_step(accelerator, model, optimizer, seed=step) for step in range(3, 6)]
    return losses


def train_six_steps(accelerator, zero=None):
    model, optimizer = prepared(accelerator, tiny_model(), zero=zero)
    return [train_step(accelerator, model, optimizer, seed=step) for step in range(6)]


def test_parameters_in_use_or_in_flight_are_dealt_with_and_training_goes_on():
    busy = run_on_ranks(leave_parameters_busy, engine="zero3")
    assert busy == run_on_ranks(train_six_steps, engine="zero3")


def generate_ungathered(accelerator, threshold):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    expected = greedy(tiny_model(), 5)
    zero = {"stage3_param_persistence_threshold": threshold}
    model, optimizer = prepared(accelerator, tiny_model(), zero=zero)
    tokens = 1 + 4 * accelerator.process_index
    losses = []
    for step in range(6):
        before = engine_snapshot(model)
        with (
            unwrap_model_for_generation(
                model, accelerator, gather_deepspeed3_params=False
            ) as inside,
            CountCollectives() as collectives,
        ):
            ids = greedy(inside, tokens)
            if step == 0:
                assert ids == [row[: 3 + tokens] for row in expected]
            if step == 1:
                with pytest.raises(ValueError, match="would hang"):
                    greedy(inside, synced_gpus=False)
                # What an inner context gathers stays, whatever was asked of it.
                with (
                    unwrap_model_for_generation(model, accelerator) as again,
                    unwrap_model_for_generation(model, accelerator, False) as third,
                    CountCollectives() as none,
                ):
                    assert greedy(again, tokens) == greedy(third, tokens, synced_gpus=False)
                assert not none.counts
            greedy(inside, tokens)
        assert collectives.counts["allreduce"] > 0, "the ranks keep in step"
        changed = differences(before, engine_snapshot(model))
        assert not changed, f"before step {step}: {changed}"
        losses.append(train_step(accelerator, model, optimizer, seed=step))
    before = engine_snapshot(model)
    calls = []

    def fail_later(*_):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        unwrap_model_for_generation(model, accelerator, False) as inside,
        inside.model.layers[1].mlp.register_forward_hook(fail_later),
    ):
        greedy(inside)
    assert differences(before, engine_snapshot(model)) == []
    return losses


@pytest.mark.parametrize("threshold", [0, 40])
def test_ungathered_generation_keeps_ranks_in_step_and_the_trace_of_training(threshold):
    zero = {"stage3_param_persistence_threshold": threshold}
    results = run_on_ranks(generate_ungathered, engine="zero3", threshold=threshold)
    assert results == run_on_ranks(train_six_steps, engine="zero3", zero=zero)


def count_gathers(accelerator, generate):
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    counts = []
    for step in range(5):
        if generate and step > 2:
            with unwrap_model_for_generation(model, accelerator, False) as inside:
                greedy(inside)
        with CountCollectives() as collectives:
            train_step(accelerator, model, optimizer, seed=step)
        counts.append(dict(collectives.counts))
    return counts


def test_ungathered_generation_does_not_change_what_the_next_step_gathers():
    counts = run_on_ranks(count_gathers, engine="zero3", generate=False)
    assert counts == run_on_ranks(count_gathers, engine="zero3", generate=True)


def refuse_the_inside(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    model, _ = prepared(accelerator, tiny_model())
    before = engine_snapshot(model)
    with (
        pytest.raises(ValueError, match="pass the engine itself"),
        unwrap_model_for_generation(model.module, accelerator),
    ):
        pass
    return differences(before, engine_snapshot(model))


def test_the_inside_of_an_engine_is_refused():
    assert run_on_ranks(refuse_the_inside, engine="zero3") == [[], []]


def generate_without_an_engine(accelerator):
    import deepspeed

    from trl_zero3 import unwrap_model_for_generation

    expected = greedy(tiny_model())
    model = deepspeed.zero.Init(module=tiny_model()).module
    assert model.lm_head.weight.numel() == 0
    with (
        unwrap_model_for_generation(model, accelerator) as inside,
        CountCollectives() as collectives,
    ):
        assert inside is model
        assert greedy(inside) == expected
    return dict(collectives.counts), model.lm_head.weight.numel()


def test_a_sharded_model_that_has_no_engine_yet_can_generate():
    assert run_on_ranks(generate_without_an_engine, engine="zero3") == [({}, 0)] * 2


def generate_with_adapters(accelerator):
    from peft import LoraConfig, get_peft_model

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    def with_adapters():
        config = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["lm_head"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        return get_peft_model(tiny_model(), config)

    expected = greedy(with_adapters())
    model, optimizer = prepared(accelerator, with_adapters())
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert type(inside).__name__ == "PeftModelForCausalLM"
        assert greedy(inside) == expected
    train_step(accelerator, model, optimizer)
    before = engine_snapshot(model)
    with (
        unwrap_model_for_generation(model, accelerator) as inside,
        CountCollectives() as collectives,
    ):
        greedy(inside, 1 + 4 * accelerator.process_index)
        with inside.disable_adapter():
            assert greedy(inside) != expected
    assert differences(before, engine_snapshot(model)) == []
    assert not collectives.counts
    with unwrap_model_for_generation(
        model, accelerator, False, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
    ) as inside:
        assert len(greedy(inside, tokens=None)[0]) == 7
    changed = differences(before, engine_snapshot(model))
    assert not changed, changed
    return train_step(accelerator, model, optimizer)


def test_adapters_and_saved_modules_generate_train_and_come_back():
    losses = run_on_ranks(generate_with_adapters, engine="zero3")
    assert all(0 < loss < 10 for loss in losses)


def generate_with_a_head(accelerator):
    from torch import nn

    from trl_zero3 import unwrap_model_for_generation

    class WithHead(nn.Module):
        def __init__(self, pretrained_model):
            super().__init__()
            self.pretrained_model = pretrained_model
            self.v_head = nn.Linear(32, 1)

        def forward(self, **inputs):
            return self.pretrained_model(**inputs)

        def generate(self, *args, **kwargs):
            return self.pretrained_model.generate(*args, **kwargs)

    expected = greedy(tiny_model())
    model, _ = prepared(accelerator, WithHead(tiny_model()))
    with unwrap_model_for_generation(
        model, accelerator, generation_kwargs={"max_new_tokens": 6, "min_new_tokens": 6}
    ) as inside:
        assert greedy(inside, tokens=None) == expected
        with CountCollectives() as collectives:
            greedy(inside, 1 + 4 * accelerator.process_index)
    assert not collectives.counts
    with (
        unwrap_model_for_generation(model, accelerator, False) as inside,
        pytest.raises(ValueError, match="would hang"),
    ):
        greedy(inside, synced_gpus=False)
    return "generate" in vars(inside) or "generate" in vars(inside.pretrained_model)


def test_a_wrapper_that_delegates_generate_gets_the_same_care():
    assert run_on_ranks(generate_with_a_head, engine="zero3") == [False, False]


def refuse_other_partitions(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import gathered, unwrap_model_for_generation

    model, _ = prepared(accelerator, tiny_model())
    before = engine_snapshot(model)
    parameter = model.module.lm_head.weight
    # Stand-ins: the real ones need a disk, CUDA kernels, or an old DeepSpeed.
    for name, value, reason in (
        ("nvme_swapper", object(), "NVMe"),
        ("comm", object(), "MiCS"),
        ("ds_tensor.ds_quant_scale", object(), "quantized"),
    ):
        with (
            replaced(parameter, name, value),
            pytest.raises(ValueError, match=reason),
            gathered(model),
        ):
            pass
        with (
            replaced(parameter, name, value),
            pytest.raises(ValueError, match=reason),
            unwrap_model_for_generation(model, accelerator),
        ):
            pass
    with (
        replaced(model, "_deepcompile_active", True),
        pytest.raises(ValueError, match="DeepCompile has put gathering into"),
        unwrap_model_for_generation(model, accelerator),
    ):
        pass
    return differences(before, engine_snapshot(model))


@contextlib.contextmanager
def replaced(owner, name, value):
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    absent = object()
    old = getattr(owner, name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if old is absent else setattr(owner, name, old)


def test_set_ups_that_are_not_supported_are_refused_before_anything_is_gathered():
    assert run_on_ranks(refuse_other_partitions, engine="zero3") == [[], []]
