"""Tiny models on real engines, and what to observe while they generate."""

from __future__ import annotations

import torch

from tools.rails.models import random_llama

TOKENS = 6
ZERO = {
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 3000,
    "stage3_max_live_parameters": 6000,
    "stage3_max_reuse_distance": 0,
}


def tiny_model(**settings):
    return random_llama(num_hidden_layers=3, **settings)


def prepared(accelerator, model, *, zero=None, lr=0.1):
    """Shard a model; under ZeRO-3 all but the norms, prefetched in many small buckets."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["zero_optimization"].update(ZERO | (zero or {}))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=lr)
    return accelerator.prepare(model, optimizer)


def train_step(accelerator, model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (2, 12), generator=generator).to(accelerator.device)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def prompt():
    return torch.arange(3, 9).reshape(2, 3)


def greedy(model, tokens=TOKENS, **kwargs):
    if tokens is not None:
        kwargs |= {"max_new_tokens": tokens, "min_new_tokens": tokens}
    ids = prompt().to(next(model.parameters()).device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        **kwargs,
    )
    return output.tolist()


def full_weights(model):
    """Copy all weights of a sharded model, each with its engine's own means."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    inner = model.module if hasattr(model, "module") else model
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {k: v.detach().clone() for k, v in inner.state_dict().items()}
    weights = {}
    for name, parameter in inner.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().clone()
        elif hasattr(parameter, "full_tensor"):
            weights[name] = parameter.full_tensor().detach().clone()
        else:
            weights[name] = parameter.detach().clone()
    return weights
