"""Replies of a chat model to prompts, as token ids.

Names of tensors end in their shape: B prompts, P prompt tokens (padded on the left), T = P + reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

REPLY_LIMIT = 40  # tokens
TEMPERATURE = 0.7


@dataclass
class Sample:
    """A question and a reply to it, as token ids."""

    prompt: list[int]
    reply: list[int]


def text_of(tokenizer: Any, reply: list[int]) -> str:
    return tokenizer.decode(reply, skip_special_tokens=True).strip()


def pad(rows: list[list[int]], fill: int, side: str) -> tuple[Tensor, Tensor]:
    """Return rows of token ids as one tensor, and the attention mask that goes with it."""
    length = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        gap = length - len(row)
        left, right = (gap, 0) if side == "left" else (0, gap)
        ids.append([fill] * left + row + [fill] * right)
        mask.append([0] * left + [1] * len(row) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask)


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: list[list[int]], *, greedy: bool) -> list[Sample]:
    """Answer the prompts, all in one batch."""
    eos = tokenizer.eos_token_id
    ids_BP, attention_BP = (tensor.to(model.device) for tensor in pad(prompts, eos, "left"))
    # Sampled from the whole distribution, which is what the losses take the tokens for.
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    ids_BT = model.generate(
        input_ids=ids_BP,
        attention_mask=attention_BP,
        max_new_tokens=REPLY_LIMIT,
        eos_token_id=eos,
        pad_token_id=eos,
        repetition_penalty=1.0,
        **{"do_sample": False} if greedy else sampling,
    )
    replies = ids_BT[:, ids_BP.shape[1] :].tolist()
    return [
        Sample(prompt, reply[: reply.index(eos) + 1] if eos in reply else reply)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
