"""Which learning rate for the whole run, judged from shorter trials? (playbook: A4, C1)

Three things decide: the middle of the rates that end as good as the best, how much longer the run
is, and a margin below the rates that break. The trials hold their rate constant. A run that does so
too wants less of it the longer it is; for one whose rate decays, the trials' best is the best peak.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge.given import number
from workup.judge.sweep import NEAR, PLAIN, Sweep, start_of, sweep_of, trials_table

#: Over r times the steps the best constant rate is r ** -DECLINE as high: the half of the theory of
#: stochastic gradients. Not at all (0) and in proportion (1, the same lr * steps) are the ends of what
#: is plausible; the interval holds the inner 80% between them.
DECLINE, SPREAD = 0.5, 0.4
#: A schedule that decays ends at low rates however long it is: its best peak need not fall.
DECAYING = 0.0
#: Rates that end within this share of the loss reduction of the best are as good.
WITHIN = 0.02
#: Of rates as good over more than this factor the upper ones count: where all sit on one plateau they
#: leave it first, and where all have converged it matters little.
WIDE = 10.0
#: What a trend is read from: the best rates after these shares of the trials.
SHARES = (0.1, 0.3, 1.0)
#: A longer run than this many times the trials is beyond what was tried, and so is a trend below RISES.
FAR, RISES = 20.0, -0.25


class Basin(NamedTuple):
    """Rates as good as the leader after some steps (between the tried ones, by interpolation), and where it breaks."""

    low: float
    high: float
    leader: float
    breaks: float

    @property
    def middle(self) -> float:
        return math.sqrt(max(self.low, self.high / WIDE) * self.high)


def carry(trials: Any, max_train_steps: int, *, steps: int | None = None, decaying: bool = False) -> Finding:
    """The rate to expect best over ``max_train_steps``, from shorter trials at constant rates.

    With r the ratio of steps: the middle of the rates as good as the leader, at least r ** 0.5 or
    ``NEAR`` times below the lowest one above it that breaks or whose loss turns up; times r ** -0.5,
    where the run's rate is constant too.

    Args:
        trials: as for :func:`workup.judge.learning_rate.judge`, each with its ``loss`` curve, shape [n], n alike.
        max_train_steps: of the real run.
        steps: that the curves span, where they do not hold one value a step.
        decaying: whether the run's schedule falls to less than half of its peak: the peak is judged.

    Returns:
        Finding ``peak_lr`` with an interval. None where the trials are too short, or where their best
        rate falls faster than in proportion to the steps: they have not settled.

    Raises:
        ParameterError: a run shorter than the trials.
    """
    table = trials_table(trials, "learning_rate.carry")
    curves = [c for c in table["loss"] if c is not None and len(c)]
    if len(curves) < max(1, len(table)):
        return _inconclusive("There are no loss curves to see a trend in.", "Give each trial's curve as `loss`.", {})
    n = max(map(len, curves))
    span = n if steps is None else int(number(steps, "learning_rate.carry: steps", least=1))
    max_train_steps = int(number(max_train_steps, "learning_rate.carry: max_train_steps"))
    if max_train_steps < span:
        raise ParameterError(
            f"learning_rate.carry(max_train_steps={max_train_steps}): shorter than the trials, {span}."
        )
    seen = {round(span * share): _basin(table, round(n * share)) for share in SHARES if n >= 40}
    facts = {"horizons": list(seen), "rates": [b.middle if b else None for b in seen.values()]}
    facts["decline"] = DECAYING if decaying else DECLINE
    known = [(at, b) for at, b in seen.items() if b]
    if not known or (basin := seen[span]) is None:
        return _inconclusive(
            "The trials are too short or too few train.", "Train longer, at more and lower rates.", facts
        )
    trend = math.nan
    if len(known) > 1:
        trend = -float(np.polyfit(np.log([at for at, _ in known]), np.log([b.middle for _, b in known]), 1)[0])
    if trend > 1:
        return _inconclusive("The best rate still falls faster than the steps grow.", "Train longer.", facts)
    return _carried(basin, span, max_train_steps, trend, facts)


def _carried(basin: Basin, span: int, of: int, trend: float, facts: dict[str, Any]) -> Finding:
    ratio, decline = of / span, facts["decline"]
    from_rate = min(basin.middle, basin.breaks / min(NEAR, ratio**DECLINE)) if ratio > 1 else basin.leader
    rate, high = from_rate * ratio**-decline, basin.high * ratio ** (SPREAD - decline)
    low = min(max(basin.low, basin.high / WIDE) * ratio ** (-SPREAD - decline), rate)
    doubts = _doubts(basin, span, ratio, trend)
    caveats = [
        "A rule of thumb: the best constant rate falls about as the square root of the steps."
        if decline
        else "A rule of thumb: the best peak of a decaying schedule is about the best constant rate of short runs."
    ]
    if ratio > 1 and from_rate < basin.middle:
        caveats.append(f"Kept below {basin.breaks:.3g}, where training breaks or turns up: later on it does at less.")
    return Finding(
        name="peak_lr",
        value=float(f"{rate:.6g}"),
        rule="playbook: A4, C1",
        summary=f"Over {of:,} steps {'lr' if decline else 'a peak lr of'} {rate:.3g} should train best "
        f"({low:.2g} to {max(high, rate):.2g}); after {span:,} steps, {basin.leader:.3g} leads.",
        interval=(low, max(high, rate)),
        confidence="low" if doubts else "medium",
        evidence=facts | {"leader": basin.leader, "steps": of, "from": from_rate, "trend": trend, **basin._asdict()},
        caveats=(*caveats, *doubts),
    )


def _doubts(basin: Basin, span: int, ratio: float, trend: float) -> list[str]:
    said = {
        f"From {basin.low:.3g} to {basin.high:.3g} all are as good after {span:,} steps: a higher one is taken.": (
            basin.high > WIDE * basin.low
        ),
        f"The run is {ratio:.0f} times as long as the trials.": ratio > FAR,
        "So far the best rate has risen with the steps.": trend < RISES,
        "No rate trained early in the trials: they show no trend.": math.isnan(trend),
    }
    return [text for text, holds in said.items() if holds]


def _basin(table: pd.DataFrame, n: int) -> Basin | None:
    """After the first ``n`` values of the curves; None where fewer than three rates train."""
    upto, tenth = [c[:n] for c in table["loss"]], max(1, n // 10)
    ends = [np.sum(c[-tenth:] / tenth) if len(c) == n else np.nan for c in upto]
    table = table.assign(final=ends, best=np.nan, loss=pd.Series(upto, table.index), trained=np.isfinite(ends))
    sweep = sweep_of(table)
    if len(sweep.good) < 3 or not (descent := start_of(table) - sweep.rates["final"][sweep.best]) > 0:
        return None
    lr, k = np.log(sweep.rates["lr"].to_numpy()), sweep.best
    gap = ((sweep.rates["final"] - sweep.rates["final"][k]) / descent).to_numpy()
    low, high = (_reach(side, gap[i]) for side, i in ((lr[k::-1], np.s_[k::-1]), (lr[k:], np.s_[k:])))
    return Basin(math.exp(low), math.exp(high), math.exp(lr[k]), _breaks(table, sweep, descent))


def _reach(lr: np.ndarray, gap: np.ndarray) -> float:
    """How far from the first rate on the gap stays within ``WITHIN``, linear between rates; shapes [n]."""
    beyond = np.flatnonzero(~(gap <= WITHIN))
    if not len(beyond):
        return float(lr[-1])
    i = int(max(beyond[0], 1))
    part = (WITHIN - gap[i - 1]) / (gap[i] - gap[i - 1]) if np.isfinite(gap[i]) else 0.0
    return float(lr[i - 1] + part * (lr[i] - lr[i - 1]))


def _breaks(table: pd.DataFrame, sweep: Sweep, descent: float) -> float:
    """The lowest rate above the leader that does not train, or whose loss turns up in the second half; inf for none."""
    above = table[(table["lr"] > sweep.rates["lr"][sweep.best]) & table["trained"]]
    turned = [lr for lr, c in zip(above["lr"], above["loss"], strict=True) if turns_up(c, WITHIN * descent)]
    return float(min([*turned, sweep.unstable[1] or math.inf]))


def turns_up(loss: np.ndarray, least: float) -> bool:
    """Whether the last tenth lies more than ``least``, and clear of noise, above a tenth of the second half."""
    if len(loss) < 20 or not np.isfinite(loss).all():
        return False
    tenth = len(loss) // 10
    levels = loss[-5 * tenth :].reshape(5, tenth).mean(axis=1)
    noise = np.std(np.diff(loss[-5 * tenth :])) / math.sqrt(tenth)  # of a difference of two levels
    return bool(levels[-1] - levels.min() > max(least, PLAIN * noise))


def _inconclusive(text: str, settle: str, facts: dict[str, Any]) -> Finding:
    return Finding(
        name="peak_lr",
        value=None,
        rule="playbook: A4, C1",
        summary=text,
        settle=settle,
        confidence="low",
        evidence=facts,
    )
