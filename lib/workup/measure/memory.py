"""What one batch size needs: real steps under a real limit, and the peak they reached.

A probe never asks the machine for its last byte: on a CPU the child's data segment is limited
to little more than the process may use (RLIMIT_DATA), so that a step too large fails in the allocator,
as on a GPU, and not by the system killing processes; what it held at its highest then decides.
"""

import contextlib
import ctypes
import gc
import math
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import torch

from workup.errors import ParameterError, WorkupError
from workup.measure import data, devices, faults
from workup.measure.train import evaluate, train
from workup.trace import Trial
from workup.workload import Workload

#: Part of the free memory that is left alone when nobody says what the limit is.
MARGIN = 0.1
#: Part of the memory that the batches of a sweep may take.
BATCH_CACHE_SHARE = 0.02
#: Bytes a thread that libraries map for their buffers and hardly touch: the data segment counts them, memory does not.
UNTOUCHED = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One size tried for some steps, with the optimizer's state allocated and an evaluation.

    Args:
        batch_size: examples per step (per evaluation batch where ``training`` is False).
        status: ``fits``, ``out_of_memory``, ``launch_limit``, ``too_slow`` or ``failed``.
        reason: what happened, for one that does not fit.
        peak_bytes: the process's highest resident memory (CPU) or the allocator's highest
            reserved memory (accelerator); allocated_bytes is what tensors took of that.
        step_seconds: median time of a step, the first left out.
        retries: times the accelerator's allocator had to free its cache to serve a request: thrashing.
        steps: steps done. training: False for an evaluation pass alone.
    """

    batch_size: int
    status: str
    reason: str = ""
    peak_bytes: int = 0
    allocated_bytes: int = 0
    step_seconds: float = math.nan
    retries: int = 0
    steps: int = 0
    training: bool = True

    @property
    def fits(self) -> bool:
        return self.status == "fits"


@dataclass(frozen=True)
class Limit:
    """Bytes one training process may use, and what sets that limit."""

    bytes: int
    source: str


def memory_limit(device: str = "cpu", *, asked_bytes: float | None = None) -> Limit:
    """What a training process may use: what was asked for, or what the machine has left less a margin.

    On a CPU the tightest of free physical memory, the cgroup's limit and the process's own
    RLIMIT_AS and RLIMIT_DATA; on an accelerator what the device has free.

    Raises:
        ParameterError: the limit asked for is not a positive number.
    """
    if asked_bytes is not None:
        if not (isinstance(asked_bytes, (int, float)) and math.isfinite(asked_bytes) and asked_bytes > 0):
            raise ParameterError(f"memory_limit({asked_bytes!r}): a positive number of bytes is needed.")
        return Limit(int(asked_bytes), "the limit you set")
    if devices.queues(device):
        return Limit(int(devices.free_bytes(device) * (1 - MARGIN / 2)), f"free memory of {device}")
    free = {"free physical memory": psutil.virtual_memory().available, **_cgroup_room()}
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            free[name] = soft
    source = min(free, key=free.__getitem__)
    return Limit(int(free[source] * (1 - MARGIN)), source)


def _cgroup_room(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Bytes left under the tightest memory limit of this process's control groups, version 1 or 2."""
    room: dict[str, int] = {}
    names = {
        "": (root, "memory.max", "memory.current"),
        "memory": (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    }
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers not in names:
                continue
            base, most, used = names[controllers]
            group = base / place.lstrip("/")
            for folder in (group, *group.parents):
                if base not in (folder, *folder.parents):
                    break
                with contextlib.suppress(OSError, ValueError):
                    left = int((folder / most).read_text()) - int((folder / used).read_text())
                    room["the control group's limit"] = min(left, room.get("the control group's limit", left))
    return room


def batch_cache(workload: Workload, trials: Sequence[Trial], device: str) -> data.BatchCache:
    """A cache, of ``BATCH_CACHE_SHARE`` of the memory, for batches that several ``trials`` share; others are drawn."""
    uses = Counter((trial.batch_size, trial.seed) for trial in trials)
    made = data.BatchCache(workload, device=device, room=BATCH_CACHE_SHARE * memory_limit(device).bytes)
    made.given_up |= {key for key, count in uses.items() if count == 1}
    return made


# -- one attempt ------------------------------------------------------------------------------


def attempt(
    workload: Workload, batch_size: int, *, device: str = "cpu", limit: Limit, steps: int = 3, training: bool = True
) -> Attempt:
    """Train (or only evaluate) at one size for some steps, in this process, under ``limit``.

    The learning rate is a thousandth of the workload's: memory and time do not depend on it,
    and no divergence ends the steps early.

    Raises:
        WorkloadError: the workload itself is at fault, whatever the size.
    """
    _settle(device)
    with _limited(limit.bytes, device):
        if training:
            evaluates = workload.eval_data is not None
            trial = Trial(
                lr=workload.lr / 1000,
                steps=steps,
                batch_size=batch_size,
                eval_every=steps if evaluates else 0,
                eval_examples=batch_size if evaluates else None,
            )
            try:
                trace = train(workload, trial, device=device)
            except MemoryError as error:  # there was not enough left for the trace itself
                seconds, done, text, status = [], 0, f"{type(error).__name__}: {error}", "memory"
            else:
                seconds, done = trace.steps["seconds"].tolist()[1:], len(trace.steps)
                text = "" if trace.status in ("finished", "diverged") else trace.reason
                status = "memory" if trace.status == "out_of_memory" else faults.kind(text) if text else "fits"
        else:
            seconds, done, text = [], 1, _evaluation_pass(workload, batch_size, device)
            status = faults.kind(text) if text else "fits"
    peak, allocated, retries = _peak(device)
    if status == "fits" and peak > limit.bytes:
        status, text = "memory", f"the peak of {peak / 2**20:,.0f} MiB is past the limit"
    if status == "fits" and retries:
        status, text = "memory", f"the allocator had to free its cache {retries} times to go on: at the edge of memory"
    names = {"memory": "out_of_memory", "ambiguous": "out_of_memory", "launch": "launch_limit", "fits": "fits"}
    return Attempt(
        batch_size=batch_size,
        status=names.get(status, "failed"),
        reason=f"{text} (the device's context is lost: only a new process helps)" if status == "dead" else text,
        peak_bytes=peak,
        allocated_bytes=allocated,
        step_seconds=float(sorted(seconds)[len(seconds) // 2]) if len(seconds) else math.nan,
        retries=retries,
        steps=done,
        training=training,
    )


def _evaluation_pass(workload: Workload, batch_size: int, device: str) -> str:
    """One evaluation batch of that size; returns the error as ``Type: message``, or nothing."""
    try:
        model = workload.build_model().to(device)
        batches = data.evaluation_batches(workload, batch_size=batch_size, examples=batch_size, device=device)
        evaluate(workload, model, batches, device)  # type: ignore[arg-type]
    except WorkupError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _settle(device: str) -> None:
    """Give back what earlier attempts left, so that each begins from the same ground."""
    gc.collect()
    if devices.queues(device):
        devices.release(device)
        devices.reset_usage(device)
        return
    torch.ones(1 << 18).sum()  # starts the thread pool, whose stacks would count as data,
    pd.DataFrame({"step": [0]})  # and pandas' own pool
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's mark of the highest resident size starts anew


def _peak(device: str) -> tuple[int, int, int]:
    """(peak, of which allocated by tensors, retries) in bytes since :func:`_settle`."""
    if devices.queues(device):
        used = devices.usage(device)
        return used.reserved_bytes, used.allocated_bytes, used.retries
    high = _status_bytes("VmHWM")
    if high is None:
        high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return high, 0, 0


def _status_bytes(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def _limited(limit_bytes: int, device: str) -> Iterator[None]:
    """Hold this process to ``limit_bytes``, for real: an allocation past it (on a CPU, hardly past it) fails."""
    if devices.queues(device):
        with devices.limited(device, limit_bytes):
            yield
        return
    held, resident = _status_bytes("VmData"), _status_bytes("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if held is None or resident is None:  # not Linux: the peak is compared with the limit afterwards
        yield
        return
    room = held + max(0, limit_bytes - resident) + UNTOUCHED * min(8, torch.get_num_threads())
    resource.setrlimit(resource.RLIMIT_DATA, (room if hard == resource.RLIM_INFINITY else min(room, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
