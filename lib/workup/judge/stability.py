"""Is a loss curve stable, and where is it not? (playbook: C2, C3, C5, C7)

An event is a rise of the loss above the best level it had reached that lasts for several
logged values and stands clear of the curve's noise (:mod:`workup.judge.events`).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge.events import FEWEST, LASTS, begun, find_events, levelled, noise_of, unlevelled
from workup.judge.given import curve, number

RULE = "playbook: C2, C3, C5, C7"

_WORDS = {
    "stable": "The loss never rises clear of its noise for long.",
    "early": "The loss rises early, at step {begin}, by {much}, and does not come back.",
    "early_recovered": "The loss rises early, at step {begin}, by {much}, and is back by step {end}.",
    "mid": "The loss rises in mid-training, at step {begin}, by {much}, and does not come back.",
    "mid_recovered": "The loss rises in mid-training, at step {begin}, by {much}, and is back by step {end}.",
}
#: A rise is plain to see from so many deviations of the noise on, and large from this share of the descent on.
PLAIN, LARGE = 5, 0.1


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
        standard deviations of the curve's noise, on a log scale above the first loss), ``base`` and
        ``rise`` (the loss before, and by how much its level rose), ``share`` (that rise over the descent, the
        initial loss minus the lowest) and ``recovered``. A first loss below the next five by no more than noise
        explains counts as their median. A rise that comes back gives high confidence only where it is both
        plain beside the noise and a large share;
        ``still`` is the share of the steps, at the end, without progress: converged or stalled, which
        one curve cannot tell and :func:`workup.judge.learning_rate.judge` can.

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
    if not np.isfinite(steps).all() or np.any(steps[1:] <= steps[:-1]):
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

    Each verdict uses the losses up to then only; where they end, one more on all of them.

    Example:
        >>> [f.value for f in watch([1.0] * 20 + [float("nan")], every=7)]
        ['cannot_tell', 'stable', 'diverged']
    """
    seen: list[float] = []
    judged, due = 0, number(every, "stability.watch: every", least=1)
    if not isinstance(losses, Iterable):
        raise ParameterError(f"stability.watch: losses={losses!r:.50} is no row of numbers. Give what yields them.")
    for value in losses:
        seen.append(value)
        if len(seen) >= due:
            yield judge(seen)
            judged = len(seen)
            due = judged + max(float(every), judged // 50)
    if len(seen) > judged:
        yield judge(seen)


def _conclude(x: np.ndarray, steps: np.ndarray, rates: Any, norms: Any, evals: Any) -> Finding:
    good = np.flatnonzero(np.isfinite(x))
    last = int(good[-1]) + 1 if len(good) else 0
    # A loss that is not finite for some steps and then is again (a skipped update) is no divergence.
    x, unit = _scaled(x)
    raw = begun(np.interp(np.arange(last), good, x[good])) if last else np.zeros(1)
    y, bend = levelled(raw)
    local = noise_of(y)
    events = find_events(y, local)
    noise, tail = float(np.median(local)), y[-max(1, min(15, len(y) // 3), len(y) // 10) :]
    # A noise that multiplies the loss by more than e excuses no end above where it began.
    ends_above = _above(tail, (1 if events else 4) * min(local[-1], bend), y)
    value, when = _value(events, last, len(x), last < len(x) or ends_above, _ramp(rates))
    descent = unit * (raw[0] - raw.min())
    listed = [_listed(e, steps, descent, lambda level: unit * unlevelled(level, raw[0], bend)) for e in events]
    evidence: dict[str, Any] = {
        "events": listed,
        "began": when if value != "stable" else None,
        "steps": len(x),
        "nonfinite": len(x) - len(good),
        "noise": float(np.median(noise_of(raw))) * unit,
        "oscillation": _oscillation(y),
        "still": _still(y, noise),
        "worse_than_trend": bool(events) and _worse(y, events[-1], float(np.median(tail)), noise),
    }
    if norms is not None:
        evidence["grad_norm_ratio"] = [_ratio(norms, e) for e in events]
    if evals is not None:
        evidence["eval_shows"] = [_shown(evals, e, len(x)) for e in events]
    caveats = [] if np.all(np.diff(steps) == 1) else ["Not every step was logged: a short rise may be missed."]
    if gaps := last - len(good):
        caveats.append(f"{gaps} losses before the last finite one are not finite; they were bridged.")
    if skipped := last and 0 < len(x) - last < LASTS:
        caveats.append("Only the last of the losses are not finite: a skipped update looks the same.")
    if value.endswith("recovered"):
        sure = max(int(e["size"] >= PLAIN) + int(e["share"] >= LARGE) for e in listed)
    else:
        sure = 2 if last < len(x) or all(e["size"] > 2 for e in events) else 1
    sure = min(sure, 1 if skipped else 2, 2 if len(x) >= 100 else 1 if len(x) >= 50 else 0)
    return Finding(
        name="stability",
        value=value,
        rule=RULE,
        summary=_sentence(value, when, listed, last, steps, len(x)),
        confidence=("low", "medium", "high")[sure],
        evidence=evidence,
        caveats=tuple(caveats),
    )


def _value(events: list[dict[str, Any]], last: int, n: int, lost: bool, ramp: int) -> tuple[str, str]:
    """The verdict, and whether the event it rests on, one that stays before one that passes, began early."""
    lasting = [e for e in events if not e["recovered"]]
    begin = (lasting or events or [{"begin": last}])[0]["begin"]
    when = "early" if begin < max(0.1 * n, ramp) else "mid"
    if lost:
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
    event = next((e for e in listed if not e["recovered"]), listed[0]) if listed else {}
    return _WORDS[value].format(**event, much=_much(event["share"], event["size"]) if event else "")


def _scaled(y: np.ndarray) -> tuple[np.ndarray, float]:
    """The curve in units of a power of two, which changes no digit and keeps sums of huge numbers finite."""
    top = np.abs(y[np.isfinite(y)]).max(initial=0.0)
    unit = 2.0 ** float(min(np.frexp(top)[1] + 8, 1023)) if top > 0 else 1.0
    return y / unit, unit


def _above(tail: np.ndarray, margin: float, y: np.ndarray) -> bool:
    return bool(np.median(tail) > y[0] + margin and np.mean(tail > y[0]) > 0.75)


def _worse(y: np.ndarray, event: dict[str, Any], final: float, noise: float) -> bool:
    """Whether the run ends above where its trend before the event, a line in log steps, would have brought it."""
    t = np.log1p(np.arange(event["begin"] // 2, event["begin"]))
    if len(t) < 8:
        return not event["recovered"]
    slope, start = np.polyfit(t, y[event["begin"] // 2 : event["begin"]], 1)
    return bool(final > start + min(slope, 0.0) * np.log1p(len(y)) + noise)


def _still(y: np.ndarray, noise: float) -> float:
    """Share of the steps since the level first came near the lowest it gets to."""
    y = y[:: max(1, len(y) // 5000)]
    level = pd.Series(y).rolling(max(5, len(y) // 20), min_periods=1).median().to_numpy()
    near = level <= level.min(initial=np.inf) + max(noise, 0.05 * np.ptp(level) if len(y) else 0.0)
    return float(1 - np.argmax(near) / len(y)) if len(y) else 0.0


def _oscillation(y: np.ndarray, longest: int = 32) -> bool:
    """Whether the later half swings to and fro with a period (playbook: C3): its values resist, then repeat."""
    late = pd.Series(y[len(y) // 2 :])
    r = (late - late.rolling(65, center=True, min_periods=1).median()).to_numpy()
    if len(r) < 2 * longest or not np.any(r):
        return False
    r = np.clip(r, *np.quantile(r, [0.02, 0.98]))
    power = np.array([r[: len(r) - k] @ r[k:] for k in range(longest)]) / max(float(r @ r), np.finfo(float).tiny)
    trough = int(np.argmin(power))
    return bool(power[trough] < -0.4 and power[trough:].max() > 0.4)


def _ramp(rates: np.ndarray | None) -> int:
    """Steps of warmup: while the learning rate rises from the start."""
    if rates is None or len(rates) < 2:
        return 0
    flat = np.flatnonzero(rates[1:] <= rates[:-1])
    length = int(flat[0]) if len(flat) else 0
    return length + 1 if length else 0


def _listed(event: dict[str, Any], steps: np.ndarray, descent: float, loss_at: Any) -> dict[str, Any]:
    where = {k: None if event[k] is None else int(steps[event[k]]) for k in ("begin", "peak", "end")}
    base = loss_at(event["base"])
    rise = loss_at(event["base"] + event["rise"]) - base
    return {
        **event,
        **where,
        "base": base,
        "rise": rise,
        "share": float(rise / descent) if descent > 0 else float("inf"),
    }


def _much(share: float, size: float) -> str:
    """How large a rise is, in words."""
    if share >= 100:
        return "far more than it ever fell"
    of = f"{100 * share:.2g}% of its descent" if share < 0.995 else f"{share:.2g} times its descent"
    return of if np.isinf(size) else f"{of} ({size:.2g} times its noise)"


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
