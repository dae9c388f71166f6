"""Putting a model back exactly as it was, after a change to it failed."""

from typing import Any


class ModelSnapshot:
    """What a model consists of at one moment, without copies of its weights.

    Modules keep their attributes, hooks, parameters and sub-modules; parameters and buffers keep
    their storage and gradients; configs keep their entries. Values written into a storage in place
    must be handed to `keep_rows` beforehand.

    Args:
        model: A `torch.nn.Module`, with or without configs.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [
            (
                vars(module),
                dict(vars(module)),
                [
                    (part, dict(part))
                    for part in (module._parameters, module._buffers, module._modules)
                ],
            )
            for module in model.modules()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        self._storages = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
        self._configs = [(vars(config), dict(vars(config))) for config in _find_configs(model)]
        self._rows: list[tuple[Any, Any, Any]] = []

    def keep_rows(self, tensor: Any, index: Any) -> None:
        """Remembers the values of rows that are about to be written in place.

        Args:
            tensor: A tensor with no gradient history.
            index: Which rows.
        """
        self._rows.append((tensor, index, tensor[index].clone()))

    def restore(self) -> None:
        """Puts everything back."""
        for attributes, saved, parts in self._modules:
            _refill(attributes, saved)
            for part, entries in parts:
                _refill(part, entries)
        for tensor, storage, gradient in self._storages:
            if tensor.data_ptr() != storage.data_ptr() or tensor.shape != storage.shape:
                tensor.grad = None  # of another shape, it would stand in the way
            tensor.data = storage
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for tensor, index, values in reversed(self._rows):
            tensor[index] = values
        for attributes, saved in self._configs:
            _refill(attributes, saved)


def _refill(target: dict[str, Any], entries: dict[str, Any]) -> None:
    target.clear()
    target.update(entries)


def _find_configs(model: Any) -> list[Any]:
    found = [
        getattr(module, name, None)
        for module in model.modules()
        for name in ("config", "generation_config")
    ]
    found += [
        config.get_text_config() for config in found[:1] if hasattr(config, "get_text_config")
    ]
    return list({id(config): config for config in found if hasattr(config, "__dict__")}.values())
