"""How fast batches come: the loader alone, the step alone, both together, and other settings (playbook: F1, F2)."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from torch.utils.data import default_collate

from workup.errors import WorkloadError
from workup.measure import data, devices, faults
from workup.measure.state import preserved
from workup.measure.steps import stepper
from workup.workload import Workload, size

#: The least turns a stretch is timed over, however slow they are.
LEAST = 2
#: Options that a loader without workers refuses.
WORKERS_ONLY = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
#: What a sweep varies, and torch's own defaults.
DEFAULTS = {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}
#: The setting that reads example by example what Workup would read by slices.
BY_EXAMPLE: Mapping[str, Any] = {"collate_fn": default_collate}


class Feed:
    """Training batches on the device, with the wait for each.

    Attributes:
        waits: (seconds, whether the batch opened an epoch) of every draw since the last clearing.
        buffered: batches that may lie ready, drawn before what is timed began.
    """

    def __init__(self, workload: Workload, batch_size: int, *, seed: int, device: str) -> None:
        self.loader, self.device = data.loader(workload, batch_size, seed=seed), device
        self.buffered = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        self.waits: list[tuple[float, bool]] = []
        self.iterator: Any = iter(())

    def draw(self) -> Any:
        """The next batch, over the end of an epoch too.

        Raises:
            WorkloadError: the data holds no full batch.
        """
        began = time.perf_counter()
        batch = next(self.iterator, None)
        if opens := batch is None:
            self.iterator = None  # a loader whose workers do not persist ends them here
            self.iterator = iter(self.loader)
            batch = next(self.iterator, None)
        if batch is None:
            raise WorkloadError(f"train_data gave no full batch of {self.loader.batch_size}.")
        batch = data.to_device(batch, self.device)
        self.waits.append((time.perf_counter() - began, opens))
        return batch

    def end_epoch(self) -> None:
        """Let the epoch end after the batches already under way, as it would at its last."""
        self.iterator._sampler_iter = iter(())


def speeds(
    workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0, rounds: int = 5, seconds: float = 6.0
) -> pd.DataFrame:
    """The loader alone, the step alone on a batch held on the device, and both together, interleaved.

    Args:
        seconds: of timed work in all; slow steps take longer, as each stretch has at least two.

    Returns:
        One row a stretch: what (``loader``, ``step``, ``together``), round, and what :func:`stretch` gives.
    """
    rows = []
    with preserved():
        step = stepper(workload, device=device, seed=seed)
        feed = Feed(workload, batch_size, seed=seed, device=device)
        held = feed.draw()
        for _ in range(3):
            step(held)
        turns: list[tuple[str, Callable[[], Any]]] = [
            ("loader", feed.draw),
            ("step", lambda: step(held)),
            ("together", lambda: step(feed.draw())),
        ]
        for index in range(rounds):
            for what, turn in turns:
                row = stretch(turn, feed, seconds=seconds / rounds / len(turns))
                rows.append({"what": what, "round": index, **row})
            turns.append(turns.pop(0))
    return pd.DataFrame(rows)


def stretch(turn: Callable[[], Any], feed: Feed, *, seconds: float) -> dict[str, Any]:
    """``turn`` repeated for ``seconds``, timed between two waits for the device.

    A warm-up first uses up what workers had fetched ahead. A host that runs ahead of its device would
    queue steps without end in that time, so the warm-up's pace limits their number too.

    Returns:
        steps, step_seconds (steady), data_seconds (mean wait for a batch), stalls, stall_seconds (mean extra
        wait at an epoch's start, which the steady step is without; NaN where no epoch began).
    """
    began, done = time.perf_counter(), 0
    while done < LEAST or (done < feed.buffered + 2 and time.perf_counter() - began < seconds):
        turn()
        done += 1
    devices.synchronize(feed.device)
    most = max(LEAST, 2 * done * seconds / (time.perf_counter() - began))
    feed.waits.clear()
    steps, began = 0, time.perf_counter()
    while steps < LEAST or (steps < most and time.perf_counter() - began < seconds):
        turn()
        steps += 1
    devices.synchronize(feed.device)
    total = time.perf_counter() - began
    steady = [wait for wait, opens in feed.waits if not opens] or [wait for wait, _ in feed.waits] or [0.0]
    usual = float(np.mean(steady))
    stalls = [max(0.0, wait - usual) for wait, opens in feed.waits if opens]
    return {
        "steps": steps,
        "step_seconds": (total - sum(stalls)) / steps,
        "data_seconds": usual,
        "stalls": len(stalls),
        "stall_seconds": np.mean(stalls) if stalls else np.nan,
    }


def sweep(
    workload: Workload,
    settings: Sequence[Mapping[str, Any]],
    *,
    batch_size: int,
    device: str = "cpu",
    seed: int = 0,
    passes: int = 2,
    seconds: float = 1.0,
    advance: Callable[[], Any] = lambda: None,
) -> pd.DataFrame:
    """The step with its loader under each setting, ``passes`` times in alternating order.

    Args:
        settings: loader options, each over torch's defaults; the user's collate_fn and the like stay.
        seconds: timed for each setting and pass; every pass reads in another order.
        advance: called after each measurement.

    Returns:
        One row a setting and pass: the options, batching (``slices``, ``examples``, ``collate``), first_batch_seconds,
        step_seconds (steady), stall_seconds (extra wait at an epoch's start), epoch_step_seconds
        (stalls shared among the epoch's steps), status (``finished``, ``failed``), reason.
    """
    rows: list[dict[str, Any]] = []
    with preserved():
        step = stepper(workload, device=device, seed=seed)
        for index in range(passes):
            for setting in list(settings)[:: -1 if index % 2 else 1]:
                variant = with_options(workload, setting)
                by = "slices" if data.sliceable(variant) else "examples" if data.sliceable(workload) else "collate"
                row = {
                    "pass": index,
                    "batching": by,
                    **{key: variant.loader.get(key, DEFAULTS[key]) for key in DEFAULTS},
                }
                try:
                    feed = Feed(variant, batch_size, seed=seed + 1 + len(rows), device=device)
                    row |= _measured(step, feed, seconds) | {"status": "finished", "reason": ""}
                except Exception as error:
                    row |= {"status": "failed", "reason": faults.sentence(error)}
                rows.append(row)
                advance()
    names = [*DEFAULTS, "first_batch_seconds", "step_seconds", "stall_seconds", "status", "reason"]
    table = pd.DataFrame(rows).reindex(columns=["pass", "batching", *names])
    epoch = (size(workload.train_data) or np.inf) / batch_size
    return table.assign(epoch_step_seconds=table.step_seconds + table.stall_seconds / epoch)


def with_options(workload: Workload, setting: Mapping[str, Any]) -> Workload:
    """``workload`` with other loader options; those it has that a sweep does not vary stay."""
    options = {key: value for key, value in workload.loader.items() if key not in DEFAULTS} | dict(setting)
    if not options.get("num_workers"):
        options = {key: value for key, value in options.items() if key not in WORKERS_ONLY}
    elif options.get("prefetch_factor") is None:
        options["prefetch_factor"] = 2
    return dataclasses.replace(workload, loader=options)


def _measured(step: Callable[[Any], Tensor], feed: Feed, seconds: float) -> dict[str, float]:
    step(feed.draw())
    first = feed.waits[0][0]
    row = stretch(lambda: step(feed.draw()), feed, seconds=seconds)
    stall = row["stall_seconds"]
    if np.isnan(stall):  # no epoch ended meanwhile: end one
        feed.end_epoch()
        while not feed.waits[-1][1]:
            step(feed.draw())
        stall = max(0.0, feed.waits[-1][0] - row["data_seconds"])
    return {"first_batch_seconds": first, "step_seconds": row["step_seconds"], "stall_seconds": stall}
