"""Is a loss curve stable, and where is it not? (playbook: C2, C3, C5, C7)

An event is a rise of the loss above the best level it had reached that lasts for several
logged values and stands clear of the curve's noise. Levels are running medians at several
window lengths, so that a jump of six steps and a drift of a thousand are both seen, and one
outlier batch at none of them. Noise is the local spread of the curve about its own trend, so
multiplying the loss by a positive constant, or shifting it, changes no verdict.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding

#: Fewest finite values that can be judged.
FEWEST = 12
#: An event rises this many standard deviations of the level's own noise …
CLEAR = 6.03
#: … and this share of the whole descent so far; the loss is back when half of the rise is lost again.
SHARE = 0.0503
#: Window lengths of the running medians; longer ones are used once the run is eight windows long.
WINDOWS = (5, 15, 45, 135, 405, 1215)
RULE = "playbook: C2, C3, C5"

_WORDS = {
    "stable": "The loss never rises clear of its noise for long.",
    "early": "The loss rises early, at step {begin}, and does not come back.",
    "early_recovered": "The loss rises early, at step {begin}, and is back by step {end}.",
    "mid": "The loss rises in mid-training, at step {begin}, and does not come back.",
    "mid_recovered": "The loss rises in mid-training, at step {begin}, and is back by step {end}.",
}


def judge(loss: Any, *, grad_norm: Any = None, eval_loss: Any = None, lr: Any = None, step: Any = None) -> Finding:
    """The stability of one run from its loss curve.

    Args:
        loss: training loss of each logged step, shape [n]; inf and NaN as they were seen.
        grad_norm: unclipped gradient norms, shape [n]; tells whether they moved with the events.
        eval_loss: shape [n], NaN where nothing was evaluated; tells whether it shows the events.
        lr: learning rate of each step, shape [n]; a ramp at its start counts as early.
        step: step numbers, shape [n], strictly increasing; 0, 1, 2, … where not given.

    Returns:
        Finding ``stability``: ``stable``, ``early``, ``early_recovered``, ``mid``,
        ``mid_recovered``, ``diverged`` or ``cannot_tell``. ``evidence["events"]`` lists each
        event's ``begin``, ``peak`` and ``end`` (steps; end None while it lasts), ``size`` (in
        standard deviations of the curve's noise), ``rise`` (in the loss's unit) and ``recovered``.

    Raises:
        ParameterError: an argument is not a row of numbers, or its length differs from the loss's.

    Example:
        >>> judge([2.3, 2.2]).value
        'cannot_tell'
    """
    x = curve(loss, "loss")
    steps = np.arange(len(x)) if step is None else curve(step, "step", len(x))
    rates = None if lr is None else curve(lr, "lr", len(x))
    norms = None if grad_norm is None else curve(grad_norm, "grad_norm", len(x))
    evals = None if eval_loss is None else curve(eval_loss, "eval_loss", len(x))
    if np.any(np.diff(steps) <= 0) or not np.isfinite(steps).all():
        raise ParameterError("stability.judge(step=…): steps must be finite and increase. Drop what a resume repeated.")
    finite = np.isfinite(x)
    ends_badly = len(x) > 0 and not finite[-1]
    if finite.sum() < FEWEST and not ends_badly:
        return Finding(
            name="stability",
            value="cannot_tell",
            rule=RULE,
            summary=f"{int(finite.sum())} finite values are too few to tell noise from a rise.",
            confidence="low",
            evidence={"events": [], "steps": len(x), "nonfinite": int((~finite).sum())},
            settle=f"Log the loss at every step, for {FEWEST} steps at the least.",
        )
    return _conclude(x, steps, rates, norms, evals)


def watch(losses: Iterable[float], *, every: int = 10) -> Iterator[Finding]:
    """The verdict so far, after each ``every`` losses of a run under way; each uses what came before only.

    Example:
        >>> [f.value for f in watch([1.0] * 20 + [float("nan")], every=7)]
        ['cannot_tell', 'stable', 'diverged']
    """
    seen: list[float] = []
    for value in losses:
        seen.append(float(value))
        if len(seen) % every == 0:
            yield judge(seen)


def curve(values: Any, name: str, length: int | None = None) -> np.ndarray:
    """``values`` as a float64 array of shape [n].

    Raises:
        ParameterError: not numbers, not one row, or not ``length`` long.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ParameterError(f"{name}: expected a row of numbers, got {type(values).__name__}.") from None
    if array.ndim != 1:
        raise ParameterError(f"{name}: expected a row of numbers, got shape {list(array.shape)}.")
    if length is not None and len(array) != length:
        raise ParameterError(f"{name} has {len(array)} values and loss has {length}: give one for each.")
    return array


def _conclude(x: np.ndarray, steps: np.ndarray, rates: Any, norms: Any, evals: Any) -> Finding:
    finite = np.isfinite(x)
    good = np.flatnonzero(finite)
    last = int(good[-1]) + 1 if len(good) else 0
    y = np.interp(np.arange(last), good, x[good]) if last else np.empty(0)
    events = find_events(y)
    early_until = max(0.1 * len(x), _ramp(rates))
    nonfinite_end = last < len(x)
    start, final = (y[0], float(np.median(y[-15:]))) if last else (np.nan, np.nan)
    above = bool(last and final > start + CLEAR * _noise(y)[-1] / 3 and events and not events[-1]["recovered"])
    begin = events[0]["begin"] if events else last
    when = "early" if begin < early_until or begin == 0 else "mid"
    if nonfinite_end or above:
        value = "diverged"
    elif not events:
        value = "stable"
    else:
        value = when if not all(e["recovered"] for e in events) else f"{when}_recovered"
    listed = [_in_steps(e, steps) for e in events]
    evidence = {
        "events": listed,
        "began": when if value != "stable" else None,
        "steps": len(x),
        "nonfinite": int((~finite).sum()),
        "noise": float(np.median(_noise(y))) if last else None,
        "oscillation": _oscillation(y),
        "worse_than_trend": bool(events and not events[-1]["recovered"]),
    }
    if norms is not None:
        evidence["grad_norm_ratio"] = [_ratio(norms, e) for e in events]
    if evals is not None:
        evidence["eval_shows"] = [_shown(evals, e, len(x)) for e in events]
    if value == "diverged":
        how = f"is not finite from step {steps[last]:.0f} on" if nonfinite_end else "ends above where it began"
        summary = f"The loss {how}; the trouble began {when}."
        if last == 0:
            summary = (
                "The loss is not finite from the first step, before any update: look at data and model, not the lr."
            )
    else:
        summary = _WORDS[value].format(**listed[0]) if listed else _WORDS[value]
    sizes = [e["size"] for e in events]
    sure = nonfinite_end or not sizes or max(sizes) > 2 * CLEAR
    return Finding(
        name="stability",
        value=value,
        rule=RULE,
        summary=summary,
        confidence="high" if sure and len(x) >= 100 else "medium" if len(x) >= 50 else "low",
        evidence=evidence,
        caveats=()
        if np.all(np.diff(steps) == 1)
        else ("Not every step was logged: a short rise may have been missed.",),
    )


def find_events(y: np.ndarray) -> list[dict[str, Any]]:
    """The events of a finite curve of shape [n], by index: begin, peak, end, size, rise, recovered."""
    found: list[dict[str, Any]] = []
    if len(y) < FEWEST:
        return found
    noise = _noise(y)
    for window in WINDOWS:
        if window > WINDOWS[0] and len(y) < 8 * window:
            break
        found += _at_scale(y, noise, window)
    return _merge(found)


def _at_scale(y: np.ndarray, noise: np.ndarray, window: int) -> list[dict[str, Any]]:
    """Rises of the running median over ``window`` above the lowest it had been."""
    level = pd.Series(y).rolling(window, min_periods=window // 2 + 1).median().to_numpy(copy=True)
    level[: window // 2] = y[0]
    before = np.concatenate([np.full(window, y[0]), level[:-window]]) if len(y) > window else np.full(len(y), y[0])
    low = np.minimum.accumulate(before)
    where = np.maximum.accumulate(np.where(before <= low, np.arange(len(y)), 0))
    where = np.maximum(where - window, 0)
    wander = _wander(level, window)
    spread = np.maximum(1.25 * noise[where] / np.sqrt(window), wander)
    descent = np.maximum(y[0] - low, 0)
    need = np.maximum(CLEAR * spread, SHARE * descent)
    rise = level - low
    over = rise > need
    found, t = [], 0
    while t < len(y) and over[t:].any():
        first = t + int(np.argmax(over[t:]))
        base, tolerance, size_unit = low[first], need[first] / 2, noise[where[first]]
        back = np.flatnonzero(level[first:] <= base + tolerance)
        stop = first + int(back[0]) if len(back) else len(y)
        under = np.flatnonzero(y[: first + 1] <= base + tolerance)
        begin = int(under[-1]) + 1 if len(under) else 0
        peak = begin + int(np.argmax(level[begin:stop])) if stop > begin else first
        height = float(level[peak] - base)
        found.append(
            {
                "begin": min(begin, first),
                "peak": peak,
                "end": stop if stop < len(y) else None,
                "size": height / size_unit if size_unit > 0 else float("inf"),
                "rise": height,
                "recovered": stop < len(y),
            }
        )
        t = stop
    return found


def _merge(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One event where several window lengths saw the same one."""
    merged: list[dict[str, Any]] = []
    for event in sorted(found, key=lambda e: e["begin"]):
        last = merged[-1] if merged else None
        if last is None or (last["end"] is not None and event["begin"] >= last["end"]):
            merged.append(dict(event))
            continue
        if event["rise"] > last["rise"]:
            last.update(peak=event["peak"], size=event["size"], rise=event["rise"])
        if last["end"] is not None and (event["end"] is None or event["end"] > last["end"]):
            last.update(end=event["end"], recovered=event["recovered"])
    return merged


def _noise(y: np.ndarray, window: int = 65) -> np.ndarray:
    """Local standard deviation of single values about the trend, shape [n], from the past only."""
    if len(y) < 2:
        return np.zeros(len(y))
    steps = pd.Series(np.abs(np.diff(y, prepend=y[0]))[1:])
    spread = steps.rolling(window, min_periods=1).median().to_numpy() * 1.4826 / np.sqrt(2)
    spread = np.concatenate([spread[:1], spread])
    settled = min(len(spread) - 1, 16)
    spread[:settled] = spread[settled]
    return spread


def _wander(level: np.ndarray, window: int) -> np.ndarray:
    """Spread of the level's own changes over one window, from the past only, shape [n]."""
    change = pd.Series(level).diff(window)
    middle = change.expanding(min_periods=4 * window).median()
    spread = (change - middle).abs().expanding(min_periods=4 * window).median() * 1.4826 / np.sqrt(2)
    return spread.fillna(0.0).to_numpy()


def _oscillation(y: np.ndarray) -> bool:
    """Whether successive values alternate more than noise does: training at the edge of stability (playbook: C3)."""
    d = np.diff(y[len(y) // 2 :])
    if len(d) < 16 or not np.any(d):
        return False
    d = np.clip(d, *np.quantile(d, [0.02, 0.98]))
    d = d - d.mean()
    # Independent noise gives -0.5; a strict alternation -1.
    return bool(np.sum(d[1:] * d[:-1]) / max(np.sum(d * d), np.finfo(float).tiny) < -0.75)


def _ramp(rates: np.ndarray | None) -> int:
    """Steps of warmup: while the learning rate rises from the start."""
    if rates is None or len(rates) < 2:
        return 0
    flat = np.flatnonzero(np.diff(rates) <= 0)
    length = int(flat[0]) if len(flat) else 0
    return length + 1 if length else 0


def _in_steps(event: dict[str, Any], steps: np.ndarray) -> dict[str, Any]:
    where = {k: None if event[k] is None else int(steps[event[k]]) for k in ("begin", "peak", "end")}
    return {**event, **where}


def _ratio(norms: np.ndarray, event: dict[str, Any]) -> float:
    """Highest gradient norm of an event over the median before it."""
    before = norms[: max(event["begin"], 1)]
    during = norms[event["begin"] : event["end"]]
    before, during = before[np.isfinite(before)], during[np.isfinite(during)]
    return float(during.max() / np.median(before)) if len(before) and len(during) and np.median(before) > 0 else np.nan


def _shown(evals: np.ndarray, event: dict[str, Any], length: int) -> bool:
    """Whether the evaluations taken show a rise within the event (playbook: C5)."""
    seen = np.flatnonzero(np.isfinite(evals))
    inside = [i for i in seen if event["begin"] <= i < (event["end"] or length)]
    before = [evals[i] for i in seen if i < event["begin"]]
    return bool(inside and before and max(evals[i] for i in inside) > min(before))
