"""The value head: one number for each token, read from its hidden state."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from trl_valuehead.sharding import writable


class ValueHead(nn.Module):
    """A linear layer from the last hidden state to a value for each token.

    The layer stays in the dtype in which it was built, fp32 as a rule; hidden states are converted.

    Args:
        config: The language model's configuration. Read: the width of its last hidden state, and
            `summary_dropout_prob` if it has one and the keyword isn't given.
        summary_dropout_prob: Dropout on the hidden states in train mode. None: the
            configuration's, else 0.
        v_head_init_strategy: None for torch's own initialisation, or "normal" for weights drawn
            from a normal distribution and a bias of zero.
        v_head_initializer_range: The standard deviation for "normal".

    Raises:
        ValueError: `config` names no hidden size, or an option is out of range.

    Example:
        >>> from transformers import GPT2Config
        >>> head = ValueHead(GPT2Config(n_embd=8))
        >>> head(torch.zeros(2, 5, 8)).shape  # batch, tokens, 1
        torch.Size([2, 5, 1])
        >>> sorted(head.state_dict())
        ['summary.bias', 'summary.weight']
    """

    def __init__(
        self,
        config: PretrainedConfig,
        summary_dropout_prob: float | None = None,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        check_options(summary_dropout_prob, v_head_init_strategy, v_head_initializer_range)
        hidden_size = _hidden_size(config)
        super().__init__()
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(config, "summary_dropout_prob", None) or 0.0
        self.dropout = nn.Dropout(summary_dropout_prob) if summary_dropout_prob else nn.Identity()
        self.summary = nn.Linear(hidden_size, 1)
        if v_head_init_strategy == "normal":
            with writable(self.parameters()), torch.no_grad():
                self.summary.weight.normal_(std=v_head_initializer_range)
                self.summary.bias.zero_()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Values of shape (batch, tokens, 1) for hidden states of (batch, tokens, hidden)."""
        weight = self.summary.weight
        return self.summary(self.dropout(hidden_states).to(weight.device, weight.dtype))


def check_options(
    summary_dropout_prob: float | None = None,
    v_head_init_strategy: str | None = None,
    v_head_initializer_range: float = 0.2,
) -> None:
    """Raise ValueError unless a head can be built with these options of `ValueHead`."""
    if summary_dropout_prob is not None and not 0 <= summary_dropout_prob <= 1:
        raise ValueError(f"summary_dropout_prob must be from 0 to 1, not {summary_dropout_prob!r}.")
    if v_head_init_strategy not in (None, "normal"):
        raise ValueError(
            f"v_head_init_strategy must be None or 'normal', not {v_head_init_strategy!r}."
        )
    if v_head_initializer_range < 0:
        raise ValueError(
            f"v_head_initializer_range must be 0 or more, not {v_head_initializer_range!r}."
        )


def _hidden_size(config: PretrainedConfig) -> int:
    text_config = config.get_text_config(decoder=True)
    # OPT-350m projects its last hidden state down to the width of its embeddings.
    for name in ("word_embed_proj_dim", "hidden_size"):
        size = getattr(text_config, name, None)
        if isinstance(size, int):
            # Reformer's two streams lie side by side in its last hidden state.
            return 2 * size if text_config.model_type == "reformer" else size
    raise ValueError(
        f"{type(config).__name__} names no hidden_size: pass the configuration of a language model."
    )
