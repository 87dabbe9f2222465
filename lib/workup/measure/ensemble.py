"""Trials of one workload in one stack, each trained as the plain loop trains it.

Before a sweep the first steps are trained both ways: what cannot be vectorised, or comes out
otherwise, is then known.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from workup.measure.stack import Stack, Unfit
from workup.measure.state import preserved
from workup.measure.train import train
from workup.trace import Trace, Trial
from workup.workload import Workload

#: Trials in one stack at most.
MOST = 16
#: Steps by which a stack is compared with the plain loop, and how far rounding may take them apart, in machine
#: epsilons: at rates that diverge, the first steps already multiply rounding.
CHECKED, ROUNDING = 4, 1e4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Median time of one step: of the trials one after another, and of their stack [s]."""

    plain_seconds: float
    stack_seconds: float


def groups(trials: Sequence[Trial], *, most: int = MOST, by_seed: bool = False) -> list[list[int]]:
    """Indices of trials that can share a stack; what differs within one is lr, warmup, shape, steps, clipping, seed."""
    alike: dict[Any, list[int]] = {}
    for index, trial in enumerate(trials):
        seed = trial.seed if by_seed else None
        clips = (trial.clip_percentile, trial.clip_from)
        key = (trial.batch_size, trial.optimizer, trial.change, clips, trial.eval_every, trial.eval_examples, seed)
        alike.setdefault(key, []).append(index)
    return [found[i : i + most] for found in alike.values() for i in range(0, len(found), most)]


def compare(workload: Workload, trials: Sequence[Trial], *, device: str = "cpu") -> Comparison:
    """Train the first steps both ways.

    Raises:
        Unfit: the model, loss or data cannot be vectorised (with the operator's own message), or a
            loss or norm differs past rounding.
        WorkloadError: as from :func:`workup.measure.train.train`.
    """
    plain = [train(workload, trial, device=device, first=CHECKED) for trial in trials]
    stacked = dict(run(workload, trials, device=device, first=CHECKED))
    for index, theirs in enumerate(plain):
        if "interrupted" in (theirs.status, stacked[index].status):
            raise KeyboardInterrupt
        if theirs.status not in ("finished", "diverged"):
            raise Unfit(f"the plain loop fails: {theirs.reason}")
        _agree(theirs, stacked[index])
    pace = [float(trace.steps.seconds[1:].median()) for trace in plain]
    shared = [float(trace.steps.seconds[1:].median()) for trace in stacked.values()]
    return Comparison(float(np.nansum(pace)), float(np.nansum(shared)))


def _agree(plain: Trace, stacked: Trace) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = (trace.steps[name].to_numpy() for trace in (stacked, plain))
        same = len(ours) == len(theirs)
        near = same and np.isclose(ours, theirs, rtol=ROUNDING * torch.finfo(torch.float32).eps, equal_nan=True)
        if not np.all(near):
            step = int(np.argmin(near)) if same else min(len(ours), len(theirs)) - 1
            raise Unfit(f"lr {plain.trial.lr:.3g}, step {step}: {name} {ours[step]:.8g}, plain loop {theirs[step]:.8g}")


def run(
    workload: Workload,
    trials: Sequence[Trial],
    *,
    device: str = "cpu",
    save: Callable[[int, Trace], Any] | None = None,
    first: int | None = None,
) -> Iterator[tuple[int, Trace]]:
    """Train ``trials``, alike as :func:`groups` finds them; each (index, trace) as it ends.

    A step's ``seconds`` are the stack's, divided by the trials in it. Ctrl-C ends all of them as
    ``interrupted``.

    Args:
        save: called now and then with the index and unfinished trace of a trial.
        first: stop after so many steps.

    Raises:
        Unfit: something failed that the plain loop may get past, memory included.
    """
    if workload.precision != "fp32" or workload.compile:
        raise Unfit(f"precision {workload.precision}, compile {workload.compile}: only plain fp32 is stacked")
    with preserved():
        try:
            stack = Stack(workload, trials, device)
            for step in range(min(first or stack.steps, stack.steps)):
                yield from stack.step(step)
                for member in stack.members:
                    if save is not None and member.recorder.save_due():
                        save(member.index, stack.trace(member, "interrupted", f"saved at step {step + 1}"))
                if not stack.members:
                    break
        except KeyboardInterrupt:
            yield from [(m.index, stack.trace(m, "interrupted", f"interrupted at step {step}")) for m in stack.members]
            raise
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        yield from [(m.index, stack.trace(m, "finished", "")) for m in stack.members]
