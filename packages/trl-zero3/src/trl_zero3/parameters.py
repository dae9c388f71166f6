"""All parameters of a module, with those that ZeRO-3 knows it to borrow from other modules."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def get_all_parameters(
    sub_module: nn.Module, recurse: bool = False
) -> Iterator[tuple[str | int, nn.Parameter]]:
    """Iterate over a module's parameters, then over the external ones that DeepSpeed registered.

    Args:
        sub_module: Any module; one that DeepSpeed has not touched has no external parameters.
        recurse: Also take the parameters of the modules inside.

    Returns:
        Pairs of a name and a parameter; the name of an external parameter is its id.

    Example:
        >>> from torch import nn
        >>> [name for name, _ in get_all_parameters(nn.Linear(2, 2))]
        ['weight', 'bias']
        >>> list(get_all_parameters(nn.Sequential(nn.Linear(2, 2))))
        []
    """
    external: Any = getattr(sub_module, "ds_external_parameters", tuple)
    return chain(sub_module.named_parameters(recurse=recurse), external())


def iter_params(module: nn.Module, recurse: bool = False) -> list[nn.Parameter]:
    """Return the parameters of `get_all_parameters`, without their names.

    Args:
        module: Any module.
        recurse: Also take the parameters of the modules inside.

    Returns:
        The module's own parameters, then its external ones.

    Example:
        >>> from torch import nn
        >>> [tuple(p.shape) for p in iter_params(nn.Sequential(nn.Linear(3, 2)), recurse=True)]
        [(2, 3), (2,)]
    """
    return [parameter for _, parameter in get_all_parameters(module, recurse)]
