"""Rows of a model's embeddings for new tokens, and values for them."""

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from trl_chatformat.rollback import ModelSnapshot

if TYPE_CHECKING:
    import torch

# Of a big vocabulary, so many rows at a time are turned into float32.
CHUNK = 8192


def check_model(model: Any) -> None:
    """Refuses a model whose embeddings can't be grown as it is.

    Args:
        model: The model to set up.

    Raises:
        TypeError: It isn't a transformers model.
        ValueError: It is wrapped by PEFT; its embeddings are sharded, quantized or not loaded; or
            its encoder and decoder have embeddings of their own.
    """
    if getattr(model, "peft_config", None):
        raise ValueError(
            "This model has PEFT adapters, whose layers were made for the old vocabulary: set up "
            "the chat format on the base model first, then add the adapters."
        )
    if not hasattr(model, "resize_token_embeddings"):
        raise TypeError(
            f"{type(model).__name__} has no `resize_token_embeddings`: pass the transformers model "
            "itself, before it is wrapped or prepared for training."
        )
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            _check_weight(module.weight)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        _check_one_embedding(model)


def _check_one_embedding(model: Any) -> None:
    shared = model.get_input_embeddings().weight
    for name, module in model.named_modules():
        if name.endswith(".embed_tokens") and module.weight is not shared:
            raise ValueError(
                "The model's encoder and decoder have embeddings of their own, which transformers "
                "would make one when they grow: tie them first."
            )


def _check_weight(weight: Any) -> None:
    if hasattr(weight, "ds_id") or hasattr(weight, "placements") or weight.dim() != 2:
        raise ValueError(
            "The model's embeddings are sharded over processes: set up the chat format before the "
            "model is sharded (for ZeRO-3, load it before the DeepSpeed config exists, or save a "
            "model that is set up and load that)."
        )
    if weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"The model's embeddings are {'not loaded' if weight.is_meta else 'quantized'}, so new "
            "rows can't be given values: set up the chat format on the loaded, unquantized model."
        )


def grow_embeddings(
    model: Any, highest_id: int, new_ids: Collection[int], multiple: int | None, undo: ModelSnapshot
) -> None:
    """Makes room for a vocabulary in a model's embeddings, and gives new tokens' rows values.

    Rows are never taken away. Every row that is new, or gets a token for the first time, is drawn
    from a normal distribution with the trained rows' mean and covariance; an output layer of its
    own and its bias are treated alike. All other rows keep their bits, and modules their identity.

    Args:
        model: A transformers model.
        highest_id: The highest id that must have a row.
        new_ids: The ids of new tokens, all above those of trained rows.
        multiple: The number of rows is rounded up to a multiple of this, if given.
        undo: Told about values before they are written over.

    Raises:
        RuntimeError: The model's own method didn't make the room.
    """
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = [embedding.weight]
    if head is not None and head.weight is not embedding.weight:
        matrices.append(head.weight)
    bias = getattr(head, "bias", None)
    vectors = [bias] if bias is not None else []
    trained = min([*new_ids, highest_id + 1])
    old_rows = [tensor.shape[0] for tensor in (*matrices, *vectors)]

    rows = max(highest_id + 1, matrices[0].shape[0])
    if multiple is not None:
        rows += -rows % multiple
    if rows > min(old_rows):
        _resize(model, rows)

    with torch.no_grad():
        for tensor, old in zip((*matrices, *vectors), old_rows, strict=True):
            data = tensor.data
            if data.shape[0] <= highest_id:
                raise RuntimeError(
                    f"{type(model).__name__}.resize_token_embeddings({rows}) left a layer with "
                    f"{data.shape[0]} rows, too few for the id {highest_id}."
                )
            ids = sorted({*new_ids, *range(old, data.shape[0])})
            if not ids:
                continue
            index = torch.tensor(ids, device=data.device)
            known = data[: min(trained, old)]
            undo.keep_rows(data, index)
            if data.dim() == 1:
                data[index] = known.mean()
            else:
                data[index] = sample_rows(known, len(ids)).to(data.dtype)


def _resize(model: Any, rows: int) -> None:
    head = model.get_output_embeddings()
    # The mean that transformers can take itself is slow, and its rows come out all the same.
    accepted = inspect.signature(model.resize_token_embeddings).parameters
    keywords = {"mean_resizing": False} if "mean_resizing" in accepted else {}
    model.resize_token_embeddings(rows, **keywords)
    replacement = model.get_output_embeddings()
    if head is None or replacement is head:
        return
    # transformers makes a new output layer: give its weights to the old one, which optimizers and
    # hooks may hold.
    head.weight.data = replacement.weight.data
    if getattr(head, "bias", None) is not None:
        head.bias.data = replacement.bias.data
    head.out_features = replacement.out_features
    model.set_output_embeddings(head)


def sample_rows(trained: "torch.Tensor", count: int) -> "torch.Tensor":
    """Draws rows from a normal distribution with the mean and covariance of trained rows.

    A random mixture of the centred rows has their covariance, which then needn't be computed.

    Args:
        trained: The trained rows, of shape (V, H).
        count: How many rows to draw.

    Returns:
        The rows in float32, of shape (count, H).
    """
    import torch

    size, width = trained.shape
    form = {"device": trained.device, "dtype": torch.float32}
    mixture = torch.randn(count, size, **form)
    mixture -= mixture.mean(dim=1, keepdim=True)
    total, noise = torch.zeros(width, **form), torch.zeros(count, width, **form)
    for start in range(0, size, CHUNK):
        rows = trained[start : start + CHUNK].float()
        total += rows.sum(dim=0)
        noise += mixture[:, start : start + CHUNK] @ rows
    return total / size + noise / size**0.5
