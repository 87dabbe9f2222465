"""The update rules compared (playbook: A5), each torch.optim's own.

Where torch.optim departs from the playbook's formula: RMSprop starts its mean square at 0,
not 1, and adds eps outside the root; Adam adds eps to the bias-corrected root; NAdam
follows Dozat's momentum schedule in place of a fixed beta1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from workup.errors import ParameterError, nearest
from workup.measure.state import preserved
from workup.workload import Workload

Build = Callable[[Iterable[Any], float], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Build] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "nesterov": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
    "rmsprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "nadam": lambda params, lr: torch.optim.NAdam(params, lr=lr),
}


def builder(name: str) -> Build:
    """The optimizer of that name, as ``f(params, lr)``.

    Raises:
        ParameterError: no such name.
    """
    if name not in OPTIMIZERS:
        raise ParameterError(f"optimizer {name!r} is unknown. {nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def sgd_momentum(workload: Workload) -> float | None:
    """The momentum of a workload that trains by SGD; None where its optimizer is another."""
    with preserved():
        optimizer = workload.optimizer(workload.build_model().parameters(), workload.lr)
    return optimizer.param_groups[0]["momentum"] if isinstance(optimizer, torch.optim.SGD) else None
