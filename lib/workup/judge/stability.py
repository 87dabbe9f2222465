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
#: An event lifts a running median this many of its standard deviations above the lowest it had been …
CLEAR = 11.07
#: … and by this share of the whole descent; the loss is back when half of what was needed is left.
SHARE = 0.0303
#: It stays up for this many logged values at the least (a median over 5 needs three high ones for that).
LASTS = 3
#: Lengths of the running medians, in logged values; a longer one is used once the run is eight of it long.
WINDOWS = (5, 15, 45, 135, 405, 1215)
RULE = "playbook: C2, C3, C5, C7"

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
    """The verdict so far on a run under way: after each ``every`` losses, or fiftieth of the run where that is more.

    Each verdict uses the losses up to then only.

    Example:
        >>> [f.value for f in watch([1.0] * 20 + [float("nan")], every=7)]
        ['cannot_tell', 'stable', 'diverged']
    """
    seen: list[float] = []
    due = every
    for value in losses:
        seen.append(float(value))
        if len(seen) >= due:
            yield judge(seen)
            due = len(seen) + max(every, len(seen) // 50)


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
    good = np.flatnonzero(np.isfinite(x))
    last = int(good[-1]) + 1 if len(good) else 0
    # A loss that is not finite for some steps and then is again (a skipped update) is no divergence.
    y = np.interp(np.arange(last), good, x[good]) if last else np.empty(0)
    y, unit = _scaled(y)
    events = find_events(y)
    noise = float(np.median(_noise(y))) if last else 0.0
    tail = y[-max(15, len(y) // 10) :]
    value, when = _value(x, y, events, _above(tail, _noise(y)[-1] * (1 if events else 4), y) if last else False, rates)
    listed = [_told(e, steps, unit) for e in events]
    evidence: dict[str, Any] = {
        "events": listed,
        "began": when if value != "stable" else None,
        "steps": len(x),
        "nonfinite": len(x) - len(good),
        "noise": noise * unit,
        "oscillation": _oscillation(y),
        "worse_than_trend": bool(events) and _worse(y, events[-1], float(np.median(tail)), noise),
    }
    if norms is not None:
        evidence["grad_norm_ratio"] = [_ratio(norms, e) for e in events]
    if evals is not None:
        evidence["eval_shows"] = [_shown(evals, e, len(x)) for e in events]
    sure = last < len(x) or all(e["size"] > 2 for e in events)
    return Finding(
        name="stability",
        value=value,
        rule=RULE,
        summary=_sentence(value, when, listed, last, steps, len(x)),
        confidence="high" if sure and len(x) >= 100 else "medium" if len(x) >= 50 else "low",
        evidence=evidence,
        caveats=() if np.all(np.diff(steps) == 1) else ("Not every step was logged: a short rise may be missed.",),
    )


def _value(x: np.ndarray, y: np.ndarray, events: list[dict[str, Any]], above: bool, rates: Any) -> tuple[str, str]:
    """The verdict, and whether the event it rests on, one that stays before one that passes, began early."""
    lasting = [e for e in events if not e["recovered"]]
    begin = (lasting or events or [{"begin": len(y)}])[0]["begin"]
    when = "early" if begin < max(0.1 * len(x), _ramp(rates)) else "mid"
    if len(y) < len(x) or above:
        return "diverged", when
    if not events:
        return "stable", when
    return (when if lasting else f"{when}_recovered"), when


def _sentence(value: str, when: str, listed: list[dict[str, Any]], last: int, steps: np.ndarray, n: int) -> str:
    if value == "diverged" and last == 0:
        return "The loss is not finite from the first step, before any update: look at data and model, not the lr."
    if value == "diverged":
        how = f"is not finite from step {steps[last]:.0f} on" if last < n else "ends above where it began"
        return f"The loss {how}; the trouble began {'early' if when == 'early' else 'in mid-training'}."
    told = next((e for e in listed if not e["recovered"]), listed[0]) if listed else {}
    return _WORDS[value].format(**told)


def _scaled(y: np.ndarray) -> tuple[np.ndarray, float]:
    """The curve in units of a power of two, which changes no digit and keeps sums of huge numbers finite."""
    top = np.abs(y).max(initial=0.0)
    unit = 2.0 ** float(min(np.frexp(top)[1] + 8, 1023)) if top > 0 else 1.0
    return y / unit, unit


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
    """Rises of the running median over ``window`` above the lowest level before it."""
    # The first loss is a single draw: as a level to rise above it gets two deviations of grace.
    y = np.concatenate([y[:1] + 2 * noise[0], y[1:]])
    level, best = _level(y, window), _level(y, 3 if window == WINDOWS[0] else window)
    before = np.concatenate([np.full(window, y[0]), best[:-window]])
    low = np.minimum.accumulate(before)
    where = np.maximum.accumulate(np.where(before <= low, np.arange(len(y)), 0))
    where = np.maximum(where - window, 0)
    white, wander = 1.25 * noise[where] / np.sqrt(window), _wander(level, window)[where]
    spread = np.where(wander > 1.5 * white, wander, white)
    need = np.maximum(CLEAR * spread, SHARE * (y[0] - low))
    over = level - low > need
    found, t = [], 0
    while t < len(y) and over[t:].any():
        first = t + int(np.argmax(over[t:]))
        base, tolerance, size_unit = low[first], need[first] / 2, noise[where[first]]
        back = np.flatnonzero(level[first:] <= base + tolerance)
        stop = first + int(back[0]) if len(back) else len(y)
        t = stop
        if stop - first < LASTS and stop < len(y):
            continue
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


def _above(tail: np.ndarray, margin: float, y: np.ndarray) -> bool:
    return bool(np.median(tail) > y[0] + margin and np.mean(tail > y[0]) > 0.75)


def _worse(y: np.ndarray, event: dict[str, Any], final: float, noise: float) -> bool:
    """Whether the run ends above where its trend before the event, a line in log steps, would have brought it."""
    t = np.log1p(np.arange(event["begin"] // 2, event["begin"]))
    if len(t) < 8:
        return not event["recovered"]
    slope, start = np.polyfit(t, y[event["begin"] // 2 : event["begin"]], 1)
    return bool(final > start + min(slope, 0.0) * np.log1p(len(y)) + noise)


def _level(y: np.ndarray, window: int) -> np.ndarray:
    """Running median of the last ``window`` values, shape [n]; the first value until half of them are there."""
    level = pd.Series(y).rolling(window, min_periods=window // 2 + 1).median().to_numpy(copy=True)
    level[: window // 2] = y[0]
    return level


def _noise(y: np.ndarray, window: int = 64) -> np.ndarray:
    """Local standard deviation of single values about the trend, shape [n], from the past only.

    Second differences see noise and neither slope nor level. For all of the first
    window stands its end, so that an early rise cannot hide itself.
    """
    bends = pd.Series(np.abs(np.diff(y, n=2, prepend=[y[0], y[0]])) if len(y) else [])
    spread = bends.rolling(window, min_periods=1).median().to_numpy(copy=True) * 1.4826 / np.sqrt(6)
    first = min(window, len(y)) - 1
    spread[: first + 1] = spread[first]
    # Logged losses are often rounded: noise below the rounding is not to be believed.
    moves = np.abs(np.diff(y))
    return np.maximum(spread, moves[moves > 0].min(initial=np.inf) / 2) if moves.any() else spread


def _wander(level: np.ndarray, window: int) -> np.ndarray:
    """Spread of the level's own bends over two windows, from the past only, shape [n]; 0 while unknown."""
    bends = pd.Series(level).diff(window).diff(window).abs()
    return bends.rolling(12 * window, min_periods=6 * window).median().fillna(0.0).to_numpy() * 1.4826 / np.sqrt(6)


def _oscillation(y: np.ndarray, longest: int = 32) -> bool:
    """Whether the later half swings to and fro with a period (playbook: C3): its values resist, then repeat."""
    late = pd.Series(y[len(y) // 2 :])
    r = (late - late.rolling(65, center=True, min_periods=1).median()).to_numpy()
    if len(r) < 2 * longest or not np.any(r):
        return False
    r = np.clip(r, *np.quantile(r, [0.02, 0.98]))
    power = np.correlate(r, r, "full")[len(r) - 1 :][:longest] / max(float(np.sum(r * r)), np.finfo(float).tiny)
    trough = int(np.argmin(power))
    return bool(power[trough] < -0.4 and power[trough:].max() > 0.4)


def _ramp(rates: np.ndarray | None) -> int:
    """Steps of warmup: while the learning rate rises from the start."""
    if rates is None or len(rates) < 2:
        return 0
    flat = np.flatnonzero(np.diff(rates) <= 0)
    length = int(flat[0]) if len(flat) else 0
    return length + 1 if length else 0


def _told(event: dict[str, Any], steps: np.ndarray, unit: float) -> dict[str, Any]:
    where = {k: None if event[k] is None else int(steps[event[k]]) for k in ("begin", "peak", "end")}
    return {**event, **where, "rise": event["rise"] * unit}


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
