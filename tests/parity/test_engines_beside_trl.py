"""On real engines ours generates, trains and prepares as TRL does."""

import pytest

from tools.rails.models import random_llama
from tools.rails.peers import find, run_both

pytestmark = pytest.mark.full


def make_model(seed=0):
    return random_llama(seed, bos_token_id=1, eos_token_id=None, pad_token_id=0)


def trained_and_generated(accelerator, library):
    """Losses of steps with a generation before each, and the generated tokens."""
    import torch

    unwrap_model_for_generation = find(library, "unwrap_model_for_generation")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(20).reshape(2, 10) + accelerator.process_index
    losses, tokens = [], []
    for _ in range(3):
        with torch.no_grad(), unwrap_model_for_generation(model, accelerator) as unwrapped:
            made = unwrapped.generate(
                ids[:, :4], attention_mask=torch.ones(2, 4), max_new_tokens=8, do_sample=False
            )
        tokens.append(made.tolist())
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, tokens


def parameters_and_hooks(accelerator, library):
    """What the ZeRO-3 functions return and do: parameters' order, hooks gone and back."""
    import torch

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _ = accelerator.prepare(model, optimizer)
    find_all, iterate = find(library, "get_all_parameters"), find(library, "iter_params")
    layer = engine.module.model.layers[0].mlp
    ids = [parameter.ds_id for parameter in iterate(engine.module, recurse=True)]
    found = {
        "own": [name for name, _ in find_all(layer)],
        "all": [name for name, _ in find_all(engine.module, recurse=True)],
        "number": [len(iterate(layer)), len(iterate(layer, recurse=True))],
        "order": [number - min(ids) for number in ids],
    }

    def hooks():
        modules = list(engine.module.modules())
        before = sum(len(module._forward_pre_hooks) for module in modules)
        return before, sum(len(module._forward_hooks) for module in modules)

    found["hooks"] = [hooks()]
    for name in ("remove_hooks", "add_hooks"):
        find(library, name)(engine)
        found["hooks"].append(hooks())
    return found


def prepared(accelerator, library, preparing):
    """The reference's logits and a few facts about how it was prepared."""
    import torch

    policy, reference = make_model(0), make_model(1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    accelerator.prepare(policy, optimizer)
    reference = find(library, preparing)(reference, accelerator)
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        logits = reference(input_ids=ids).logits
    # TRL's DeepSpeed engine itself says that it is training; what is inside isn't.
    inside = getattr(reference, "module", reference)
    return type(reference).__name__, inside.training, logits


@pytest.mark.parametrize(
    ("engine", "environment"),
    [
        ("single", "peer-old"),
        ("ddp", "peer-old"),
        ("zero2", "peer-old"),
        ("zero3", "peer-old"),
        ("zero3", "peer-new"),
        ("fsdp2", "peer-new"),
    ],
)
def test_the_same_tokens_and_the_same_losses(engine, environment):
    ours, theirs = run_both(trained_and_generated, engine=engine, environment=environment)
    assert ours == theirs
    losses, _ = ours
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("environment", ["peer-old", "peer-new"])
def test_the_zero3_functions_find_and_do_the_same(environment):
    ours, theirs = run_both(parameters_and_hooks, engine="zero3", environment=environment)
    there, gone, back = ours.pop("hooks")
    their_there, their_gone, their_back = theirs.pop("hooks")
    assert ours == theirs
    assert there == back == their_there == their_back
    # TRL leaves on the root what DeepSpeed registered without keeping a handle.
    assert gone == (0, 0) != their_there
    assert sum(their_gone) <= 3


@pytest.mark.parametrize(
    ("engine", "environment", "preparing"),
    [
        ("zero2", "peer-old", "prepare_deepspeed"),
        ("zero3", "peer-old", "prepare_deepspeed"),
        ("zero3", "peer-new", "prepare_deepspeed"),
        ("fsdp1", "peer-old", "prepare_fsdp"),
        ("fsdp2", "peer-new", "prepare_fsdp"),
    ],
)
def test_a_prepared_reference_computes_the_same(engine, environment, preparing):
    ours, theirs = run_both(prepared, engine=engine, environment=environment, preparing=preparing)
    assert ours[:2] == theirs[:2]
    assert ours[2].equal(theirs[2])
