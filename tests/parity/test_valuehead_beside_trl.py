"""Value-head models compute what TRL 0.18.2's compute, and load what it saved."""

import pytest
import torch

from tools.rails.peers import find, run_both
from tools.rails.ranks import run_on_ranks

pytestmark = pytest.mark.full

CAUSAL = "AutoModelForCausalLMWithValueHead"
SEQ2SEQ = "AutoModelForSeq2SeqLMWithValueHead"
KINDS = {"llama": CAUSAL, "gpt2": CAUSAL, "t5": SEQ2SEQ}


def make_base(kind, dtype):
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config)
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4))
    else:
        config = T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    return model.to(getattr(torch, dtype))


def make_model(library, kind, dtype="float32"):
    import torch

    model_class = find(library, KINDS[kind])
    # TRL's default is 0.1.
    model = model_class.from_pretrained(make_base(kind, dtype), summary_dropout_prob=0.0)
    torch.manual_seed(1)
    for parameter in model.v_head.parameters():
        torch.nn.init.normal_(parameter)
    return model


def make_inputs(kind):
    import torch

    torch.manual_seed(2)
    ids = torch.randint(3, 99, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = torch.randint(3, 99, (2, 5)) if kind == "t5" else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def computed(library, kind, dtype):
    import torch

    model = make_model(library, kind, dtype).eval()
    options = {"upcast_logits": True} if library == "ours" else {}
    logits, loss, value = model(**make_inputs(kind), **options)
    (loss + value.square().mean()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    inputs = make_inputs(kind)
    inputs.pop("labels")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
        if kind == "t5":
            inputs["decoder_input_ids"] = torch.zeros(2, 1, dtype=torch.long)
        cached = model(**inputs, return_past_key_values=True)
    return {
        "results": {"logits": logits.detach(), "loss": loss.detach(), "value": value.detach()},
        "gradients": gradients,
        "state": model.state_dict(),
        "tokens": tokens,
        "returned with the cache": [len(cached), len(cached[3]), cached[3][0][0].shape],
    }


def saved_by_trl(folder, kind, options, with_adapter=False):
    """Save TRL's model and return its tensors as a plain state dict."""
    import torch

    model = make_model("trl", kind)
    if with_adapter:
        from peft import LoraConfig

        model.pretrained_model.save_pretrained(f"{folder}/base")
        model = find("trl", KINDS[kind]).from_pretrained(
            f"{folder}/base",
            peft_config=LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
            summary_dropout_prob=0.0,
        )
    model.eval()
    model.save_pretrained(folder, **options)
    with torch.no_grad():
        logits, _, value = model(**make_inputs(kind))
    return {"state": model.state_dict(), "logits": logits, "value": value}


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different, different


def close(model, kind, theirs):
    # Another version of transformers sums in another order, and fills padding otherwise.
    inputs = make_inputs(kind)
    with torch.no_grad():
        logits, _, value = model(**inputs)
    real = (inputs["labels"] if kind == "t5" else inputs["attention_mask"]) > 0
    torch.testing.assert_close(logits[real], theirs["logits"][real])
    torch.testing.assert_close(value[real], theirs["value"][real])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_values_loss_gradients_and_tokens_are_bit_equal(kind, dtype):
    ours, theirs = run_both(computed, kind=kind, dtype=dtype)
    assert ours["results"]["logits"].dtype == torch.float32
    equal(ours["results"], theirs["results"])
    equal(ours["gradients"], theirs["gradients"])
    equal(ours["state"], theirs["state"])
    assert ours["tokens"].equal(theirs["tokens"])
    assert ours["returned with the cache"] == theirs["returned with the cache"]


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_trl_saved_loads_bit_equal(kind, safe, tmp_path):
    (theirs,) = run_on_ranks(
        saved_by_trl,
        engine=None,
        environment="peer-old",
        folder=str(tmp_path),
        kind=kind,
        options={"safe_serialization": safe},
    )
    model = find("ours", KINDS[kind]).from_pretrained(tmp_path).eval()
    equal(model.state_dict(), theirs["state"])
    close(model, kind, theirs)


def test_what_trl_saved_in_shards_loads_bit_equal(tmp_path):
    (theirs,) = run_on_ranks(
        saved_by_trl,
        engine=None,
        environment="peer-old",
        folder=str(tmp_path),
        kind="llama",
        options={"max_shard_size": "20KB"},
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = find("ours", CAUSAL).from_pretrained(tmp_path)
    equal(model.state_dict(), theirs["state"])


def test_an_adapter_that_trl_saved_loads_with_its_head(tmp_path):
    (theirs,) = run_on_ranks(
        saved_by_trl,
        engine=None,
        environment="peer-old",
        folder=str(tmp_path),
        kind="llama",
        options={},
        with_adapter=True,
    )
    model = find("ours", CAUSAL).from_pretrained(tmp_path).eval()
    assert model.is_peft_model
    head = {f"v_head.{name}": value for name, value in model.v_head.state_dict().items()}
    equal(head, {name: value for name, value in theirs["state"].items() if "v_head" in name})
    close(model, "llama", theirs)
