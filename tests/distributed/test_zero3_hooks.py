"""ZeRO-3's hooks: taken off and put back as the same entries, on a real engine."""

import pytest

from tests.distributed.generation_helpers import prepared, tiny_model, train_step
from tools.rails.collectives import CountCollectives
from tools.rails.ranks import run_on_ranks


def all_hooks(model):
    """Every hook entry of every module, with its key and its place."""
    from tools.rails.snapshots import HOOK_DICTIONARIES

    return {
        (name, dictionary): list(getattr(module, dictionary).items())
        for name, module in model.named_modules()
        for dictionary in HOOK_DICTIONARIES
        if getattr(module, dictionary, None)
    }


def engine_with_hooks(accelerator, steps=2):
    model, optimizer = prepared(accelerator, tiny_model())
    for step in range(steps):
        train_step(accelerator, model, optimizer, seed=step)
    return model, optimizer


def suspend_and_resume(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import suspended_hooks

    model, _ = engine_with_hooks(accelerator)
    layer = model.module.model.layers[0]
    mine = layer.register_forward_hook(lambda *_: None)
    mine_alone = all_hooks(model.module)
    before = engine_snapshot(model)
    with suspended_hooks(model):
        assert list(layer._forward_hooks) == [mine.id]
        assert sum(map(len, all_hooks(model.module).values())) == 1
        with suspended_hooks(model):
            assert list(layer._forward_hooks) == [mine.id]
        assert list(layer._forward_hooks) == [mine.id]
    assert differences(before, engine_snapshot(model)) == []
    with pytest.raises(KeyError), suspended_hooks(model):
        raise KeyError
    assert differences(before, engine_snapshot(model)) == []

    with suspended_hooks(model):
        first = layer.register_forward_hook(lambda *_: None, prepend=True)
        last = layer.register_forward_hook(lambda *_: None, with_kwargs=True)
        norm = model.module.model.norm.register_forward_pre_hook(lambda *_: None)
        mine_kept = list(layer._forward_hooks)
    assert mine_kept == [first.id, mine.id, last.id]
    old = [key for key, _ in mine_alone["model.layers.0", "_forward_hooks"]]
    assert list(layer._forward_hooks) == [first.id, *old, last.id]
    assert norm.id in model.module.model.norm._forward_pre_hooks
    for handle in (first, last, norm):
        handle.remove()
    assert differences(before, engine_snapshot(model)) == []
    with suspended_hooks(model):
        mine.remove()
    return mine.id in layer._forward_hooks, len(layer._forward_hooks) == len(old) - 1


def test_the_very_same_hooks_come_back_in_their_places_around_the_users():
    assert run_on_ranks(suspend_and_resume, engine="zero3") == [(False, True)] * 2


def remove_and_add(accelerator):
    from tools.rails.snapshots import differences, engine_snapshot
    from trl_zero3 import add_hooks, remove_hooks, unwrap_model_for_generation

    model, optimizer = engine_with_hooks(accelerator, steps=3)
    with CountCollectives() as usual:
        train_step(accelerator, model, optimizer, seed=3)
    before = engine_snapshot(model)
    add_hooks(model)
    assert differences(before, engine_snapshot(model)) == [], "they were in place"
    for _ in range(3):
        remove_hooks(model)
        remove_hooks(model)
        assert all_hooks(model.module) == {}
        with (
            pytest.raises(RuntimeError, match="hooks are off"),
            unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=False),
        ):
            pass
        add_hooks(model)
        add_hooks(model)
        assert differences(before, engine_snapshot(model)) == []
    with CountCollectives() as after:
        train_step(accelerator, model, optimizer, seed=4)
    return dict(after.counts) == dict(usual.counts), sum(usual.counts.values()) > 0


def test_remove_and_add_are_idempotent_and_keep_ids_and_the_prefetch_trace():
    assert run_on_ranks(remove_and_add, engine="zero3") == [(True, True)] * 2


def lose_hooks_to_others(accelerator):
    from trl_zero3 import add_hooks

    model, _ = engine_with_hooks(accelerator, steps=0)
    offload = model.optimizer.parameter_offload
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        handle.remove()
    with pytest.raises(RuntimeError, match=r"by something other than trl_zero3\.remove_hooks"):
        add_hooks(model)
    offload.forward_hooks, offload.backward_hooks = [], []
    with pytest.raises(RuntimeError, match=r"by something other than trl_zero3\.remove_hooks"):
        add_hooks(model)
    return True


def test_hooks_that_something_else_removed_are_an_error_not_a_silent_nothing():
    assert all(run_on_ranks(lose_hooks_to_others, engine="zero3"))


def ask_of_the_wrong_engine(accelerator):
    import torch

    from trl_zero3 import add_hooks, remove_hooks, suspended_hooks, unwrap

    model, _ = prepared(accelerator, tiny_model())
    for function in (remove_hooks, add_hooks):
        with pytest.raises(RuntimeError, match=r"at ZeRO stage 3; the optimizer of this"):
            function(model)
    with (
        pytest.raises(ValueError, match="takes a DeepSpeed engine at ZeRO stage 3"),
        suspended_hooks(model),
    ):
        pass
    plain = unwrap(model)
    assert remove_hooks(plain) is add_hooks(plain) is None
    no_optimizer = torch.nn.Linear(2, 2)
    no_optimizer.optimizer = None
    for function in (remove_hooks, add_hooks):
        with pytest.raises(RuntimeError, match="optimizer is None"):
            function(no_optimizer)
    return True


def test_an_engine_at_another_stage_and_a_missing_optimizer_are_refused():
    assert all(run_on_ranks(ask_of_the_wrong_engine, engine="zero2"))


def list_parameters(accelerator):
    import deepspeed

    from trl_zero3 import get_all_parameters, iter_params

    model, _ = engine_with_hooks(accelerator, steps=0)
    head, norm = model.module.lm_head, model.module.model.norm
    deepspeed.zero.register_external_parameter(head, norm.weight)
    assert list(get_all_parameters(head)) == [
        ("weight", head.weight),
        (id(norm.weight), norm.weight),
    ]
    assert iter_params(head) == [head.weight, norm.weight]
    return iter_params(model.module, recurse=True) == list(model.module.parameters())


def test_external_parameters_follow_a_modules_own():
    assert all(run_on_ranks(list_parameters, engine="zero3"))


def missing_private_names(accelerator):
    import deepspeed
    import torch
    from packaging.version import Version

    model, _ = engine_with_hooks(accelerator, steps=1)
    offload = model.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    parameter = next(model.module.parameters())
    prefix = "_PartitionedParameterCoordinator__"
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    wanted = [
        (offload, "forward_hooks backward_hooks module param_coordinator get_param_coordinator"),
        (coordinator, "_clean_inflight_param_registry _clear_trace_structures _invalidate_trace"),
        (coordinator, f"is_invalid_trace is_record_trace {prefix}n_available_params"),
        (parameter, "ds_id ds_status ds_numel ds_active_sub_modules is_external_param ds_tensor"),
        (parameter, "ds_shape ds_process_group nvme_swapper"),
        (parameter_offload, "FWD_MODULE_STACK"),
        (partition_parameters, "free_param"),
        (model.module, "ds_id applied_pre_backward_ref_cnt ds_grads_remaining"),
        (model.module, "pre_bwd_fn post_bwd_fn"),
        (model.module._parameters, "_in_forward"),
    ]
    if Version(deepspeed.__version__) >= Version("0.19.8"):
        # 0.16.4 replaces it only inside of `deepspeed.zero.Init`.
        assert torch.nn.functional.linear.__module__ == "deepspeed.runtime.zero.linear"
        wanted += [
            (offload, "fwd_pre_hook"),
            (model, "module_forward_pre_hook module_forward_post_hook _deepcompile_active"),
        ]
    missing = [
        f"{type(owner).__name__}.{name}"
        for owner, names in wanted
        for name in names.split()
        if not hasattr(owner, name)
    ]
    statuses = {"NOT_AVAILABLE", "INFLIGHT", "AVAILABLE"}
    missing += sorted(statuses - {status.name for status in type(parameter.ds_status)})
    return missing


def test_deepspeed_still_has_the_private_names_that_are_used():
    assert run_on_ranks(missing_private_names, engine="zero3") == [[], []]
