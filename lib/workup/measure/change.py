"""Changes to a fresh model that need none of its user's code."""

import torch
from torch import nn


def changed(model: nn.Module, change: str) -> nn.Module:
    """``model`` with each ``path=value`` of ``change`` set: a flag, or every number of a tensor; ``*value`` multiplies.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> changed(layer, "weight=0 bias=3 bias=*0.5").bias.tolist()
        [1.5, 1.5]
    """
    for item in change.split():
        path, _, value = item.partition("=")
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        if value in ("True", "False"):
            setattr(module, name, value == "True")
            continue
        with torch.no_grad():
            tensor = getattr(module, name)
            tensor.mul_(float(value[1:])) if value.startswith("*") else tensor.fill_(float(value))
    return model
