"""Rows of a model's embeddings for new tokens, and values for them."""

import inspect
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal

from trl_chatformat._transformers_private import grows_plainly
from trl_chatformat.partitioned_embeddings import (
    check_partitioned,
    grow_partitioned,
    is_partitioned,
)
from trl_chatformat.rollback import ModelSnapshot

if TYPE_CHECKING:
    import torch

NewRows = Literal["sample", "mean"]

# So many rows at a time are turned into float32: few enough for a processor's cache.
CHUNK = 512
# Of a big vocabulary, so many rows for each of their columns stand for all, and at least so many.
ROWS_PER_COLUMN = 4
LEAST_ROWS = 4096


def check_model(model: Any) -> None:
    """Refuses a model whose embeddings can't be grown as it is.

    Args:
        model: The model to set up.

    Raises:
        TypeError: It isn't a transformers model.
        ValueError: It is wrapped by PEFT; its embeddings are sharded by FSDP or in a DeepSpeed
            engine, quantized or not loaded; or its encoder and decoder have ones of their own.
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
    if is_partitioned(model.get_input_embeddings().weight):
        check_partitioned(model)
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
    shape = getattr(weight, "ds_shape", weight.shape)
    if hasattr(weight, "placements") or len(shape) != 2:
        raise ValueError(
            "The model's embeddings are sharded over processes: set up the chat format before the "
            "model is sharded."
        )
    if weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"The model's embeddings are {'not loaded' if weight.is_meta else 'quantized'}, so new "
            "rows can't be given values: set up the chat format on the loaded, unquantized model."
        )


def grow_embeddings(
    model: Any,
    known: int,
    needed: int,
    new_ids: Collection[int],
    multiple: int | None,
    undo: ModelSnapshot,
    new_rows: NewRows = "sample",
) -> None:
    """Makes room for a vocabulary in a model's embeddings, and gives new tokens' rows values.

    Rows are never taken away. Every row that gets a token for the first time gets a value that
    follows the trained rows, and one that is new and has no token their mean; an output layer of
    its own and its bias are treated alike. All other rows keep their bits, and modules and
    parameters their identity.

    Args:
        model: A transformers model.
        known: How many rows tokens had so far: those after them were never trained.
        needed: How many rows there must be at least.
        new_ids: The ids of new tokens; below `known` where they replace others.
        multiple: The number of rows is rounded up to a multiple of this, if given.
        undo: Told about values before they are written over.
        new_rows: "sample" draws each row, "mean" takes the trained rows' mean for all.

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
    tensors = [*matrices, *vectors]
    old_rows = [getattr(tensor, "ds_shape", tensor.shape)[0] for tensor in tensors]

    rows = max(needed, *old_rows)
    if multiple is not None:
        rows += -rows % multiple

    def fill(data: Any, old: int, ids: list[int]) -> None:
        if ids:
            index = torch.tensor(ids, device=data.device)
            if data.dim() == 1:
                others = torch.ones(len(data), dtype=torch.bool, device=data.device)
                others[index] = False
                trained = data[:known][others[:known]]
                data[index] = trained.mean() if len(trained) else 0.0
                return
            data[index] = 0  # what they replace is not to be followed
            trained = data[: min(known, old)]
            tokens = [i for i in ids if i in new_ids]
            data[tokens] = make_rows(trained, len(tokens), new_rows)
            padding = [i for i in ids if i not in new_ids]
            data[padding] = make_padding(trained, len(padding))

    if is_partitioned(embedding.weight):
        grow_partitioned(model, tensors, new_ids, rows, fill)
        set_vocab_size(model, rows)
        return
    with torch.no_grad():
        if rows > min(old_rows):
            if grows_plainly(model):
                _lengthen(model, tensors, rows)
            else:
                _resize(model, rows)
        for tensor, old in zip(tensors, old_rows, strict=True):
            data = tensor.data
            if data.shape[0] < needed:
                raise RuntimeError(
                    f"{type(model).__name__}.resize_token_embeddings({rows}) left a layer with "
                    f"{data.shape[0]} rows, where {needed} are needed."
                )
            ids = sorted({*new_ids, *range(old, data.shape[0])})
            undo.keep_rows(data, torch.tensor(ids, dtype=torch.long, device=data.device))
            fill(data, old, ids)


def set_vocab_size(model: Any, rows: int) -> None:
    """Tells a model's config how many rows its embeddings have."""
    model.config.get_text_config().vocab_size = rows
    model.vocab_size = rows


def _lengthen(model: Any, tensors: list[Any], rows: int) -> None:
    import torch

    for tensor in tensors:
        old, gradient = tensor.data, tensor.grad
        if old.shape[0] >= rows:
            continue
        longer = torch.empty((rows, *old.shape[1:]), dtype=old.dtype, device=old.device)
        longer[: old.shape[0]] = old
        tensor.grad = None
        tensor.data = longer
        if gradient is not None:
            tensor.grad = torch.zeros_like(longer)
            tensor.grad[: old.shape[0]] = gradient
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if any(weight is tensor for tensor in tensors):
            for size in ("num_embeddings", "out_features"):
                if hasattr(module, size):
                    setattr(module, size, rows)
    set_vocab_size(model, rows)


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


def make_rows(trained: "torch.Tensor", count: int, new_rows: NewRows) -> "torch.Tensor":
    """Makes rows that follow trained ones; sampled rows differ in the trained rows' dtype.

    Args:
        trained: The trained rows, of shape (V, H).
        count: How many rows to make.
        new_rows: "sample" draws each row, "mean" takes the trained rows' mean for all.

    Returns:
        The rows in the trained rows' dtype, of shape (count, H).

    Example:
        >>> import torch
        >>> make_rows(torch.tensor([[0.0, 2.0], [0.0, 0.0], [2.0, 4.0]]), 1, "mean")
        tensor([[1., 3.]])
    """
    if new_rows == "mean":
        return average_rows(trained).to(trained.dtype).expand(count, -1)
    return _make_distinct(sample_rows(trained, count), trained.dtype)


def make_padding(trained: "torch.Tensor", count: int) -> "torch.Tensor":
    """Makes rows of no token: about the trained rows' mean, and each another.

    In an output layer they share in the probabilities of every prediction for as long as nothing
    trains them, and the mean's share is small where that of a row like the trained ones is not.

    Args:
        trained: The trained rows, of shape (V, H).
        count: How many rows to make.

    Returns:
        The rows in the trained rows' dtype, of shape (count, H).
    """
    if not count:
        return trained[:0]
    mean = average_rows(trained, max(ROWS_PER_COLUMN * trained.shape[1], LEAST_ROWS))
    return _make_distinct(mean.expand(count, -1), trained.dtype)


def _make_distinct(rows: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    # Rows that are nearly the same leave less between them than the dtype can tell apart.
    spread = torch.finfo(dtype).eps * rows.abs().clamp(min=1e-3)
    while len(torch.unique(stored := rows.to(dtype), dim=0)) < len(rows):
        rows = rows + spread * torch.randn_like(rows)
        spread = 2 * spread
    return stored


def average_rows(trained: "torch.Tensor", most: int | None = None) -> "torch.Tensor":
    """Takes the mean of trained rows, those of one value throughout left out.

    Args:
        trained: The trained rows, of shape (V, H).
        most: Of more rows than this, so many are chosen at random.

    Returns:
        The mean in float32, of shape (H,); zeros where no row is trained.
    """
    import torch

    total = torch.zeros(trained.shape[1], dtype=torch.float32, device=trained.device)
    size = 0
    for rows in _iter_trained(trained, most):
        total += rows.sum(dim=0)
        size += len(rows)
    return total / max(size, 1)


def sample_rows(trained: "torch.Tensor", count: int) -> "torch.Tensor":
    """Draws rows from a normal distribution with the mean and covariance of trained rows.

    A random mixture of the centred rows has their covariance, which then needn't be computed.
    Rows of one value throughout, such as zeros, were never trained and don't count. Of a
    vocabulary with more than four rows for each of its columns, so many are chosen at random.

    Args:
        trained: The trained rows, of shape (V, H).
        count: How many rows to draw.

    Returns:
        The rows in float32, of shape (count, H). Where no row is trained, they are normal with a
        standard deviation of 0.02.
    """
    import torch

    width = trained.shape[1]
    form: dict[str, Any] = {"device": trained.device, "dtype": torch.float32}
    # The first row of weights is ones, for the sum.
    weights, sums, used = torch.zeros(count, 1, **form), torch.zeros(1 + count, width, **form), 0
    for rows in _iter_trained(trained, max(ROWS_PER_COLUMN * width, LEAST_ROWS)):
        mixture = torch.randn(1 + count, len(rows), **form)
        mixture[0] = 1
        sums += mixture @ rows
        weights += mixture[1:].sum(dim=1, keepdim=True)
        used += len(rows)
    if not used:
        return 0.02 * torch.randn(count, width, **form)
    mean = sums[0] / used
    return mean + (sums[1:] - weights * mean) / used**0.5


def _iter_trained(trained: "torch.Tensor", most: int | None) -> Iterator["torch.Tensor"]:
    import torch

    size, index = len(trained), None
    if most is not None and size > most:
        index = torch.randperm(size, device=trained.device)[:most].sort().values
        size = most
    for start in range(0, size, CHUNK):
        span = slice(start, start + CHUNK)
        yield _keep_trained(trained[span] if index is None else trained[index[span]])


def _keep_trained(rows: "torch.Tensor") -> "torch.Tensor":
    import torch

    rows = rows.float()
    lowest, highest = rows.amin(dim=1), rows.amax(dim=1)  # far faster than aminmax
    kept = lowest.isfinite() & highest.isfinite()
    if rows.shape[1] > 1:
        kept &= torch.ne(lowest, highest)
    return rows if kept.all() else rows[kept]
