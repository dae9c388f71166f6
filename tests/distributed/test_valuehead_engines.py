"""Value-head models on real engines: same losses as alone; what is saved is what was trained."""

import pytest
from engines import whole_state_dict

from tools.rails.ranks import run_on_ranks

ENGINES = ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"]
BASES = ["llama", "gpt2", "lora"]


def build(base):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from trl_valuehead import AutoModelForCausalLMWithValueHead

    torch.manual_seed(0)
    if base == "gpt2":  # tied
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=64,
            )
        )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    if base == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return AutoModelForCausalLMWithValueHead(model.eval(), v_head_init_strategy="normal")


def train_and_save(accelerator, base, folder):
    """Two steps of a value and a language-model loss, then save; returns losses and the weights."""
    import torch

    model = build(base)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(20).reshape(2, 10)
    losses = []
    for _ in range(2):
        _, loss, value = model(ids, labels=ids)
        loss = loss + (value - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = whole_state_dict(accelerator, model)
    unwrapped = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        unwrapped.save_pretrained(folder, state_dict=state)
        state = {
            key.removeprefix("pretrained_model."): value.detach().cpu().float().clone()
            for key, value in state.items()
        }
    else:
        state = None
    accelerator.wait_for_everyone()
    return losses, state


@pytest.mark.parametrize(
    ("engine", "base"),
    [(engine, base) for engine in ENGINES for base in BASES if (engine, base) != ("fsdp1", "lora")],
)
def test_losses_are_those_of_one_process_and_what_is_saved_loads(engine, base, tmp_path):
    import torch

    from trl_valuehead import AutoModelForCausalLMWithValueHead

    folder = str(tmp_path / "policy")
    results = run_on_ranks(train_and_save, engine=engine, base=base, folder=folder)
    ((alone, _),) = run_on_ranks(
        train_and_save, engine="single", base=base, folder=str(tmp_path / "single")
    )
    for losses, _ in results:
        assert losses == pytest.approx(alone, rel=1e-4)
    assert alone[1] < alone[0]

    trained = results[0][1]
    if base == "lora":
        from safetensors.torch import load_file

        saved = load_file(f"{folder}/adapter_model.safetensors") | load_file(
            f"{folder}/v_head.safetensors"
        )
        assert sum("lora_" in key for key in saved) == 4
        for key, value in saved.items():
            assert torch.equal(
                value, trained[key.replace(".weight", ".default.weight") if "lora_" in key else key]
            ), key
        return
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder).state_dict()
    assert loaded.keys() >= trained.keys()
    for key, value in trained.items():
        assert torch.equal(loaded[key], value), key
    before = build(base).state_dict()
    assert not torch.equal(loaded["v_head.summary.weight"], before["v_head.summary.weight"])


def refuse(accelerator, folder, base="llama", state_dict=False):
    import torch

    model = build(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    state = whole_state_dict(accelerator, model) if state_dict else None
    try:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_saving_pieces_is_refused(engine, tmp_path):
    for message in run_on_ranks(refuse, engine=engine, folder=str(tmp_path / "policy")):
        assert "get_state_dict" in message
    assert not (tmp_path / "policy").exists()


def test_an_adapter_inside_fsdp1_is_refused_which_peft_would_save_without_its_weights(tmp_path):
    folder = str(tmp_path / "policy")
    options = {"folder": folder, "base": "lora", "state_dict": True}
    for message in run_on_ranks(refuse, engine="fsdp1", **options):
        assert "which FSDP1 changes" in message
    assert not (tmp_path / "policy").exists()


def load_under_zero_init(accelerator, folder):
    """A checkpoint and its head load where every parameter is born in pieces."""
    import deepspeed
    import torch
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from trl_valuehead import AutoModelForCausalLMWithValueHead

    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config = HfDeepSpeedConfig(zero)
    try:
        with deepspeed.zero.Init(config_dict_or_path=zero):
            model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
            normal = AutoModelForCausalLMWithValueHead.from_pretrained(
                folder, v_head_init_strategy="normal", v_head_initializer_range=0.0
            )
    finally:
        del config
        unset_hf_deepspeed_config()
    weight = model.v_head.summary.weight
    pieces = weight.numel() == 0 and hasattr(weight, "ds_id")
    names, parameters = zip(*model.named_parameters(), strict=True)
    with deepspeed.zero.GatheredParameters(list(parameters)):
        state = {
            name.removeprefix("pretrained_model."): p.detach().clone()
            for name, p in zip(names, parameters, strict=True)
        }
    del normal
    return pieces, {key: torch.as_tensor(value) for key, value in state.items()}


def test_a_head_in_pieces_is_loaded(tmp_path):
    import torch

    model = build("llama")
    model.save_pretrained(tmp_path)
    for pieces, state in run_on_ranks(load_under_zero_init, engine="zero3", folder=str(tmp_path)):
        assert pieces
        for key, value in model.state_dict().items():
            assert torch.equal(state[key], value), key


def save_and_load_state(accelerator, folder):
    import torch

    model = build("gpt2" if accelerator.state.deepspeed_plugin is None else "llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model(torch.arange(6).reshape(1, 6))[2].detach()
    accelerator.save_state(folder)
    ids = torch.arange(20).reshape(2, 10)
    accelerator.backward(model(ids)[2].mean())
    optimizer.step()
    optimizer.zero_grad()
    changed = model(torch.arange(6).reshape(1, 6))[2].detach()
    accelerator.load_state(folder)
    return before, changed, model(torch.arange(6).reshape(1, 6))[2].detach()


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_training_resumes_from_accelerates_state(engine, tmp_path):
    import torch

    for before, changed, after in run_on_ranks(
        save_and_load_state, engine=engine, folder=str(tmp_path)
    ):
        assert not torch.equal(before, changed)
        torch.testing.assert_close(after, before)


def train_values_alone_and_generate(accelerator):
    """Losses of three steps on values without logits, and tokens, before and after the steps."""
    import torch

    from trl_zero3 import unwrap_model_for_generation

    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(20).reshape(2, 10)

    def generate():
        with torch.no_grad(), unwrap_model_for_generation(model, accelerator) as unwrapped:
            return unwrapped.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    tokens, losses = [generate()], []
    with torch.no_grad():
        both, alone = model(ids)[2], model(ids, values_only=True)[2]
    for _ in range(3):
        if type(model).__name__ == "DistributedDataParallel":  # the LM head would go unused
            logits, _, value = model(ids)
            loss = (value - 1).pow(2).mean() + 0 * logits.sum()
        else:
            loss = (model(ids, values_only=True)[2] - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [*tokens, generate()], both.equal(alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_values_alone_train_and_the_wrapper_generates_as_one_process_does(engine):
    ((alone, tokens, _),) = run_on_ranks(train_values_alone_and_generate, engine="single")
    assert alone[2] < alone[0]
    for losses, generated, same in run_on_ranks(train_values_alone_and_generate, engine=engine):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert all(one.equal(other) for one, other in zip(generated, tokens, strict=True))
        assert same
