"""`unwrap_model_for_generation` on every engine: right tokens, no trace, no communication."""

import contextlib

import pytest

from tests.distributed.generation_helpers import (
    full_weights,
    greedy,
    prepared,
    tiny_model,
    train_step,
)
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]
STEPS = 5


@pytest.fixture(params=ENGINES, scope="module")  # tests of one engine share its ranks
def engine(request):
    return request.param


def generate_before_and_after_a_step(accelerator):
    from trl_zero3 import unwrap, unwrap_model_for_generation

    plain = tiny_model()
    model, optimizer = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert inside is unwrap(model)
        assert greedy(inside) == greedy(plain)
    untrained = greedy(plain)
    train_step(accelerator, model, optimizer)
    plain.load_state_dict(full_weights(model))
    with unwrap_model_for_generation(model, accelerator) as inside:
        trained = greedy(inside)
        assert trained == greedy(plain)
    return untrained != trained, train_step(accelerator, model, optimizer)


def test_generation_is_that_of_the_plain_model_with_the_same_weights(engine):
    results = run_on_ranks(generate_before_and_after_a_step, engine=engine)
    assert all(changed and loss > 0 for changed, loss in results)


def train_with_generation_between(accelerator, generate):
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    losses, counts, inside = [], [], []
    for step in range(STEPS):
        if generate:
            with (
                unwrap_model_for_generation(model, accelerator) as unwrapped,
                CountCollectives() as collectives,
            ):
                greedy(unwrapped, 1 + 4 * accelerator.process_index)
                greedy(unwrapped, 5 - 4 * accelerator.process_index)
            inside.append(dict(collectives.counts))
        with CountCollectives() as collectives:
            losses.append(train_step(accelerator, model, optimizer, seed=step))
        counts.append(dict(collectives.counts))
    return losses, counts, inside


def test_training_is_bit_identical_with_generation_of_unequal_length_between(engine):
    without = run_on_ranks(train_with_generation_between, engine=engine, generate=False)
    between = run_on_ranks(train_with_generation_between, engine=engine, generate=True)
    for (losses, counts, _), (same_losses, same_counts, inside) in zip(
        without, between, strict=True
    ):
        assert same_losses == losses
        assert len(set(losses)) == STEPS
        assert same_counts == counts, "the steps gather what they would have gathered"
        if engine == "fsdp1":
            assert all("allgather" in forward for forward in inside)
        else:
            assert inside == [{}] * STEPS


def leave_in_every_way(accelerator):
    import torch

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap, unwrap_model_for_generation

    class StopBodyError(Exception):
        pass

    calls = []

    def fail_at_the_third_forward(*_):
        calls.append(None)
        if len(calls) == 3:
            raise StopBodyError("in a layer")

    def returned(inside):
        greedy(inside)

    def raised_at_once(inside):
        raise StopBodyError("before")

    def raised_after(inside):
        greedy(inside)
        raise StopBodyError("after")

    def interrupted(inside):
        greedy(inside)
        raise KeyboardInterrupt

    def raised_in_a_layer(inside):
        calls.clear()
        with inside.model.layers[1].mlp.register_forward_hook(fail_at_the_third_forward):
            greedy(inside)

    def nested(inside):
        expected = greedy(inside)
        with unwrap_model_for_generation(model, accelerator) as again:
            assert again is inside
            assert greedy(again) == expected
        assert greedy(inside) == expected

    def nested_and_raised(inside):
        expected = greedy(inside)
        with (
            contextlib.suppress(StopBodyError),
            unwrap_model_for_generation(model, accelerator) as again,
        ):
            raised_in_a_layer(again)
        assert greedy(inside) == expected
        raise StopBodyError("outside")

    def changed_by_the_user(inside):
        inside.eval()
        inside.generation_config.max_new_tokens = 77
        greedy(inside)

    ways = [
        returned,
        raised_at_once,
        raised_after,
        interrupted,
        raised_in_a_layer,
        nested,
        nested_and_raised,
        changed_by_the_user,
    ]
    model, optimizer = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(model, accelerator):
        pass  # FSDP makes itself ready at the first use, which is no change of ours

    def check(moment):
        for way in ways:
            before = engine_snapshot(model)
            try:
                with unwrap_model_for_generation(model, accelerator) as inside:
                    way(inside)
            except (StopBodyError, KeyboardInterrupt):
                pass
            changed = differences(before, engine_snapshot(model))
            assert not changed, f"{way.__name__} {moment}: {changed}"

    def loss_of(seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 99, (2, 12), generator=generator)
        return model(input_ids=ids, labels=ids).loss

    check("before the first step")
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(3)]
    check("between steps")
    unwrap(model).eval()
    check("in eval mode")
    unwrap(model).train()
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(3))
    check("with gradients accumulated")
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(4)
    with unwrap_model_for_generation(model, accelerator):
        pass  # what was prefetched for the backward arrives, and is released
    check("between forward and backward")
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, loss.item(), train_step(accelerator, model, optimizer, seed=5)]


def test_the_engine_comes_back_as_it_was_however_the_body_ends(engine):
    results = run_on_ranks(leave_in_every_way, engine=engine, time_limit=200)
    undisturbed = run_on_ranks(train_without_generation, engine=engine)
    assert results == undisturbed


def train_without_generation(accelerator):
    model, optimizer = prepared(accelerator, tiny_model())
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(6)]
    return losses[:3] + losses[4:]


def refuse_before_touching(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    model, _ = prepared(accelerator, tiny_model())
    before = engine_snapshot(model)
    with (
        pytest.raises(ValueError, match=r"\['max_new_token'\] are not settings of Gener"),
        unwrap_model_for_generation(model, accelerator, generation_kwargs={"max_new_token": 3}),
    ):
        pass
    return differences(before, engine_snapshot(model))


def test_a_misspelt_generation_setting_is_refused_and_nothing_is_touched(engine):
    results = run_on_ranks(refuse_before_touching, engine=engine)
    assert all(not changed for changed in results), results


def generate_with_checkpointing(accelerator):
    from trl_zero3 import unwrap, unwrap_model_for_generation

    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    model.generation_config.use_cache = False
    model.model.layers[2].gradient_checkpointing = False
    expected = greedy(tiny_model(), 4)
    model, optimizer = prepared(accelerator, model)
    unwrapped = unwrap(model)
    unwrapped.train()

    def flags():
        return {
            name: (module.gradient_checkpointing, vars(module).get("_gradient_checkpointing_func"))
            for name, module in unwrapped.named_modules()
            if "gradient_checkpointing" in vars(module)
        }

    lengths = []
    attention = unwrapped.model.layers[0].self_attn.q_proj
    before, config = flags(), unwrapped.generation_config
    assert len(before) >= 1
    with (
        attention.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1])),
        unwrap_model_for_generation(
            model, accelerator, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
        ) as inside,
    ):
        assert not any(flag for flag, _ in flags().values())
        output = greedy(inside, tokens=None)
        assert inside.training
    assert output == expected
    assert lengths == [3, 1, 1, 1], "without a cache it would be 3, 4, 5, 6"
    assert flags() == before
    assert any(flag for flag, _ in before.values())
    assert unwrapped.generation_config is config
    assert (config.use_cache, unwrapped.config.use_cache) == (False, False)
    return train_step(accelerator, model, optimizer)


def test_generation_is_cached_with_gradient_checkpointing_on_and_overrides_end_with_it(engine):
    losses = run_on_ranks(generate_with_checkpointing, engine=engine)
    assert all(loss > 0 for loss in losses)
