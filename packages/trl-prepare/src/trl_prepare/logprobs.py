"""Log-probabilities of a reference, without logits for all tokens at once."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trl_prepare.adapters import AdapterReference, reference_context
from trl_prepare.freezing import evaluating
from trl_zero3 import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    Rewrite = Callable[[Tensor], Tensor]

CHUNK_TOKENS = 512


def reference_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-probability of each token after the first, with logits for a few at a time.

    The model runs once, in eval mode and without gradients. Where its head is called, what goes
    into it is taken in chunks, so that float32 logits exist for `chunk_tokens` tokens only; a
    sharded engine has the head's weight there for that very call, and gathers nothing more. Scaled
    and soft-capped logits (Cohere, Granite, Gemma) are followed.

    Args:
        model: A causal language model: plain, in DDP, a DeepSpeed engine, FSDP1, FSDP2, compiled,
            with PEFT adapters or a value head; or what `prepare_reference_model` returned. On a
            sharded engine, every rank must call this.
        input_ids: Tokens, (B, T).
        attention_mask: 1 for tokens and 0 for padding on either side, (B, T). Positions are counted
            from the first token, wherever the padding is.
        chunk_tokens: For how many tokens to hold logits.
        temperature: What logits are divided by, as where the tokens were sampled.

    Returns:
        Float32 log-probabilities, (B, T - 1); 0 where the token or the one before it is padding.

    Raises:
        ValueError: The shapes differ, `chunk_tokens` or `temperature` isn't positive, the model is
            no causal language model, or it changes its logits in a way that is not known.
        RuntimeError: The model called no head, as when it was compiled in place.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4,
        ... )
        >>> model = AutoModelForCausalLM.from_config(config).eval()
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> logprobs = reference_logprobs(model, ids, torch.ones_like(ids))
        >>> expected = model(ids).logits.log_softmax(-1)[0, [0, 1, 2], [6, 7, 8]]
        >>> torch.allclose(logprobs[0], expected.detach(), atol=1e-6)
        True
    """
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape or not input_ids.numel():
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)} and attention_mask is "
            f"{tuple(attention_mask.shape)}: both must be (B, T), and not empty."
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, not {chunk_tokens}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}.")
    if isinstance(model, AdapterReference):
        with reference_context(model.policy):
            return reference_logprobs(
                model.policy,
                input_ids,
                attention_mask,
                chunk_tokens=chunk_tokens,
                temperature=temperature,
            )
    language_model = _find_language_model(model)
    head: nn.Module = unwrap(language_model.get_output_embeddings())
    config = language_model.config.get_text_config()
    rewrites = list(_known_rewrites(config))
    inputs = _make_inputs(language_model, config, input_ids, attention_mask)

    def run(chosen: int) -> tuple[Tensor, int]:
        call = _HeadCall(
            head, input_ids, attention_mask, rewrites[chosen], chunk_tokens, temperature
        )
        with torch.no_grad(), evaluating(model), call.watching():
            output = _skip_copying_wrappers(model)(**inputs)
        logits = output.logits if hasattr(output, "logits") else output[0]
        return call.finish(), call.find_fitting(rewrites, chosen, logits)

    chosen = _CHOSEN.get(head, 0)
    logprobs, fitting = run(chosen)
    if fitting != chosen:
        logprobs, fitting = run(fitting)
    _CHOSEN[head] = fitting
    return logprobs


# By head: which of the known rewrites its logits go through.
_CHOSEN: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class _HeadCall:
    """What happens where a model calls its head: all tokens but one are taken out of it."""

    def __init__(
        self,
        head: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        rewrite: Rewrite,
        chunk_tokens: int,
        temperature: float,
    ) -> None:
        self._head = head
        self._input_ids = input_ids
        mask = attention_mask.bool()
        self._wanted = mask[:, :-1] & mask[:, 1:]
        self._first = mask.int().argmax(dim=1)
        self._rewrite = rewrite
        self._chunk_tokens = chunk_tokens
        self._temperature = temperature
        self._logprobs: Tensor | None = None
        self._raw: Tensor | None = None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Take part in the head's next call."""
        with ExitStack() as stack:
            # Registered last, it runs after the engine's own hook has gathered the weight.
            before = self._head.register_forward_pre_hook(self._take)
            stack.callback(before.remove)
            stack.callback(self._head.register_forward_hook(self._keep).remove)
            yield

    def finish(self) -> Tensor:
        """Return the log-probabilities, (B, T - 1)."""
        if self._logprobs is None:
            raise RuntimeError(
                "The model did not call its head where it could be watched: a model compiled in "
                "place must be given as it was before."
            )
        return self._logprobs

    def find_fitting(self, rewrites: list[Rewrite], chosen: int, logits: Tensor) -> int:
        """Say which rewrite makes the model's logits of what its head gave for one token."""
        raw = self._raw
        if raw is not None and raw.shape == logits.shape:
            tolerance = 1e-5 if raw.dtype == torch.float32 else 2e-2
            for index in (chosen, *range(len(rewrites))):
                rewritten = rewrites[index](raw).float()
                if torch.allclose(rewritten, logits.float(), tolerance, 1e-6, equal_nan=True):
                    return index
        raise ValueError(
            "The model changes what its head gives in a way that is not known here (not a scale "
            "nor a soft cap from its config): take the log-probabilities of its logits instead."
        )

    def _take(self, head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_BTH = arguments[0]
        if hidden_BTH.shape[:2] != self._input_ids.shape:
            raise ValueError(
                f"The model calls its head on {tuple(hidden_BTH.shape)}, where "
                f"{tuple(self._input_ids.shape)} tokens were given: take the log-probabilities of "
                "its logits instead."
            )
        hidden_NH = hidden_BTH[:, :-1][self._wanted]
        targets_N = self._input_ids[:, 1:][self._wanted]
        logprobs_BT = hidden_BTH.new_zeros(self._wanted.shape, dtype=torch.float32)
        logprobs_BT[self._wanted] = torch.cat(
            [
                self._logprobs_of(hidden, targets)
                for hidden, targets in zip(
                    hidden_NH.split(self._chunk_tokens),
                    targets_N.split(self._chunk_tokens),
                    strict=True,
                )
            ]
        )
        self._logprobs = logprobs_BT
        rows = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
        return (hidden_BTH[rows, self._first].unsqueeze(1), *arguments[1:])

    def _logprobs_of(self, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
        # Not the call: its hooks belong to the one call that the engine expects.
        logits_NV = self._rewrite(self._head.forward(hidden_NH)).float() / self._temperature
        chosen_N = logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
        return chosen_N - logits_NV.logsumexp(dim=-1)

    def _keep(self, head: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        self._raw = output


def _find_language_model(model: Any) -> Any:
    inner: Any = unwrap(model)
    inner = getattr(inner, "pretrained_model", inner)  # of a value-head model
    get_head = getattr(inner, "get_output_embeddings", None)
    if get_head is None or get_head() is None or inner.config.is_encoder_decoder:
        raise ValueError(
            f"{type(inner).__name__} is no causal language model with a head: pass one."
        )
    return inner


def _skip_copying_wrappers(model: Any) -> Any:
    """Return what to call: wrappers that only copy or compile would do nothing but harm."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif (inner := vars(model).get("_modules", {}).get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def _make_inputs(
    language_model: Any, config: Any, input_ids: Tensor, attention_mask: Tensor
) -> dict[str, Any]:
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    get_base = getattr(language_model, "get_base_model", None)  # of a PEFT model
    accepted = signature((language_model if get_base is None else get_base()).forward).parameters
    # Of several axes, as in Qwen2-VL, positions are the model's own affair.
    if "position_ids" in accepted and "mrope" not in repr(config.to_dict()):
        inputs["position_ids"] = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return inputs


def _known_rewrites(config: Any) -> Iterator[Rewrite]:
    """List what models do to logits with the numbers in their configs, the likeliest first."""
    numbers = {
        name: value
        for name, value in config.to_dict().items()
        if re.search(r"logit|soft_?cap|lm_head|output_multiplier", name)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value not in (0, 1)
    }
    caps = [value for name, value in numbers.items() if "cap" in name]
    scales = [value for name, value in numbers.items() if "cap" not in name]
    for cap in caps:
        for scale in scales:
            yield lambda x, c=cap, s=scale: torch.tanh(x * s / c) * c
            yield lambda x, c=cap, s=scale: torch.tanh(x / s / c) * c
        yield lambda x, c=cap: torch.tanh(x / c) * c
    for scale in scales:
        yield lambda x, s=scale: x * s
        yield lambda x, s=scale: x / s
    yield lambda x: x
