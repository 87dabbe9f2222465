"""A profiler's trace of some steady steps (playbook: F1)."""

import os
import tempfile
from pathlib import Path

import pandas as pd
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from workup.measure import data
from workup.measure.state import preserved
from workup.measure.steps import stepper
from workup.workload import Workload

#: The labelled parts of a step, as they stand in the trace.
PARTS = ("data", "forward", "backward", "optimizer")


def profile_steps(
    workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0, steps: int = 5, warmup: int = 3
) -> tuple[str, pd.DataFrame]:
    """Profile ``steps`` training steps after ``warmup`` others.

    Returns:
        The trace as JSON text in Chrome's format, which Perfetto (ui.perfetto.dev) and
        chrome://tracing open; and its summary, one row an operator or labelled part, the longest first:
        name, part (whether it is one of ``PARTS``), calls, self_ms, total_ms (host), device_ms, each per step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes its own progress into the notebook
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
    with preserved(), tempfile.TemporaryDirectory() as folder:
        step = stepper(workload, device=device, seed=seed)
        batches = data.batches(workload, batch_size, seed=seed, device=device)
        plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
        path = Path(folder) / "trace.json"
        with profile(activities=activities, schedule=plan, acc_events=True) as profiler:
            for _ in range(warmup + steps):
                with record_function("data"):
                    batch = next(batches)
                step(batch)
                profiler.step()
        profiler.export_chrome_trace(str(path))
        text = path.read_text()
    rows = [
        {
            "name": event.key,
            "part": event.key in PARTS,
            "calls": event.count / steps,
            "self_ms": event.self_cpu_time_total / 1000 / steps,
            "total_ms": event.cpu_time_total / 1000 / steps,
            "device_ms": event.device_time_total / 1000 / steps,
        }
        for event in profiler.key_averages()
        if not event.key.startswith("ProfilerStep")
    ]
    return text, pd.DataFrame(rows).sort_values(["part", "total_ms"], ascending=False, ignore_index=True)
