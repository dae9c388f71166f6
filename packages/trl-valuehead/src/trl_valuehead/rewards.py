"""A reward model that is an adapter beside the policy's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_valuehead.backbone import run_with_head
from trl_valuehead.checkpoints import Checkpoint
from trl_valuehead.facade import ModelFacade
from trl_valuehead.sharding import writable


class RewardScoring(ModelFacade):
    """`compute_reward_score`, and what loads the adapter for it."""

    @classmethod
    def check_reward_adapter(cls, adapter: Any, is_peft_model: bool, token: Any) -> None:
        """Raise ValueError unless `adapter` names one with a score layer, for a PEFT model."""
        if not isinstance(adapter, str):
            raise ValueError(
                "reward_adapter must be a hub id or the path of a folder, "
                f"not {type(adapter).__name__}."
            )
        if not is_peft_model:
            raise ValueError(
                "reward_adapter needs a PEFT model: pass peft_config, or a model or checkpoint "
                "with an adapter."
            )
        _score_weights(adapter, cls.supported_rm_modules, token)

    @classmethod
    def add_and_load_reward_modeling_adapter(
        cls,
        pretrained_model: nn.Module,
        adapter_model_id: str,
        adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> nn.Module:
        """Add a reward model's adapter to a PeftModel and return its score layer, both frozen.

        Args:
            pretrained_model: The PeftModel.
            adapter_model_id: A hub id or folder.
            adapter_name: The adapter's name in the PeftModel.
            token: For the hub.

        Returns:
            The score layer: hidden states to rewards.

        Raises:
            ValueError: There is no adapter, it has no score layer, or the name is taken.
        """
        model: Any = pretrained_model
        if adapter_name in model.peft_config:
            raise ValueError(
                f"The model has an adapter {adapter_name!r} already: choose another name."
            )
        # Read first: a bad adapter leaves the model as it was.
        weights = _score_weights(adapter_model_id, cls.supported_rm_modules, token)
        model.load_adapter(
            adapter_model_id, adapter_name, is_trainable=False, **_hub_options(token)
        )
        labels, hidden = weights["weight"].shape
        score = nn.Linear(hidden, labels, bias="bias" in weights)
        with writable(score.parameters()):
            score.load_state_dict(weights)
        return score.to(dtype=model.dtype).requires_grad_(False)

    def compute_reward_score(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The reward adapter's scores, without gradients.

        Active adapter, training modes and `requires_grad` flags are afterwards as they were.

        Args:
            input_ids: Token ids (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding (batch, tokens).
            **kwargs: Handed to the language model.

        Returns:
            Scores (batch, tokens, labels).

        Raises:
            ValueError: The model was loaded without `reward_adapter`.
        """
        if not self.supports_rm_adapter or self.rm_adapter_name is None:
            raise ValueError(
                "This model has no reward adapter: pass reward_adapter to from_pretrained."
            )
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        with _active_adapter(self.pretrained_model, self.rm_adapter_name):
            _, scores = run_with_head(
                self.pretrained_model,
                lambda state: self.score(state.to(self.score.weight)),
                skip_lm_head=True,
                input_ids=input_ids,
                **kwargs,
            )
        return scores


def _hub_options(token: str | bool | None) -> dict[str, Any]:
    return {} if token is None else {"token": token}


def _score_weights(
    adapter: str, score_names: tuple[str, ...], token: str | bool | None
) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(adapter, **_hub_options(token))
    state = {
        key.rpartition(".")[2]: tensor
        for key, tensor in checkpoint.adapter_state().items()
        if set(key.split(".")[:-1]) & set(score_names)
    }
    if "weight" not in state:
        raise ValueError(
            f"{checkpoint.name} holds no score layer ({', '.join(score_names)}): reward_adapter "
            "must be the adapter of a reward model, trained as a sequence classifier."
        )
    return state


@contextmanager
def _active_adapter(model: Any, name: str) -> Generator[None]:
    """Another adapter and eval mode for the body; everything that PEFT switches comes back."""
    previous = model.active_adapter
    modes = [(module, module.training) for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.set_adapter(name)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.set_adapter(previous)
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)
