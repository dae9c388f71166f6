"""Everything that needs no engine: unwrapping, settings inside, checkpointing, plain modules."""

from copy import copy, deepcopy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from trl_zero3 import (
    add_hooks,
    disable_gradient_checkpointing,
    gathered,
    get_all_parameters,
    iter_params,
    remove_hooks,
    suspended_hooks,
    unwrap,
    unwrap_model_for_generation,
)

PROMPT = torch.arange(3, 9).reshape(2, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
    )
    return AutoModelForCausalLM.from_config(config)


def generate(model, **kwargs):
    mask = torch.ones_like(PROMPT)
    return model.generate(
        input_ids=PROMPT, attention_mask=mask, do_sample=False, pad_token_id=0, **kwargs
    )


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_compiled_and_ddp_are_unwrapped_in_either_order(process_group):
    layer = nn.Linear(2, 2)
    assert unwrap(layer) is layer
    assert unwrap(torch.compile(DistributedDataParallel(layer))) is layer
    assert unwrap(DistributedDataParallel(torch.compile(layer))) is layer
    assert unwrap(torch.compile(nn.DataParallel(layer))) is layer
    layer.compile()
    assert unwrap(layer) is layer


def test_regional_compilation_of_accelerate_is_unwrapped(model):
    try:
        from accelerate.utils import compile_regions
    except ImportError:  # accelerate 1.6 has no such function: build what the others return

        def compile_regions(model):
            compiled = copy(model)
            vars(compiled)["_orig_mod"] = model
            return compiled

    assert unwrap(compile_regions(model)) is model


def test_a_model_without_config_generation_config_or_checkpointing_is_fine():
    layer = nn.Linear(2, 2)
    before = dict(vars(layer))
    with unwrap_model_for_generation(layer, None) as inside:
        assert inside is layer
        assert layer(torch.ones(1, 2)).shape == (1, 2)
    assert vars(layer) == before
    with (
        pytest.raises(ValueError, match="has no generation_config to override"),
        unwrap_model_for_generation(layer, None, generation_kwargs={"top_k": 1}),
    ):
        pass


def test_parameters_of_a_plain_module():
    model = nn.Sequential(nn.Linear(3, 2))
    assert [name for name, _ in get_all_parameters(model, recurse=True)] == ["0.weight", "0.bias"]
    assert iter_params(model) == []
    assert iter_params(model[0]) == [model[0].weight, model[0].bias]


def test_a_plain_module_has_no_hooks_to_take_off_and_nothing_to_gather():
    layer = nn.Linear(2, 2)
    assert remove_hooks(layer) is None
    assert add_hooks(layer) is None
    with pytest.raises(ValueError, match="at ZeRO stage 3"), suspended_hooks(layer):
        pass
    data = layer.weight.data_ptr()
    with gathered(layer), gathered(layer.weight), gathered(layer.parameters()):
        assert layer.weight.data_ptr() == data


def test_overrides_hold_inside_only_and_a_copy_takes_what_the_body_changes(model):
    config = model.generation_config
    settings = config.to_dict()
    with unwrap_model_for_generation(
        model, None, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
    ) as inside:
        assert generate(inside).shape == (2, 7)
        inside.generation_config.temperature = 0.5
    assert model.generation_config is config
    assert config.to_dict() == settings
    with (
        pytest.raises(ValueError, match=r"\['max_tokens', 'topk'\] are not settings"),
        unwrap_model_for_generation(model, None, generation_kwargs={"topk": 1, "max_tokens": 2}),
    ):
        pass
    assert model.generation_config is config


def test_an_explicit_use_cache_false_among_the_overrides_is_heeded(model):
    lengths = []
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, inputs: lengths.append(inputs[0].shape[1])
    )
    with unwrap_model_for_generation(model, None, generation_kwargs={"use_cache": False}) as inside:
        generate(inside, max_new_tokens=2, min_new_tokens=2)
    assert lengths == [3, 4]


def test_a_generate_of_the_instance_comes_back_and_is_called(model):
    calls = []
    original = model.generate

    def counting(*args, synced_gpus=None, **kwargs):
        calls.append(synced_gpus)
        return original(*args, synced_gpus=synced_gpus, **kwargs)

    model.generate = counting
    with unwrap_model_for_generation(model, None) as inside:
        generate(inside, max_new_tokens=2)
        generate(inside, max_new_tokens=2, synced_gpus=False)
    assert calls == [False, False]
    assert model.generate is counting
    del model.generate
    with unwrap_model_for_generation(model, None):
        assert "generate" in vars(model)
    assert "generate" not in vars(model)


def test_a_generate_that_takes_no_synced_gpus_is_left_alone():
    class Echo(nn.Module):
        def generate(self, ids, **model_inputs):
            return ids, model_inputs

    echo = Echo()
    with unwrap_model_for_generation(echo, None) as inside:
        assert inside.generate(1) == (1, {})
        assert "generate" not in vars(inside)


def test_checkpointing_is_off_inside_and_comes_back_per_module_with_its_arguments(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.gradient_checkpointing = False

    def state():
        return [
            (name, module.gradient_checkpointing, vars(module).get("_gradient_checkpointing_func"))
            for name, module in model.named_modules()
            if "gradient_checkpointing" in vars(module)
        ]

    before = state()
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    for context in (
        lambda: disable_gradient_checkpointing(model),
        lambda: disable_gradient_checkpointing(model, {"use_reentrant": True}),
        lambda: unwrap_model_for_generation(
            model, None, gradient_checkpointing_kwargs={"use_reentrant": True}
        ),
    ):
        with context():
            assert not any(enabled for _, enabled, _ in state())
            assert model.training
        with pytest.raises(KeyboardInterrupt), context():
            raise KeyboardInterrupt
        assert state() == before
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes


def test_training_modes_come_back_whatever_the_body_calls(model):
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with unwrap_model_for_generation(model, None) as inside:
        inside.eval()
    assert [module.training for module in model.modules()] == before


def test_a_peft_model_stays_one(model):
    from peft import LoraConfig, get_peft_model

    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(r=2, **settings))
    expected = generate(adapted, max_new_tokens=4, min_new_tokens=4)
    config = model.generation_config
    with unwrap_model_for_generation(
        torch.compile(adapted), None, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
    ) as inside:
        assert inside is adapted
        assert generate(inside).equal(expected)
    assert model.generation_config is config


def test_torch_still_has_the_private_names_that_are_used(process_group):
    from torch.distributed import distributed_c10d

    assert hasattr(distributed_c10d, "_coalescing_manager")
    backend = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() > 0
    assert torch._C._nn.linear is torch.nn.functional.linear
    handle = nn.Linear(2, 2).register_forward_pre_hook(print, with_kwargs=True)
    assert handle.hooks_dict_ref is not None
    assert len(handle.extra_dict_ref) == 1


def test_synced_gpus_may_be_none_by_position(model):
    prompt = torch.arange(3, 9).reshape(2, 3)
    with unwrap_model_for_generation(model, None) as inside:
        ids = inside.generate(prompt, None, None, None, None, None, max_new_tokens=2)
    assert ids.shape[1] <= 5


def test_what_is_no_parameter_is_not_taken_for_nothing_to_gather():
    layer = nn.Linear(2, 2)
    for given in (layer.named_parameters(), [layer], dict(layer.named_parameters())):
        with pytest.raises(TypeError, match="is none: pass"), gathered(given):
            pass


def test_a_copy_made_inside_generates_from_its_own_weights(model, tmp_path):
    with unwrap_model_for_generation(model, None) as inside:
        copied = deepcopy(inside)
        torch.save(inside, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    expected = generate(model, max_new_tokens=4, min_new_tokens=4).tolist()
    for other in (copied, loaded):
        assert generate(other, max_new_tokens=4, min_new_tokens=4).tolist() == expected
        for parameter in other.parameters():
            parameter.data.zero_()
        assert generate(other, max_new_tokens=4, min_new_tokens=4).tolist() != expected


def test_overrides_reach_a_config_behind_a_wrapper_that_has_its_own(model):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.generation_config = GenerationConfig()

    wrapper = Wrapper()
    outer, inner = wrapper.generation_config, model.generation_config
    with unwrap_model_for_generation(
        wrapper, None, generation_kwargs={"max_new_tokens": 4, "min_new_tokens": 4}
    ) as inside:
        assert inside.generation_config.max_new_tokens == 4
        assert generate(inside.inner).shape == (2, 7)
    assert wrapper.generation_config is outer
    assert model.generation_config is inner


def test_a_generate_without_a_signature_is_left_alone():
    layer = nn.Linear(2, 2)
    layer.generate = max
    with unwrap_model_for_generation(layer, None) as inside:
        assert inside.generate(1, 2) == 2


@pytest.mark.parametrize("given", [None, "model", {"model": 1}])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(TypeError, match=f"{type(given).__name__} was given"):
        unwrap(given)
    with (
        pytest.raises(TypeError, match="pass the model"),
        unwrap_model_for_generation(given, None),
    ):
        pass
