"""`create_reference_model` freezes and copies as TRL 0.18.2's does."""

import pytest

from tools.rails.peers import find, run_both

pytestmark = pytest.mark.full


def made(library, kind, layers, pattern=None):
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            tie_word_embeddings=False,
        )
    else:
        config = GPT2Config(
            vocab_size=50, n_embd=16, n_layer=4, n_head=2, tie_word_embeddings=False
        )
    policy = AutoModelForCausalLM.from_config(config)
    reference = find(library, "create_reference_model")(policy, layers, pattern)
    ids = torch.arange(10).reshape(2, 5)
    return {
        "trained in the policy": [n for n, p in policy.named_parameters() if p.requires_grad],
        "training": (policy.training, reference.training),
        "class": type(reference).__name__,
        "config": reference.config.to_dict(),
        "tensors": reference.state_dict() | {"logits": reference(input_ids=ids).logits.detach()},
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [None, 0, 1, 3])
def test_what_is_frozen_and_copied_is_trls(kind, layers):
    ours, theirs = run_both(made, kind=kind, layers=layers)
    tensors, their_tensors = ours.pop("tensors"), theirs.pop("tensors")
    assert ours == theirs
    assert tensors.keys() == their_tensors.keys()
    assert all(tensors[name].equal(their_tensors[name]) for name in tensors)


def test_a_pattern_of_ones_own_shares_the_same_layers():
    arguments = {"kind": "llama", "layers": 2, "pattern": "model.layers.{layer}"}
    ours, theirs = run_both(made, **arguments)
    assert ours["trained in the policy"] == theirs["trained in the policy"]
    assert 0 < len(ours["trained in the policy"]) < len(ours["tensors"])
