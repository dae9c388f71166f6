"""Batches for training: padded, with labels from the masks alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

IGNORED = -100  # what torch's cross-entropy leaves out by default


def collate_chats(
    features: Sequence[Mapping[str, Any]],
    *,
    pad_id: int,
    padding_side: Literal["left", "right"] = "right",
    pad_to_multiple_of: int | None = None,
    return_tensors: Literal["pt"] | None = None,
) -> dict[str, Any]:
    """Pads encoded chats to one length; labels are the ids that the masks choose.

    Which id pads has no influence on the labels: a pad token that is also the end of a turn is
    learnt where it ends one.

    Args:
        features: Rows with `input_ids` and `assistant_masks`, such as `EncodedChat`s; an
            `attention_mask` is all ones unless there is one.
        pad_id: What to fill `input_ids` up with.
        padding_side: Where.
        pad_to_multiple_of: Rounds the common length up to a multiple of this.
        return_tensors: "pt" for tensors, which needs torch; None for lists.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each of shape (rows, length), with -100 for a
        label that doesn't count.

    Raises:
        ValueError: There are no rows; a row's columns are missing or differ in length; another
            argument isn't one of the values above.

    Example:
        >>> rows = [
        ...     {"input_ids": [5, 6, 2], "assistant_masks": [0, 1, 1]},
        ...     {"input_ids": [5, 2], "assistant_masks": [0, 1]},
        ... ]
        >>> collate_chats(rows, pad_id=2)["labels"]
        [[-100, 6, 2], [-100, 2, -100]]
    """
    _check(features, padding_side, pad_to_multiple_of, return_tensors)
    multiple = pad_to_multiple_of or 1
    longest = max(len(row["input_ids"]) for row in features)
    length = -(-longest // multiple) * multiple
    batch: dict[str, Any] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in features:
        ids = list(row["input_ids"])
        pairs = zip(ids, row["assistant_masks"], strict=True)
        seen = row.get("attention_mask")
        columns = {
            "input_ids": (ids, pad_id),
            "attention_mask": ([1] * len(ids) if seen is None else list(seen), 0),
            "labels": ([i if chosen else IGNORED for i, chosen in pairs], IGNORED),
        }
        for name, (values, filler) in columns.items():
            padding = [filler] * (length - len(values))
            batch[name].append(padding + values if padding_side == "left" else values + padding)
    if return_tensors is None:
        return batch
    import torch

    return {name: torch.tensor(rows, dtype=torch.long) for name, rows in batch.items()}


def _check(
    features: Sequence[Mapping[str, Any]],
    padding_side: str,
    multiple: int | None,
    return_tensors: str | None,
) -> None:
    if not features:
        raise ValueError("There are no rows to collate: give at least one.")
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}: 'left' or 'right' was expected.")
    is_int = isinstance(multiple, int) and not isinstance(multiple, bool)
    if multiple is not None and not (is_int and multiple > 0):
        raise ValueError(f"pad_to_multiple_of={multiple!r}: a positive int was expected, or None.")
    if return_tensors not in (None, "pt"):
        raise ValueError(f"return_tensors={return_tensors!r}: 'pt' or None was expected.")
    for number, row in enumerate(features):
        missing = [name for name in ("input_ids", "assistant_masks") if name not in row]
        if missing:
            raise ValueError(
                f"Row {number} has no {' and no '.join(missing)}: encode with encode_chat(s)."
            )
        lengths = {
            name: len(row[name])
            for name in ("input_ids", "assistant_masks", "attention_mask")
            if row.get(name) is not None
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Row {number} has columns of different lengths: {lengths}.")
