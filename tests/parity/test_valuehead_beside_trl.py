"""Value-head models compute what TRL 0.18.2's compute, and load what it saved."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from tools.rails.peers import find, run_both
from tools.rails.ranks import RankError, run_on_ranks

pytestmark = pytest.mark.full

CAUSAL = "AutoModelForCausalLMWithValueHead"
SEQ2SEQ = "AutoModelForSeq2SeqLMWithValueHead"
ENCODER_DECODERS = ("t5", "bart", "bert_to_bert")
KINDS = (
    *("llama", "gpt2", "opt", "mixtral", "falcon", "bloom", "gpt_neox"),
    *("phi", "qwen2", "gemma2", "bart_decoder", "t5", "bart"),
)
# What TRL fails on, by the error.
NOT_WITH_TRL = {
    "mamba": "no attribute 'past_key_values'",  # its cache can't be returned
    "gemma3": "hidden_size",
    "bert_to_bert": "does not have a language model head",
}


@functools.cache
def architectures():
    """The models that the package's own tests build."""
    folder = Path(__file__).parents[2] / "packages" / "trl-valuehead" / "tests"
    spec = importlib.util.spec_from_file_location("architectures", folder / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_base(kind, dtype):
    import torch

    return architectures().build_model(kind).to(getattr(torch, dtype))


def class_name(kind):
    return SEQ2SEQ if kind in ENCODER_DECODERS else CAUSAL


def make_model(library, kind, dtype="float32"):
    import torch

    model_class = find(library, class_name(kind))
    # TRL's default is 0.1.
    model = model_class.from_pretrained(make_base(kind, dtype), summary_dropout_prob=0.0)
    torch.manual_seed(1)
    for parameter in model.v_head.parameters():
        torch.nn.init.normal_(parameter)
    return model


def make_inputs(kind):
    import torch

    torch.manual_seed(2)
    ids = torch.randint(3, 60, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = torch.randint(3, 60, (2, 5)) if kind in ENCODER_DECODERS else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def computed(library, kind, dtype):
    import torch

    model = make_model(library, kind, dtype).eval()
    options = {"upcast_logits": True} if library == "ours" else {}
    logits, loss, value = model(**make_inputs(kind), **options)
    (loss + value.square().mean()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    inputs = make_inputs(kind)
    inputs.pop("labels")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
        if kind in ENCODER_DECODERS:
            inputs["decoder_input_ids"] = torch.zeros(2, 1, dtype=torch.long)
        cached = model(**inputs, return_past_key_values=True)
    cache = cached[3]
    keys = cache.key_cache[0] if hasattr(cache, "key_cache") else cache[0][0]
    return {
        "results": {"logits": logits.detach(), "loss": loss.detach(), "value": value.detach()},
        "gradients": gradients,
        "state": model.state_dict(),
        "tokens": tokens,
        "returned with the cache": [len(cached), type(cache).__name__, keys.shape],
    }


def saved_by_trl(folder, kind, layout, **options):
    """Save TRL's model and return its tensors as a plain state dict, and what it computes."""
    import torch

    model = make_model("trl", kind)
    if layout == "adapter":
        from peft import LoraConfig

        model.pretrained_model.save_pretrained(f"{folder}/base")
        model = find("trl", class_name(kind)).from_pretrained(
            f"{folder}/base",
            peft_config=LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
            summary_dropout_prob=0.0,
        )
    model.eval()
    state = model.state_dict()
    with torch.no_grad():
        logits, _, value = model(**make_inputs(kind))
    if layout == "pushed":
        base_class = type(model.pretrained_model)
        push = base_class.push_to_hub
        # As transformers does before it uploads the folder.
        base_class.push_to_hub = base_class.save_pretrained
        try:
            model.push_to_hub(folder, **options)
        finally:
            base_class.push_to_hub = push
    elif layout == "prefixed":  # as a DeepSpeed engine around the wrapper names its weights
        model.save_pretrained(folder, state_dict=torch.nn.Module.state_dict(model), **options)
    else:
        model.save_pretrained(folder, **options)
    return {"state": state, "logits": logits, "value": value}


def scores(library):
    """A reward adapter's scores, and the values and logits beside it."""
    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    with tempfile.TemporaryDirectory() as folder:
        make_base("llama", "float32").save_pretrained(f"{folder}/base")
        reward = AutoModelForSequenceClassification.from_pretrained(f"{folder}/base", num_labels=1)
        reward = get_peft_model(reward, LoraConfig(task_type="SEQ_CLS", **options))
        reward.save_pretrained(f"{folder}/reward")
        torch.manual_seed(1)
        model = find(library, CAUSAL).from_pretrained(
            f"{folder}/base",
            peft_config=LoraConfig(task_type="CAUSAL_LM", **options),
            reward_adapter=f"{folder}/reward",
            summary_dropout_prob=0.0,
        )
    for parameter in model.v_head.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    model.eval()
    inputs = make_inputs("llama")
    labels = inputs.pop("labels")
    found = {"score": model.compute_reward_score(**inputs)}
    found["logits"], found["loss"], found["value"] = model(**inputs, labels=labels)
    return {name: value.detach() for name, value in found.items()}


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different, different


def close(model, kind, theirs):
    # Another version of transformers sums in another order, and fills padding otherwise.
    inputs = make_inputs(kind)
    with torch.no_grad():
        logits, _, value = model(**inputs)
    real = (inputs["labels"] if kind in ENCODER_DECODERS else inputs["attention_mask"]) > 0
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


@pytest.mark.parametrize("kind", NOT_WITH_TRL)
def test_what_trl_cannot_run(kind):
    with pytest.raises(RankError, match=NOT_WITH_TRL[kind]):
        run_on_ranks(
            computed,
            engine=None,
            environment="peer-old",
            library="trl",
            kind=kind,
            dtype="float32",
        )


def test_a_reward_adapters_scores_are_bit_equal():
    ours, theirs = run_both(scores)
    assert ours["score"].std() > 0
    equal(ours, theirs)


PICKLE = {"safe_serialization": False}
# More than one file each: the embeddings alone take 4 kB.
LAYOUTS = {
    "safetensors": ("saved", {}),
    "pickle": ("saved", PICKLE),
    "shards": ("saved", {"max_shard_size": "5KB"}),
    "pickled shards": ("saved", {"max_shard_size": "5KB"} | PICKLE),
    "variant": ("saved", {"variant": "policy"}),
    "pushed": ("pushed", {}),
    "pushed pickle": ("pushed", PICKLE),
    "prefixed": ("prefixed", {}),
    "prefixed pickle": ("prefixed", PICKLE),
    "prefixed shards": ("prefixed", {"max_shard_size": "5KB"}),
}


def save_with_trl(folder, kind, layout, options):
    (theirs,) = run_on_ranks(
        saved_by_trl,
        engine=None,
        environment="peer-old",
        folder=str(folder),
        kind=kind,
        layout=layout,
        **options,
    )
    return theirs


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("llama", layout) for layout in LAYOUTS),
        *((kind, "safetensors") for kind in KINDS if kind != "llama"),
        *((kind, "pickle") for kind in ("gpt2", "t5")),
        *((kind, "prefixed pickle") for kind in ("gpt2", "t5")),
    ],
)
def test_what_trl_saved_loads_bit_equal(kind, layout, tmp_path):
    how, options = LAYOUTS[layout]
    theirs = save_with_trl(tmp_path, kind, how, options)
    weights = [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")]
    assert (len(weights) > 1) == ("shards" in layout)
    where = {"variant": options["variant"]} if "variant" in options else {}
    model = find("ours", class_name(kind)).from_pretrained(tmp_path, **where).eval()
    state, their_state = model.state_dict(), theirs["state"]
    if kind in ("mixtral", "gpt_neox"):  # transformers 5 has other names for some of their weights
        state = {name: state[name] for name in state.keys() & their_state.keys()}
        their_state = {name: their_state[name] for name in state}
    assert {"v_head.summary.weight", "v_head.summary.bias"} < state.keys()
    equal(state, their_state)
    close(model, kind, theirs)


@pytest.mark.parametrize("options", [{}, PICKLE], ids=["safetensors", "pickle"])
def test_an_adapter_that_trl_saved_loads_with_its_head(tmp_path, options):
    theirs = save_with_trl(tmp_path, "llama", "adapter", options)
    assert (tmp_path / "adapter_model.bin").exists() == bool(options)
    model = find("ours", CAUSAL).from_pretrained(tmp_path).eval()
    assert model.is_peft_model
    head = {f"v_head.{name}": value for name, value in model.v_head.state_dict().items()}
    equal(head, theirs["state"])
    close(model, "llama", theirs)
