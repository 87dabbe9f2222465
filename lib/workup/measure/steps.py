"""One training step as a function of a batch: the loop's own arithmetic, without its recording."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from workup.measure.state import seed_everything
from workup.measure.train import autocasting
from workup.workload import Workload


def stepper(workload: Workload, *, device: str, seed: int = 0, compile: bool | None = None) -> Callable[[Any], Tensor]:
    """A fresh model and optimizer, and the function that trains them by one batch.

    Call it inside ``state.preserved()``: it seeds everything. The parts of a step are labelled
    (``forward``, ``backward``, ``optimizer``), so that a profiler shows them by name.

    Args:
        compile: overrides ``workload.compile``.

    Returns:
        ``step(batch)`` -> the detached mean loss, on the device, not waited for.
    """
    seed_everything(seed)
    model = workload.build_model().to(device).train()
    optimizer = workload.optimizer(model.parameters(), workload.lr)
    compiled = workload.compile if compile is None else compile
    forward: Any = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler(torch.device(device).type) if workload.precision == "fp16" else None

    def step(batch: Any) -> Tensor:
        with record_function("forward"), autocasting(workload.precision, device):
            loss = workload.loss(forward, batch).float().mean()
        with record_function("backward"):
            (scaler.scale(loss) if scaler else loss).backward()
        with record_function("optimizer"):
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
