"""What is particular to FSDP1 and FSDP2 when a sharded model generates."""

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
from tools.rails.ranks import run_on_ranks


def generate_and_train(accelerator, use_orig_params):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    plugin = accelerator.state.fsdp_plugin
    if use_orig_params is not None:
        plugin.use_orig_params = use_orig_params
    plain = tiny_model()
    expected = greedy(plain)
    model, optimizer = prepared(accelerator, tiny_model())
    losses = []
    for step in range(4):
        with unwrap_model_for_generation(model, accelerator) as inside:
            ids = greedy(inside)
        if step == 0:
            assert ids == expected
        before = engine_snapshot(model)
        for way in (KeyError, KeyboardInterrupt):
            with (
                pytest.raises(way),
                unwrap_model_for_generation(model, accelerator) as inside,
                inside.model.layers[1].mlp.register_forward_hook(raising(way, at=2)),
            ):
                greedy(inside)
        assert differences(before, engine_snapshot(model)) == []
        losses.append(train_step(accelerator, model, optimizer, seed=step))
    plain.load_state_dict(full_weights(model))
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert greedy(inside) == greedy(plain)
    return losses


def raising(error, at):
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) == at:
            raise error

    return hook


def train(accelerator, use_orig_params):
    if use_orig_params is not None:
        accelerator.state.fsdp_plugin.use_orig_params = use_orig_params
    model, optimizer = prepared(accelerator, tiny_model())
    return [train_step(accelerator, model, optimizer, seed=step) for step in range(4)]


@pytest.mark.parametrize(
    ("engine", "use_orig_params"), [("fsdp1", True), ("fsdp1", False), ("fsdp2", None)]
)
def test_a_layer_that_raises_while_generating_leaves_training_as_it_was(engine, use_orig_params):
    results = run_on_ranks(generate_and_train, engine=engine, use_orig_params=use_orig_params)
    assert results == run_on_ranks(train, engine=engine, use_orig_params=use_orig_params)


def train_after_a_forward_that_raised(accelerator, generate):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(model, accelerator) as inside:
        expected = greedy(inside)
    layers = model.model.layers
    with (
        pytest.raises(KeyError),
        layers[1].mlp.register_forward_hook(raising(KeyError, at=1)),
    ):
        model(input_ids=torch.arange(3, 9).reshape(2, 3))
    if generate:
        if accelerator.state.fsdp_plugin.fsdp_version == 1:
            with unwrap_model_for_generation(model, accelerator) as inside:
                greedy(inside)  # what that forward left whole becomes shards again
        before = engine_snapshot(model)
        for _ in range(2):
            with unwrap_model_for_generation(model, accelerator) as inside:
                assert greedy(inside) == expected
            changed = differences(before, engine_snapshot(model))
            assert not changed, changed
    try:
        return [train_step(accelerator, model, optimizer, seed=step) for step in range(3)]
    except Exception as error:  # what the engine makes of it by itself
        return type(error).__name__


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_after_a_training_forward_that_raised_half_way_nothing_is_changed(engine):
    results = run_on_ranks(train_after_a_forward_that_raised, engine=engine, generate=True)
    alone = run_on_ranks(train_after_a_forward_that_raised, engine=engine, generate=False)
    assert results == alone


def generate_in_bf16(accelerator):
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    dtypes = {}
    with unwrap_model_for_generation(model, accelerator) as inside:
        for name in ("model.layers.0.mlp.up_proj", "lm_head"):
            module = inside.get_submodule(name)
            module.register_forward_hook(
                lambda module, _, output, name=name: dtypes.update({name: output.dtype})
            )
            dtypes[f"{name}.weight"] = module.weight.dtype
        ids = greedy(inside)
    weights = {str(dtype).split(".")[-1] for name, dtype in dtypes.items() if "weight" in name}
    assert dtypes["model.layers.0.mlp.up_proj"] == torch.bfloat16
    loss = train_step(accelerator, model, optimizer)
    return torch.tensor(ids).shape, weights, loss


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_mixed_precision_generates_in_its_dtype(engine):
    for shape, weights, loss in run_on_ranks(
        generate_in_bf16, engine=engine, mixed_precision="bf16"
    ):
        assert shape == (2, 9)
        assert loss > 0
        if engine == "fsdp2":
            assert weights == {"bfloat16"}


def generate_with_adapters(accelerator):
    from peft import LoraConfig, get_peft_model

    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import unwrap_model_for_generation

    def with_adapters():
        config = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        return get_peft_model(tiny_model(), config)

    expected = greedy(with_adapters())
    model, optimizer = prepared(accelerator, with_adapters())
    with unwrap_model_for_generation(model, accelerator) as inside:
        assert type(inside.base_model).__name__ == "LoraModel"
        assert greedy(inside) == expected
    losses = [train_step(accelerator, model, optimizer, seed=step) for step in range(2)]
    before = engine_snapshot(model)
    with (
        unwrap_model_for_generation(model, accelerator) as inside,
        CountCollectives() as collectives,
    ):
        assert greedy(inside) == greedy(inside)
    assert differences(before, engine_snapshot(model)) == []
    losses.append(train_step(accelerator, model, optimizer, seed=2))
    return dict(collectives.counts), losses


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_adapters_generate_and_train(engine):
    for counts, losses in run_on_ranks(generate_with_adapters, engine=engine):
        assert losses[0] > 0
        assert (counts == {}) == (engine == "fsdp2")


def add_adapters_to_a_sharded_model(accelerator):
    from trl_zero3 import unwrap_model_for_generation

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(torch.ones(1, base.in_features))

        def forward(self, hidden):
            return self.base(hidden) + hidden @ self.down.T

    def adapt(model):
        attention = model.model.layers[1].self_attn
        attention.q_proj = Adapted(attention.q_proj)
        return model

    expected = greedy(adapt(tiny_model()))
    model, _ = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(adapt(model), accelerator) as inside:
        return greedy(inside) == expected


def test_plain_tensors_and_sharded_ones_mix_under_fsdp2():
    assert run_on_ranks(add_adapters_to_a_sharded_model, engine="fsdp2") == [True, True]


def refuse_explicit_false(accelerator):
    from trl_zero3 import unwrap_model_for_generation

    model, _ = prepared(accelerator, tiny_model())
    with unwrap_model_for_generation(model, accelerator) as inside:
        with pytest.raises(ValueError, match="would hang"):
            greedy(inside, synced_gpus=False)
        return len(greedy(inside, 1 + 4 * accelerator.process_index)[0])


def test_ranks_stay_in_step_under_fsdp1():
    assert run_on_ranks(refuse_explicit_false, engine="fsdp1") == [4, 8]


def save_and_go_backward_inside(accelerator, disturb):
    from trl_zero3 import unwrap_model_for_generation

    model, optimizer = prepared(accelerator, tiny_model())
    losses = [train_step(accelerator, model, optimizer)]
    if disturb:
        weights = full_weights(model)
        with unwrap_model_for_generation(model, accelerator) as inside:
            expected = greedy(inside)
            state = inside.state_dict()
            assert all(tensor.equal(weights[name]) for name, tensor in state.items())
            assert greedy(inside) == expected
            ids = torch.arange(3, 9).reshape(2, 3)
            inside(input_ids=ids, labels=ids).loss.backward()
    return losses + [train_step(accelerator, model, optimizer, seed=step) for step in range(1, 4)]


def test_a_state_dict_is_whole_inside_and_a_backward_inside_is_forgotten_under_fsdp2():
    results = [
        run_on_ranks(save_and_go_backward_inside, engine="fsdp2", disturb=disturb)
        for disturb in (True, False)
    ]
    assert results[0] == results[1]


def missing_private_names(accelerator):
    model, optimizer = prepared(accelerator, tiny_model())
    train_step(accelerator, model, optimizer)
    if hasattr(model, "_get_fsdp_state"):
        state = model.model.layers[0]._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        wanted = [
            (state, "_is_root _lazy_init _training_state _modules_to_run_forward"),
            (state._state_ctx, "iter_forward_root post_backward_final_callback_queued"),
            (state._comm_ctx, "all_gather_state post_forward_order"),
            (groups[0], "_training_state post_forward_mesh_info _reshard_after_forward_event"),
            (groups[0], "_post_forward_indices is_sharded is_sharded_post_forward unshard"),
            (groups[0], "wait_for_unshard _to_sharded mesh_info fsdp_params mp_policy device"),
            (groups[0].fsdp_params[0], "_orig_size fsdp_placement sharded_param offload_to_cpu"),
            (groups[0].fsdp_params[0], "_unsharded_param"),
            (groups[0], "_module_to_pre_save_state_dict_hook_handle"),
            (state, "_mp_policy _pre_forward_hook_handle _post_forward_hook_handle"),
        ]
    else:
        from torch.distributed.fsdp import _runtime_utils

        wanted = [
            (_runtime_utils, "_lazy_init _reshard"),
            (model, "_all_fsdp_states _handle _exec_order_data training_state process_group"),
            (model._handle, "world_size flat_param _offload_params device uses_sharded_strategy"),
            (model._handle.flat_param, "_unpadded_unsharded_size"),
            (model._handle, "_training_state _needs_pre_forward_unshard needs_unshard"),
            (model._handle, "_post_forward_index _pre_forward_order_index"),
            (model._exec_order_data, "handles_post_forward_order handles_pre_forward_order"),
            (model._exec_order_data, "current_order_index warn_status"),
        ]
    return [
        f"{type(owner).__name__}.{name}"
        for owner, names in wanted
        for name in names.split()
        if not hasattr(owner, name)
    ]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_torch_still_has_the_private_names_that_are_used(engine):
    assert run_on_ranks(missing_private_names, engine=engine) == [[], []]
