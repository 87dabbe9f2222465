"""Why the first unstable run is unstable: suspects from its norms, each tried by an experiment (playbook: C2, C4)."""

import dataclasses
import functools
from typing import Any

import numpy as np

from workup.experiments.instability import NOT_SHAKY, verdict
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import causes as judge
from workup.measure import causes as measure
from workup.measure import data
from workup.measure.optimizers import sgd_momentum
from workup.measure.train import train
from workup.trace import Trace

#: Steps looked at past the beginning of the trouble.
PAST = 14
#: An update may throw the weights so many steps before the loss has clearly risen.
LAG = 5
#: Examples named at most.
MOST = 8
_MOVED = "The {3} of layer {0} moved first, to {2:.3g} times the usual norm at step {1}."


def find(session: Session, traces: list[Trace]) -> Finding:
    """The cause of the trouble in the lowest rate that has any: one replay, and a run for each suspect."""
    hot = next((trace for trace in traces if verdict(trace).value not in NOT_SHAKY), None)
    if hot is None:
        return judge.judge({})
    begin = _begins(hot)[0] if _begins(hot) else len(hot.steps) - 1
    calm = [t.trial.lr for t in traces if t.trial.lr < hot.trial.lr and verdict(t).value == "stable"]
    losses = hot.steps.loss.to_numpy()
    suspect = _loudest(hot, begin)
    look: dict[str, Any] = {"losses": (suspect, lambda model, batch, each: each.cpu())}
    momentum, work = sgd_momentum(session.workload), session.workload
    if work.precision == "fp16":
        see = functools.partial(measure.first_nonfinite, work, device=session.device)
        look["module"] = (begin, lambda model, batch, _: see(model, batch))
    if session.budget == "thorough" and momentum is not None:
        look["sharpness"] = (max(0, begin - 1), lambda model, batch, _: measure.sharpness(work, model, batch))
    steps = min(begin + PAST, hot.trial.steps)
    again = measure.replay(work, hot.trial, steps=steps, device=session.device, look=look)
    norms = {"gradient": again.grads, "weights": again.weights}
    moved = [(*found, what) for what, table in norms.items() if (found := judge.moved_first(table, begin))]
    signs: dict[str, Any] = {
        "begin": begin,
        "lr": hot.trial.lr,
        "stable_lr": max(calm, default=None),
        "moved": _MOVED.format(*min(moved, key=lambda found: found[1])) if moved else None,
        "overflow": _overflow(session, hot, again, begin),
        "initialisation": _initialisation(session, hot),
        "batch": _batch(session, hot, traces, suspect, again.seen.get("losses"), losses),
    }
    if again.seen.get("sharpness") is not None:
        signs |= {"sharpness": again.seen["sharpness"], "sharpness_limit": 2 * (1 + (momentum or 0.0)) / hot.trial.lr}
    return judge.judge({key: value for key, value in signs.items() if value is not None})


def _begins(trace: Trace) -> list[int]:
    """The steps at which trouble begins: each event, and the first loss that is not finite."""
    bad = np.flatnonzero(~np.isfinite(trace.steps.loss.to_numpy()))[:1].tolist()
    return sorted([*bad, *(event["begin"] for event in verdict(trace).evidence["events"])])


def _loudest(trace: Trace, begin: int) -> int:
    """Of the step where the loss begins to rise and the ``LAG`` before it, the one with the largest gradient."""
    first = max(0, begin - LAG)
    return first + int(np.argmax(np.nan_to_num(trace.steps.grad_norm.to_numpy()[first : begin + 1], nan=np.inf)))


def _overflow(session: Session, hot: Trace, again: measure.Replay, begin: int) -> dict[str, Any] | None:
    """Steps that fp16's range spoiled near the beginning, tried by the same trial in fp32."""
    bad = np.flatnonzero(~np.isfinite(again.grads.to_numpy()).all(axis=1))
    near = [int(step) for step in bad if step >= begin - 5]
    if session.workload.precision != "fp16" or not near:
        return None
    row = again.grads.iloc[near[0]]
    # Backward comes through the last layer first; a module that overflows forward spoils every gradient.
    where = again.seen.get("module") or row[~np.isfinite(row)].index[-1]
    twin = train(
        dataclasses.replace(session.workload, precision="fp32"), hot.trial, device=session.device, first=begin + PAST
    )
    calm = twin.status == "finished" and verdict(twin).value in NOT_SHAKY
    return {
        "text": f"fp16 overflows: {len(near)} gradients from step {near[0]} on are not finite, first in {where}.",
        "test": "In fp32 the same trial goes on as before." if calm else "the same trial fails in fp32 too.",
        "confirmed": calm,
    }


def _initialisation(session: Session, hot: Trace) -> dict[str, Any] | None:
    """A layer whose weights begin out of scale, tried by the same trial with them scaled to the others'."""
    found = judge.oversized(measure.gains(session.workload, seed=hot.trial.seed))
    if found is None:
        return None
    name, times = found
    scaled = dataclasses.replace(hot.trial, change=f"{name}=*{1 / times:.4g}")
    (trace,) = session.run([scaled], label=f"{name} scaled to the others")
    calm = verdict(trace).value == "stable"
    return {
        "text": f"{name} begins at {times:.3g} times the scale of the other layers.",
        "test": "Scaled to theirs, training is stable." if calm else "scaled to theirs, training is unstable too.",
        "confirmed": calm,
        "change": scaled.change,
    }


def _batch(
    session: Session, hot: Trace, traces: list[Trace], step: int, each: Any, losses: np.ndarray
) -> dict[str, Any] | None:
    """One batch that stands out at several rates, tried by leaving out its update."""
    stands_out = [t.trial.lr for t in traces if judge.outlying(t.steps.grad_norm, step)]
    if hot.trial.lr not in stands_out or len(stands_out) < 2:
        return None
    trial = hot.trial
    without = measure.replay(session.workload, trial, steps=trial.steps, device=session.device, skip=[step]).trace
    calm = not any(step - LAG <= begin <= step + PAST for begin in _begins(without))
    examples = data.indices(session.workload, trial.batch_size, seed=trial.seed, step=step)
    usual = float(np.median(losses[max(0, step - judge.BEFORE) : step]))
    size = len(each) if each is not None and each.dim() else 0
    high = [k for k in np.argsort(-each.numpy())[:size] if not each[k] <= 5 * usual] if size else []
    named = [examples[k] for k in high[:MOST]] if examples else []
    who = f" Examples {', '.join(map(str, named))} stand out in it." if named else ""
    return {
        "text": f"The batch of step {step} stands out at {len(stands_out)} of {len(traces)} rates.{who}",
        "test": "Without its update the loss goes on as before."
        if calm
        else "without its update the loss rises all the same.",
        "confirmed": calm,
        "step": step,
        "examples": examples if examples is not None and len(high) == size else named,
    }
