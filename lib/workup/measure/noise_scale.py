"""The gradient's noise against its length, along a short training (McCandlish et al. 2018, arXiv:1812.06162)."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from workup.measure import data, devices
from workup.measure.train import train
from workup.trace import Trial
from workup.workload import Workload, size

COLUMNS = ("step", "draw", "small", "large", "population", "loss", "small_norm2", "large_norm2")


def measure(
    workload: Workload,
    trial: Trial,
    *,
    at: Sequence[int],
    draws: tuple[int, int] = (6, 6),
    enough: Callable[[pd.DataFrame], bool] = lambda _: True,
    parts: int = 8,
    device: str = "cpu",
) -> pd.DataFrame:
    """Squared gradient norms at two batch sizes, at some steps of one training.

    The training is THE loop's, untouched: the loss it calls looks at the model before the step.
    One draw takes ``parts`` batches of ``trial.batch_size`` from one shuffle of the data; their
    mean squared norm is the small size's, the squared norm of their mean the large size's.

    Args:
        at: steps to measure at, from 0, below ``trial.steps``.
        draws: least and most repetitions at each, with other shuffles. enough: whether the rows of one step will do.

    Returns:
        A row per step and draw: step, draw, small, large (batch sizes), population (size of the
        data, 0 if unknown), loss (mean over the batches), small_norm2, large_norm2. Steps that a
        failed training never reached are not there.
    """
    examples = size(workload.train_data) or 0
    parts = min(parts, examples // trial.batch_size) if examples else parts
    rows: list[list[float]] = []
    seen, (least, most) = 0, draws

    def look(model: nn.Module, batch: Any) -> Tensor:
        nonlocal seen
        if seen in at:
            with untouched(model, device):
                for draw in range(most):
                    if draw >= least and enough(pd.DataFrame(rows[-draw:], columns=list(COLUMNS))):
                        break
                    source = data.batches(
                        workload, trial.batch_size, seed=trial.seed + 1000 * (draw + 1), device=device
                    )
                    norms = loss_and_norms(
                        lambda b: workload.loss(model, b), model, [next(source) for _ in range(parts)]
                    )
                    rows.append([seen, draw, trial.batch_size, parts * trial.batch_size, examples, *norms])
        seen += 1
        return workload.loss(model, batch)

    if parts >= 2:
        train(dataclasses.replace(workload, loss=look), trial, device=device)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def loss_and_norms(
    loss: Callable[[Any], Tensor], model: nn.Module, batches: Sequence[Any]
) -> tuple[float, float, float]:
    """The batches' mean loss, mean squared gradient norm, and squared norm of mean gradient; ``.grad`` stays as is."""
    params = [p for p in model.parameters() if p.requires_grad]
    total: list[Tensor] | None = None
    value = small = 0.0
    for batch in batches:
        mean = loss(batch).float().mean()
        found = torch.autograd.grad(mean, params, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        value += mean.item() / len(batches)
        small += _norm2(grads) / len(batches)
        total = grads if total is None else list(torch._foreach_add(total, grads))
    return value, small, _norm2(total or []) / len(batches) ** 2


def _norm2(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) ** 2


@contextlib.contextmanager
def untouched(model: nn.Module, device: str) -> Any:
    """Buffers (batch norm's running averages) and the random stream are afterwards as before."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with devices.forked_random(device):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
