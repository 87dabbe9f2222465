"""One training step as a function of a batch, the loop's arithmetic without its recording; and its profile."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.profiler import profile, record_function, schedule

from workup.measure import data, devices
from workup.measure.state import preserved, seed_everything
from workup.measure.train import autocasting
from workup.workload import Workload

#: The labelled parts of a step, as they stand in a profiler's trace.
PARTS = ("data", "forward", "backward", "optimizer")


def stepper(workload: Workload, *, device: str, seed: int = 0) -> Callable[[Any], Tensor]:
    """A fresh model and optimizer, and the function that trains them by one batch.

    Call it inside ``state.preserved()``: it seeds everything.

    Returns:
        ``step(batch)`` -> the detached mean loss, on the device, not waited for.
    """
    seed_everything(seed)
    model = workload.build_model().to(device).train()
    optimizer = workload.optimizer(model.parameters(), workload.lr)
    forward: Any = torch.compile(model) if workload.compile else model
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=workload.precision == "fp16")

    def step(batch: Any) -> Tensor:
        with record_function("forward"), autocasting(workload.precision, device):
            loss = workload.loss(forward, batch).float().mean()
        with record_function("backward"):
            scaler.scale(loss).backward()
        with record_function("optimizer"):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def profile_steps(
    workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0, steps: int = 5, warmup: int = 3
) -> tuple[str, pd.DataFrame]:
    """Profile ``steps`` training steps after ``warmup`` others (playbook: F1).

    Returns:
        The trace as JSON text in Chrome's format, which Perfetto (ui.perfetto.dev) and
        chrome://tracing open; and its summary, one row an operator or labelled part, the longest first:
        name, part (whether it is one of ``PARTS``), calls, self_ms, total_ms (host), device_ms, each per step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes its own progress into the notebook
    with preserved(), tempfile.TemporaryDirectory() as folder:
        step = stepper(workload, device=device, seed=seed)
        batches = data.batches(workload, batch_size, seed=seed, device=device)
        plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
        with profile(activities=devices.profiled(device), schedule=plan, acc_events=True) as profiler:
            for _ in range(warmup + steps):
                with record_function("data"):
                    batch = next(batches)
                step(batch)
                profiler.step()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text()
    events = [event for event in profiler.key_averages() if not event.key.startswith("ProfilerStep")]
    table = pd.DataFrame({"name": [e.key for e in events], "part": [e.key in PARTS for e in events]})
    table["calls"] = [e.count / steps for e in events]
    for column, total in (("self_ms", "self_cpu_time"), ("total_ms", "cpu_time"), ("device_ms", "device_time")):
        table[column] = [getattr(event, f"{total}_total") / 1000 / steps for event in events]
    return text, table.sort_values(["part", "total_ms"], ascending=False, ignore_index=True)
