"""Training the rows of new tokens, and of no others, beside an adapter."""

from collections.abc import Iterable
from typing import Any


def trainable_token_settings(
    model: Any, added_ids: Iterable[int]
) -> dict[str, dict[str, list[int]]]:
    """Tells which keywords of PEFT's `LoraConfig` train just the rows of new tokens.

    An adapter alone leaves embeddings as they are, so that new tokens would never be learnt.

    Args:
        model: A transformers model that is set up, before it gets adapters.
        added_ids: The ids, as `setup_chat_format(..., return_added_ids=True)` gives them.

    Returns:
        Keywords for `LoraConfig`: the ids by the name of their layer, the output layer among them
        where it isn't tied; empty without ids.

    Raises:
        ValueError: The model has PEFT adapters already, or no row for an id.
        TypeError: The model isn't one of transformers.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=12,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> trainable_token_settings(LlamaForCausalLM(config), [10, 11])
        {'trainable_token_indices': {'model.embed_tokens': [10, 11], 'lm_head': [10, 11]}}
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"{type(model).__name__} has no `get_input_embeddings`: pass the transformers model."
        )
    if getattr(model, "peft_config", None):
        raise ValueError(
            "This model has PEFT adapters already: ask for the settings of its base model, and "
            "make the adapters with them."
        )
    ids = sorted(set(added_ids))
    if not ids:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [embedding]
    # PEFT itself gives a tied output layer the rows of the embedding.
    if head is not None and head.weight is not embedding.weight:
        layers.append(head)
    for layer in layers:
        rows = layer.weight.shape[0]
        if not 0 <= ids[0] <= ids[-1] < rows:
            raise ValueError(
                f"The ids go from {ids[0]} to {ids[-1]}, but a layer has {rows} rows: pass the "
                "model that was set up, and the ids that this returned."
            )
    names = {id(module): name for name, module in model.named_modules()}
    return {"trainable_token_indices": {names[id(layer)]: list(ids) for layer in layers}}
