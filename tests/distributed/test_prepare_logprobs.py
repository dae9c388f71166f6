"""Log-probabilities of references on every engine, with the engine's own gathers and no more."""

import pytest

from tools.rails.models import random_llama
from tools.rails.ranks import run_on_ranks

ENGINES = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"]


def make_batch(rank=0):
    import torch

    torch.manual_seed(rank)
    ids = torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 8 + rank :] = 0
    return ids, mask


def naive(model, ids, mask):
    import torch

    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    chosen = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen * (mask[:, 1:] * mask[:, :-1])


def prepare(model, accelerator):
    from trl_prepare import prepare_deepspeed, prepare_fsdp

    engine = accelerator.distributed_type.value
    if engine == "DEEPSPEED":
        return prepare_deepspeed(model, accelerator)
    if engine == "FSDP":
        return prepare_fsdp(model, accelerator)
    return model.to(accelerator.device).eval()


def compare(accelerator, **settings):
    """Return how far the engine's are from the plain model's, and both runs' collectives."""
    import torch

    from tools.rails.collectives import CountCollectives
    from trl_prepare import reference_logprobs

    plain = random_llama(seed=3, **settings).eval()
    reference = prepare(random_llama(seed=3, **settings), accelerator)
    policy = random_llama(seed=4)
    policy, optimizer = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.1))
    ids, mask = make_batch(accelerator.process_index)
    furthest = 0.0
    for _ in range(2):
        expected = naive(plain, ids, mask)
        found = reference_logprobs(reference, ids, mask, chunk_tokens=5)
        furthest = max(furthest, (found - expected).abs().max().item())
        loss = policy(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    reference_logprobs(reference, ids, mask)
    with CountCollectives() as ours:
        reference_logprobs(reference, ids, mask)
    with torch.no_grad(), CountCollectives() as plainly:
        reference(input_ids=ids, attention_mask=mask)
    return furthest, dict(ours.counts), dict(plainly.counts)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_those_of_the_plain_model(engine, tied):
    results = run_on_ranks(compare, engine=engine, tie_word_embeddings=tied)
    for furthest, ours, plainly in results:
        assert furthest < 2e-5
        assert ours == plainly
