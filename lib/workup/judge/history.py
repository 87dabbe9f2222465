"""What a finished run's log tells besides its stability: its pace, its evaluations, its schedule (playbook: D5, F)."""

from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding
from workup.judge.pipeline import BOUND

Column = pd.Series | None
#: Values this close to each other, relative to the largest, are one learning rate.
SAME = 0.01
#: Evaluations needed to see a period, at the least, and the autocorrelation it must reach.
FEWEST, PERIODIC = 30, 0.6


def pace(*, seconds: Column, data_seconds: Column, examples: Column, throughput: Column, time: Column) -> list[Finding]:
    """``throughput`` and, where the wait for data was logged, ``input_bound``. All series are indexed by step.

    Args:
        seconds: of each step; where not logged, from ``time`` (s, of any origin) between logged steps.
        data_seconds: of it, waiting for data.
        examples: per step.
        throughput: examples per second.
    """
    if seconds is None and time is not None and len(time) > 1:
        seconds = pd.Series(np.diff(time) / np.diff(time.index), time.index[1:])
    seconds = None if seconds is None else seconds[np.isfinite(seconds) & (seconds > 0)]
    found = []
    if seconds is not None and len(seconds):
        middle = float(seconds.median())
        slow = float(seconds[seconds > 3 * middle].sum() / seconds.sum())
        per_step = None if examples is None else float(examples.median())
        value, unit = (per_step / middle, "examples/s") if per_step else (1 / middle, "steps/s")
        text = f"{value:,.3g} {unit}, {middle:.3g} s a step; {slow:.0%} of the time went in steps of over 3 times that."
        evidence: dict[str, Any] = {"step_seconds": middle, "slow_share": slow, "logged": len(seconds)}
        quarter = max(len(seconds) // 4, 1)
        evidence["slowdown"] = float(seconds[-quarter:].median() / seconds[:quarter].median())
        found.append(_finding("throughput", value, "playbook: B2", text, unit=unit, evidence=evidence))
    elif throughput is not None and len(throughput):
        value = float(throughput.median())
        text = f"{value:,.3g} examples/s, as the run logged it."
        found.append(_finding("throughput", value, "playbook: B2", text, unit="examples/s"))
    if seconds is not None and data_seconds is not None:
        both = pd.concat([seconds, data_seconds], axis=1, join="inner").to_numpy()
        total, wait = float(both[:, 0].sum()), float(both[:, 1].sum())
        if total > 0:
            share = wait / max(total, wait)
            words = f"{share:.0%} of the time was spent waiting for data"
            text = f"Input-bound: {words}." if share > BOUND / (1 + BOUND) else f"Not input-bound: {words}."
            evidence = {"waiting_share": share, "logged": len(both)}
            found.append(
                _finding("input_bound", share > BOUND / (1 + BOUND), "playbook: F1, B4", text, evidence=evidence)
            )
    return found


def evaluation(losses: pd.Series) -> Finding:
    """``evaluation_interval`` in steps; evidence ``irregular`` and ``period`` (in evaluations, or None), both of
    which point to a fault (playbook: F3).

    Args:
        losses: evaluation losses by step, steps increasing.
    """
    gaps = np.diff(losses.index)
    if len(gaps) < 2:
        text = f"{len(losses)} evaluations are too few to tell an interval."
        return _finding("evaluation_interval", None, "playbook: F3", text, settle="Evaluate more often (F3).")
    middle = float(np.median(gaps))
    # The last one comes when training ends, whenever that is.
    irregular = bool(np.mean(np.abs(gaps[:-1] - middle) > max(1.0, 0.02 * middle)) > 0.2)
    period = _period(losses.to_numpy(float))
    text = f"Evaluated every {middle:,.0f} steps."
    if irregular:
        text = f"Evaluated at irregular steps, {gaps.min():,} to {gaps.max():,} apart: do it at regular steps."
    if period:
        text += (
            f" The loss repeats every {period} evaluations: is training data shuffled, and apart from evaluation data?"
        )
    evidence = {"evaluations": len(losses), "irregular": irregular, "period": period}
    return _finding("evaluation_interval", middle, "playbook: F3", text, unit="steps", evidence=evidence)


def _period(values: np.ndarray) -> int | None:
    """The lag at which a curve's changes repeat themselves; None where they do not."""
    values = values[np.isfinite(values)]
    if len(values) < FEWEST:
        return None
    steps = pd.Series(np.diff(values))
    steps = steps.clip(*steps.quantile([0.03, 0.97])) if steps.std() > 0 else steps
    longest = len(steps) // 4
    r = [1.0, *(steps.autocorr(lag) for lag in range(1, 2 * longest + 1))] if steps.std() > 0 else []
    # What repeats resembles itself after one period and two, and in between does not, as a mere trend does.
    repeats = {lag: min(r[lag], r[2 * lag]) for lag in range(2, longest + 1) if r and min(r[1:lag]) < 0}
    return next((lag for lag in repeats if repeats[lag] > max(PERIODIC, 0.9 * max(repeats.values()))), None)


def schedule(lr: pd.Series) -> Finding:
    """``lr_schedule``: the shape of the learning rate after its warmup, as it was: ``constant``, ``linear``,
    ``cosine``, ``exponential``, ``inverse_sqrt``, ``steps``, ``restarts`` or ``other``.

    Args:
        lr: learning rates by step, steps increasing.

    Returns:
        Evidence: ``warmup_steps``, ``peak_lr``, ``final_lr``, ``held_steps`` (at the peak before it falls).

    Example:
        >>> schedule(pd.Series([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0])).evidence["warmup_steps"]
        4
    """
    lr = lr[np.isfinite(lr) & (lr >= 0)]
    if len(lr) < 5 or not lr.max() > 0:
        text = f"{len(lr)} learning rates are too few to tell a schedule."
        return _finding("lr_schedule", None, "playbook: D5", text, settle="Log the learning rate at every step.")
    rate, step, peak = lr.to_numpy(), lr.index.to_numpy(), float(lr.max())
    top = int(np.argmax(rate >= (1 - SAME / 10) * peak))
    held = top + int(np.argmin(np.r_[rate[top:] >= (1 - SAME / 10) * peak, False])) - 1
    warmup = 0
    if top and np.all(np.diff(rate[: top + 1]) >= 0):
        # A ramp begins where its line is at 0: before the first step logged, by one more interval at the most.
        ramp = float(step[top] - step[0])
        warmup = round(min(ramp / (1 - rate[0] / rate[top]), ramp + step[1] - step[0]))
    shape = _shape(rate[top:], rate[held:], (step[held:] - step[held]).astype(float))
    evidence = {
        "warmup_steps": warmup,
        "peak_lr": peak,
        "final_lr": float(rate[-1]),
        "held_steps": int(step[held] - step[top]),
    }
    start = f"Warmup of {warmup:,} steps to {peak:.3g}" if warmup else f"No warmup; a peak of {peak:.3g}"
    text = f"{start}, then {shape.replace('_', ' ')}, ending at {rate[-1]:.3g}."
    return _finding("lr_schedule", shape, "playbook: D3, D5", text, evidence=evidence)


def _shape(rest: np.ndarray, fall: np.ndarray, t: np.ndarray) -> str:
    """What a rate does from its peak on (``rest``), of which ``fall``, at times ``t``, is where it leaves the peak."""
    size = np.ptp(rest)
    if size <= SAME * rest.max():
        return "constant"
    if np.diff(rest).max() > SAME * rest.max():
        return "restarts"
    if len(np.unique(np.round(rest / rest.max(), 6))) <= max(2, len(rest) // 10):
        return "steps"
    # What is held at the bottom belongs to no fall; what is all but 0 has no logarithm to speak of.
    fall = fall[: int(np.argmax(fall <= fall.min() + SAME / 10 * size)) + 1] / rest.max()
    t, good = t[: len(fall)] / t[len(fall) - 1], fall > 1e-6
    tries = {"linear": _misfit(t, fall)}
    tries["cosine"] = min(_misfit(np.cos(np.pi * t / whole), fall) for whole in np.linspace(1, 3, 41))
    tries["exponential"] = _misfit(t[good], fall[good], np.log, np.exp)
    tries["inverse_sqrt"] = _misfit(t[good], fall[good], lambda y: y**-2.0, lambda y: np.abs(y) ** -0.5)
    best = min(tries, key=lambda name: tries[name])
    return best if tries[best] < SAME * np.ptp(fall) else "other"


def _misfit(x: np.ndarray, y: np.ndarray, there: Any = lambda y: y, back: Any = lambda y: y) -> float:
    """Root mean square distance of ``y`` from the line through it in the space that ``there`` leads to."""
    if len(x) < 5:
        return np.inf
    slope, start = np.polyfit(x, there(y), 1)
    return float(np.sqrt(np.mean((back(start + slope * x) - y) ** 2)))


def _finding(name: str, value: Any, rule: str, summary: str, **rest: Any) -> Finding:
    return Finding(name=name, value=value, rule=rule, summary=summary, **rest)
