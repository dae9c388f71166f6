"""Teach a small chat model which reply fits: DPO on pairs of replies, on any engine.

    python dpo.py                                          # one process
    python dpo.py --engine zero3 --processes 2 --steps 2   # starts its own ranks with torchrun

In each pair, the reply that somebody got in a conversation is preferred to one that somebody else
got. The loss (arXiv 2305.18290) raises the probability of the first and lowers that of the second,
both measured against a frozen reference, which is the model before training.

Every mean is taken over the pairs of all ranks: the engine changes how fast a step is, not what it
learns.

Names of tensors end in their shape: B pairs on this rank, N = 2 B replies (the chosen ones first),
T tokens (padded on the right), V the vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import real_data
import torch
from engines import end_process, make_accelerator, save_model, share, total
from options import Script, read_rows, start
from report import Metrics, draw, quiet_libraries, show_change
from sampling import generate, pad, text_of
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from trl_models import (
    ForwardRedirection,
    create_reference_model,
    encode_completions,
    prepare_reference_model,
    reference_logprobs,
    unwrap_model_for_generation,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from torch import Tensor

SCRIPT = Script(__file__, rows="pairs", keys=("prompt", "chosen", "rejected"), steps=8)
PANELS = {
    "loss": "loss",
    "accuracy": "pairs told apart",
    "margin": "reward of the chosen reply over the rejected one",
    "drift": "log-probability gained by the chosen reply",
}
PAIRS_PER_STEP = 16  # over all ranks
EVALUATION_PAIRS = 32
SHOWN = 2
MAX_LENGTH = 128  # tokens of a prompt and a reply
BETA = 0.1
LEARNING_RATE = 2e-5
MAX_GRAD_NORM = 1.0


@dataclass
class Batch:
    """A rank's pairs, as tensors."""

    ids_NT: Tensor
    attention_NT: Tensor
    mask_NT: Tensor  # 1.0 on the replies' own tokens, but for the first position
    reference_N: Tensor  # what the reference gives each reply


def encode(tokenizer: Any, pairs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the ids and masks of prompts, chosen and rejected replies, in the chat format."""
    rows = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "chosen": [{"role": "assistant", "content": pair["chosen"]}],
            "rejected": [{"role": "assistant", "content": pair["rejected"]}],
        }
        for pair in pairs
    ]
    columns = encode_completions(tokenizer, rows, max_length=MAX_LENGTH, truncation_side="right")
    names = ("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")
    values = zip(*(columns[name] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in values]


def make_batch(
    rows: list[dict[str, Any]], fill: int, device: torch.device, reference: Any
) -> Batch:
    """Return pairs as tensors, with what the reference makes of them."""
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    for reply in ("chosen", "rejected"):
        ids += [row["prompt_ids"] + row[f"{reply}_ids"] for row in rows]
        masks += [[0] * len(row["prompt_ids"]) + row[f"{reply}_mask"] for row in rows]
    ids_NT, attention_NT = pad(ids, fill, "right")
    mask_NT, _ = pad(masks, 0, "right")
    ids_NT, attention_NT = ids_NT.to(device), attention_NT.to(device)
    mask_NT = mask_NT[:, 1:].float().to(device)
    reference_N = measured_by(reference, ids_NT, attention_NT, mask_NT)
    return Batch(ids_NT, attention_NT, mask_NT, reference_N)


def logprobs_of(forward: Callable[..., Any], batch: Batch) -> Tensor:
    """Return the log-probability of each reply, with a graph for the gradients."""
    logits_NTV = forward(
        input_ids=batch.ids_NT, attention_mask=batch.attention_NT, use_cache=False
    ).logits[:, :-1]
    chosen_NT = logits_NTV.gather(-1, batch.ids_NT[:, 1:, None]).squeeze(-1).float()
    logprobs_NT = chosen_NT - logits_NTV.float().logsumexp(dim=-1)
    return (logprobs_NT * batch.mask_NT).sum(dim=1)


def measured_by(model: Any, ids_NT: Tensor, attention_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the log-probability of each reply, without gradients."""
    return (reference_logprobs(model, ids_NT, attention_NT) * mask_NT).sum(dim=1)


def rewards_of(logprobs_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the implicit rewards of the chosen and of the rejected replies."""
    chosen_B, rejected_B = (BETA * (logprobs_N - reference_N)).chunk(2)
    return chosen_B, rejected_B


def dpo_losses(forward: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return each pair's loss, and the rewards of its replies."""
    chosen_B, rejected_B = rewards_of(logprobs_of(forward, batch), batch.reference_N)
    return -logsigmoid(chosen_B - rejected_B), chosen_B.detach(), rejected_B.detach()


class DPO:
    """Policy, reference and optimizer on one engine."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.accelerator = make_accelerator(options.engine, max_grad_norm=MAX_GRAD_NORM)
        policy = AutoModelForCausalLM.from_pretrained(options.model).float()
        policy.eval()  # no dropout: policy and reference start as one
        reference = create_reference_model(policy)
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.reference = prepare_reference_model(reference, self.accelerator, self.policy)
        self.redirect = ForwardRedirection()

    def batch(self, pairs: list[dict[str, str]]) -> Batch:
        """Return this rank's share of the pairs, measured by the reference."""
        rows = encode(self.tokenizer, share(self.accelerator, pairs))
        fill = self.tokenizer.eos_token_id
        return make_batch(rows, fill, self.accelerator.device, self.reference)

    def means(self, losses_B: Tensor, chosen_B: Tensor, rejected_B: Tensor) -> dict[str, float]:
        """Return the metrics of the pairs of all ranks."""
        sums = (
            losses_B.detach().sum(),
            (chosen_B > rejected_B).sum(),
            (chosen_B - rejected_B).sum(),
            chosen_B.sum() / BETA,
            losses_B.new_tensor(len(losses_B)),
        )
        *values, pairs = total(self.accelerator, *sums)
        return {key: (value / pairs).item() for key, value in zip(PANELS, values, strict=True)}

    def step(self, pairs: list[dict[str, str]]) -> dict[str, float]:
        """Learn from the pairs, each rank from its share of them."""
        batch = self.batch(pairs)
        model: Any = self.accelerator.unwrap_model(self.policy)
        # Inside the wrapper's forward, so that the engine gathers and reduces. The model's own
        # forward is what is called there: its hooks already stand around the redirected call.
        losses_B, *rewards = self.redirect(self.policy, model, dpo_losses, model.forward, batch)
        # Engines average gradients over the ranks; the mean over all pairs is what is meant.
        loss = losses_B.sum() * self.accelerator.num_processes / len(pairs)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.means(losses_B, *rewards)

    def evaluate(self, pairs: list[dict[str, str]]) -> dict[str, float]:
        """Return the metrics of pairs that are not learnt from."""
        batch = self.batch(pairs)
        logprobs_N = measured_by(self.policy, batch.ids_NT, batch.attention_NT, batch.mask_NT)
        rewards = rewards_of(logprobs_N, batch.reference_N)
        return self.means(-logsigmoid(rewards[0] - rewards[1]), *rewards)

    def answer(self, prompts: list[str]) -> list[str]:
        """Return the policy's replies; every rank gives the same."""
        rows = [{"prompt": prompt, "chosen": "", "rejected": ""} for prompt in prompts]
        ids = [row["prompt_ids"] for row in encode(self.tokenizer, rows)]
        with unwrap_model_for_generation(self.policy, self.accelerator) as model:
            samples = generate(model, self.tokenizer, ids, greedy=True)
        return [text_of(self.tokenizer, sample.reply) for sample in samples]


def train(options: argparse.Namespace, tokenizer: Any, console: Console) -> None:
    if options.pairs is None:
        rows = real_data.preferences()
        random.Random(options.seed).shuffle(rows)
        held_out, rows = rows[:EVALUATION_PAIRS], rows[EVALUATION_PAIRS:]
    else:
        held_out = rows = read_rows(SCRIPT, options.pairs)
    dpo = DPO(options, tokenizer)
    accelerator = dpo.accelerator
    # Each rank needs something to do, even where there are more ranks than pairs.
    per_step = max(PAIRS_PER_STEP, accelerator.num_processes)
    held_out = list(islice(cycle(held_out), max(EVALUATION_PAIRS, accelerator.num_processes)))
    prompts = [row["prompt"] for row in held_out[:SHOWN]]
    before, replies_before = dpo.evaluate(held_out), dpo.answer(prompts)

    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "metrics.jsonl" if accelerator.is_main_process else None
    source = cycle(rows)
    with Metrics(file, options.steps, console) as metrics:
        for step in range(1, options.steps + 1):
            metrics.add({"step": step, **dpo.step(list(islice(source, per_step)))})

    after, replies_after = dpo.evaluate(held_out), dpo.answer(prompts)
    folder = options.output / "model"
    save_model(accelerator, dpo.policy, tokenizer, folder)
    if accelerator.is_main_process:
        change = [
            (f"{PANELS[key]}, {len(held_out)} pairs", f"{before[key]:.3f}", f"{after[key]:.3f}")
            for key in ("loss", "accuracy", "margin")
        ]
        show_change(console, [*change, *zip(prompts, replies_before, replies_after, strict=True)])
        draw(options.output / "dpo.png", metrics.rows, PANELS)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        console.print(
            f"Loaded back from {folder}: {loaded.num_parameters():,} parameters.", markup=False
        )
    accelerator.end_training()


def main(arguments: Sequence[str] | None = None) -> int:
    return start(SCRIPT, __doc__, arguments, train)


if __name__ == "__main__":
    quiet_libraries()
    end_process(main())
