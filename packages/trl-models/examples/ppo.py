"""Teach a small chat model to answer briefly: PPO with a value head, on any engine.

    python ppo.py                                          # one process
    python ppo.py --engine zero3 --processes 2 --steps 2   # starts its own ranks with torchrun

The reward is a rule that anyone can check: a reply that says something and ends its turn earns the
share of the token limit that it left unused; any other reply earns 0. A reply of 10 tokens, where
40 are allowed, earns 0.75, and one that is cut off at the limit earns nothing.

In a step, questions that people asked in conversations are encoded in the model's chat format and
answered, the answers are scored, and policy and value head are updated with PPO's clipped losses.
Every mean is taken over the tokens of all ranks: the engine changes how fast a step is, not what
it learns.

Names of tensors end in their shape: B replies on this rank, P prompt tokens (padded on the left),
R reply tokens (padded on the right), T = P + R, K the last R + 1 positions, V the vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import real_data
import torch
from accelerate.utils import gather_object
from engines import end_process, make_accelerator, save_model, share, total
from options import Script, read_rows, start
from report import Metrics, draw, quiet_libraries, show_change
from sampling import REPLY_LIMIT, TEMPERATURE, Sample, generate, pad, text_of
from transformers import AutoModelForCausalLM

from trl_models import (
    AutoModelForCausalLMWithValueHead,
    ForwardRedirection,
    create_reference_model,
    prepare_reference_model,
    reference_logprobs,
    unwrap_model_for_generation,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from torch import Tensor

SCRIPT = Script(__file__, rows="completions", keys=("prompt", "completion"), steps=6)
PANELS = {
    "reward": "mean reward",
    "kl": "KL to the reference, nats a token",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
}
INSTRUCTION = "Answer in one short sentence."  # follows every question
REPLIES_PER_STEP = 16  # over all ranks
UPDATES_PER_STEP = 2  # each on all of the step's replies
EVALUATION_REPLIES = 16
LEARNING_RATE = 2e-5
HEAD_LEARNING_RATE = 1e-3  # it starts from zero
KL_PENALTY = 0.05  # of the reward, for each nat by which a token leaves the reference
CLIP = 0.2  # of the ratio of probabilities, and of the change in value
VALUE_WEIGHT = 0.1
GAE_LAMBDA = 0.95
MAX_GRAD_NORM = 1.0


@dataclass
class Batch:
    """A rank's samples of one step, as tensors."""

    ids_BT: Tensor
    attention_BT: Tensor
    replies_BR: Tensor
    mask_BR: Tensor  # 1.0 on the replies' own tokens


@dataclass
class Targets:
    """What the updates of one step start from and aim at."""

    logprobs_BR: Tensor
    values_BR: Tensor
    advantages_BR: Tensor
    returns_BR: Tensor


def encode(tokenizer: Any, question: str) -> list[int]:
    message = {"role": "user", "content": f"{question} {INSTRUCTION}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_completion(tokenizer: Any, completion: str) -> list[int]:
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id][:REPLY_LIMIT]


def reward_of(tokenizer: Any, reply: list[int]) -> float:
    ended = reply[-1] == tokenizer.eos_token_id
    says_something = any(map(str.isalnum, text_of(tokenizer, reply)))
    return 1 - len(reply) / REPLY_LIMIT if ended and says_something else 0.0


def make_batch(samples: list[Sample], fill: int, device: torch.device) -> Batch:
    prompts_BP, prompts_mask_BP = pad([sample.prompt for sample in samples], fill, "left")
    replies_BR, replies_mask_BR = pad([sample.reply for sample in samples], fill, "right")
    return Batch(
        ids_BT=torch.cat([prompts_BP, replies_BR], dim=1).to(device),
        attention_BT=torch.cat([prompts_mask_BP, replies_mask_BR], dim=1).to(device),
        replies_BR=replies_BR.to(device),
        mask_BR=replies_mask_BR.float().to(device),
    )


def run(forward: Callable[..., Any], batch: Batch) -> Any:
    """Run a model on a batch, with logits for the replies only: they are a vocabulary wide."""
    return forward(
        input_ids=batch.ids_BT,
        attention_mask=batch.attention_BT,
        position_ids=(batch.attention_BT.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=batch.replies_BR.shape[1] + 1,
        use_cache=False,
    )


def logprobs_of(logits_BKV: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities that the reply tokens were drawn with."""
    logits_BRV = logits_BKV[:, :-1].float() / TEMPERATURE  # each predicts the next token
    chosen_BR = logits_BRV.gather(-1, batch.replies_BR.unsqueeze(-1)).squeeze(-1)
    return chosen_BR - logits_BRV.logsumexp(dim=-1)


def logprobs_and_values(forward: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probability and value of every reply token, each as seen just before it."""
    logits_BKV, _, values_BT = run(forward, batch)
    values_BR = values_BT[:, -batch.replies_BR.shape[1] - 1 : -1].float()
    return logprobs_of(logits_BKV, batch), values_BR


def advantages_of(rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438), undiscounted."""
    advantages_BR = torch.zeros_like(values_BR)
    next_value_B = next_advantage_B = torch.zeros_like(values_BR[:, 0])
    for t in reversed(range(values_BR.shape[1])):
        error_B = rewards_BR[:, t] + next_value_B - values_BR[:, t]
        next_advantage_B = mask_BR[:, t] * (error_B + GAE_LAMBDA * next_advantage_B)
        next_value_B = mask_BR[:, t] * values_BR[:, t]
        advantages_BR[:, t] = next_advantage_B
    return advantages_BR


def ppo_losses(forward: Callable[..., Any], batch: Batch, targets: Targets) -> Tensor:
    """Return the clipped policy and value losses (arXiv 1707.06347), summed over reply tokens."""
    logprobs_BR, values_BR = logprobs_and_values(forward, batch)
    ratio_BR = (logprobs_BR - targets.logprobs_BR).exp()
    clipped_BR = ratio_BR.clamp(1 - CLIP, 1 + CLIP)
    policy_BR = torch.max(-ratio_BR * targets.advantages_BR, -clipped_BR * targets.advantages_BR)
    near_BR = values_BR.clamp(targets.values_BR - CLIP, targets.values_BR + CLIP)
    errors_BR = (values_BR - targets.returns_BR, near_BR - targets.returns_BR)
    value_BR = 0.5 * torch.max(*(error_BR.square() for error_BR in errors_BR))
    return torch.stack([(loss_BR * batch.mask_BR).sum() for loss_BR in (policy_BR, value_BR)])


class PPO:
    """Policy, reference and optimizer on one engine."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.accelerator = make_accelerator(options.engine, max_grad_norm=MAX_GRAD_NORM)
        self.device = self.accelerator.device
        model = AutoModelForCausalLM.from_pretrained(options.model).float()
        reference = create_reference_model(model)
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(
            model, v_head_init_strategy="normal", v_head_initializer_range=0.0
        )
        policy.eval()  # no dropout: it would move the ratio from 1 before anything was learned
        groups = [
            {"params": policy.pretrained_model.parameters()},
            {"params": policy.v_head.parameters(), "lr": HEAD_LEARNING_RATE},
        ]
        optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE)
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.reference = prepare_reference_model(reference, self.accelerator, self.policy)
        self.redirect = ForwardRedirection()
        torch.manual_seed(options.seed + self.accelerator.process_index)

    def answer(self, prompts: list[list[int]], *, greedy: bool) -> list[Sample]:
        """Answer this rank's prompts with the policy."""
        with unwrap_model_for_generation(self.policy, self.accelerator) as model:
            return generate(model, self.tokenizer, prompts, greedy=greedy)

    def samples(self, rows: list[dict[str, str]]) -> list[Sample]:
        """Return samples of this rank's rows: with their completions, or generated ones."""
        prompts = [encode(self.tokenizer, row["prompt"]) for row in rows]
        if "completion" not in rows[0]:
            return self.answer(prompts, greedy=False)
        replies = [encode_completion(self.tokenizer, row["completion"]) for row in rows]
        return [Sample(*pair) for pair in zip(prompts, replies, strict=True)]

    def evaluate(self, questions: list[str]) -> list[tuple[float, str]]:
        """Return reward and text of the greedy replies to the questions of all ranks."""
        mine = share(self.accelerator, list(enumerate(questions)))
        prompts = [encode(self.tokenizer, question) for _, question in mine]
        results = []
        for (number, _), sample in zip(mine, self.answer(prompts, greedy=True), strict=True):
            reward = reward_of(self.tokenizer, sample.reply)
            results.append((number, reward, text_of(self.tokenizer, sample.reply)))
        return [(reward, text) for _, reward, text in sorted(gather_object(results))]

    def step(self, samples: list[Sample]) -> dict[str, float]:
        """Learn from this rank's samples, together with the others from theirs."""
        batch = make_batch(samples, self.tokenizer.eos_token_id, self.device)
        rewards_B = torch.tensor(
            [reward_of(self.tokenizer, sample.reply) for sample in samples], device=self.device
        )
        with torch.no_grad():
            logprobs_BR, values_BR = logprobs_and_values(self.policy, batch)
            reference_BR = reference_logprobs(
                self.reference, batch.ids_BT, batch.attention_BT, temperature=TEMPERATURE
            )[:, -batch.replies_BR.shape[1] :]
        log_ratio_BR = (reference_BR - logprobs_BR) * batch.mask_BR
        kl_BR = log_ratio_BR.exp() - 1 - log_ratio_BR  # Schulman's estimate, never negative
        rewards_BR = KL_PENALTY * log_ratio_BR
        last_B = batch.mask_BR.sum(dim=1).long() - 1
        rewards_BR[torch.arange(len(samples)), last_B] += rewards_B
        advantages_BR = advantages_of(rewards_BR, values_BR, batch.mask_BR)

        tokens, replies, reward, kl, advantage = total(
            self.accelerator,
            batch.mask_BR.sum(),
            rewards_B.new_tensor(len(samples)),
            rewards_B.sum(),
            kl_BR.sum(),
            advantages_BR.sum(),
        )
        centred_BR = (advantages_BR - advantage / tokens) * batch.mask_BR
        variance = total(self.accelerator, centred_BR.square().sum())[0] / tokens
        targets = Targets(
            logprobs_BR,
            values_BR,
            advantages_BR=centred_BR / (variance.sqrt() + 1e-8),
            returns_BR=advantages_BR + values_BR,
        )

        losses = torch.zeros(2, device=self.device)
        for _ in range(UPDATES_PER_STEP):
            sums = self.losses(batch, targets)
            policy_loss, value_loss = sums / tokens
            # Engines average gradients over the ranks; their sum is what is meant.
            loss = (policy_loss + VALUE_WEIGHT * value_loss) * self.accelerator.num_processes
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += total(self.accelerator, *sums.detach()) / tokens / UPDATES_PER_STEP
        policy_loss, value_loss = losses.tolist()
        return {
            "reward": (reward / replies).item(),
            "kl": (kl / tokens).item(),
            "policy_loss": policy_loss,
            "value_loss": value_loss,
        }

    def losses(self, batch: Batch, targets: Targets) -> Tensor:
        """Take the losses inside the wrapper's forward, so that the engine gathers and reduces."""
        model: Any = self.accelerator.unwrap_model(self.policy)
        # The model's own forward: its hooks already stand around the redirected call.
        return self.redirect(self.policy, model, ppo_losses, model.forward, batch, targets)


def changes(
    questions: list[str], before: list[tuple[float, str]], after: list[tuple[float, str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the mean reward before and after training, and the replies to two questions."""
    first, second = (
        f"{sum(reward for reward, _ in replies) / len(replies):.3f}" for replies in (before, after)
    )
    yield f"mean reward, {len(questions)} replies", first, second
    for question, *replies in list(zip(questions, before, after, strict=True))[:2]:
        first, second = (f"{text}\n(reward {reward:.3f})" for reward, text in replies)
        yield question, first, second


def train(options: argparse.Namespace, tokenizer: Any, console: Console) -> None:
    if options.completions is None:
        rows = [{"prompt": question} for question in real_data.questions()]
        random.Random(options.seed).shuffle(rows)
        held_out, rows = rows[:EVALUATION_REPLIES], rows[EVALUATION_REPLIES:]
    else:
        held_out = rows = read_rows(SCRIPT, options.completions)
    ppo = PPO(options, tokenizer)
    accelerator = ppo.accelerator
    # Each rank needs something to do, even where there are more ranks than replies.
    per_step = max(REPLIES_PER_STEP, accelerator.num_processes)
    to_evaluate = max(EVALUATION_REPLIES, accelerator.num_processes)
    questions = [row["prompt"] for row in islice(cycle(held_out), to_evaluate)]
    console.print(f"Reward: the unused share of {REPLY_LIMIT} tokens, if a reply ends its turn.")
    before = ppo.evaluate(questions)

    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "metrics.jsonl" if accelerator.is_main_process else None
    source = cycle(rows)
    with Metrics(file, options.steps, console) as metrics:
        for step in range(1, options.steps + 1):
            samples = ppo.samples(share(accelerator, list(islice(source, per_step))))
            metrics.add({"step": step, **ppo.step(samples)})

    after = ppo.evaluate(questions)
    folder = options.output / "model"
    save_model(accelerator, ppo.policy, tokenizer, folder)
    if accelerator.is_main_process:
        show_change(console, list(changes(questions, before, after)))
        draw(options.output / "ppo.png", metrics.rows, PANELS)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(folder).to(ppo.device)
        prompt = encode(tokenizer, questions[0])
        (sample,) = generate(model, tokenizer, [prompt], greedy=True)
        text = text_of(tokenizer, sample.reply)
        console.print(f"Loaded back from {folder}, the model answers: {text}", markup=False)
    accelerator.end_training()


def main(arguments: Sequence[str] | None = None) -> int:
    return start(SCRIPT, __doc__, arguments, train)


if __name__ == "__main__":
    quiet_libraries()
    end_process(main())
