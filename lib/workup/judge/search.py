"""A learning-rate search that spends little: which rates, and which with other seeds, to try next (playbook: C1, C6).

A range test says where to begin; coarse rates bracket the best; finer ones close in on it and on where training
breaks; a second seed goes to the best and its closest rival. What that spends: tests/benchmarks/spending.py.
"""

from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.judge.given import curve
from workup.judge.learning_rate import summary
from workup.judge.sweep import start_of, trials_table

#: The lowest rate brackets the best once it lacks this share of the best's loss reduction; nearer, the curve of final
#: losses may have a second bottom below it, as one of the real sweeps has. So does the highest, ``AWAY`` from the best.
LAG, AWAY = 0.2, 10.0
#: Between neighbours within three steps a finer rate is worth a trial where a parabola promises at least this share
#: of the loss reduction; a wider parabola promises too little to be believed.
GAIN, NARROW = 0.001, 3
#: A rate held for a whole trial does best about so far below the one at which a range test's loss is lowest.
BELOW = 10**-0.75


def centre(rates: Any, losses: Any) -> tuple[float, float] | None:
    """(where to begin, where training breaks) by a range test: one run whose rate rises from step to step.

    Args:
        rates, losses: of its steps, shape [steps] each; the losses may end non-finite.

    Returns:
        A rate ``BELOW`` the one of the lowest loss, smoothed; and the first after it at which the loss is back where
        it began, else the highest. None where the loss never falls.

    Raises:
        ParameterError: shapes that differ.

    Example:
        >>> rates = np.logspace(-5, 1, 100)
        >>> begin, breaks = centre(rates, 1 - np.exp(-np.log10(rates / 0.1) ** 2) + (rates > 1))
        >>> round(begin, 2), round(breaks, 1)
        (0.05, 2.2)
    """
    lr, loss = curve(rates, "search.centre: rates"), curve(losses, "search.centre: losses")
    if lr.shape != loss.shape:
        raise ParameterError(f"search.centre: {len(lr)} rates and {len(loss)} losses; each step has one of both.")
    finite = np.isfinite(loss)
    end = len(loss) if finite.all() else int(np.argmin(finite))
    tenth = max(1, len(loss) // 10)
    if end <= tenth:
        return None
    smooth = pd.Series(loss[:end]).ewm(alpha=0.1).mean().to_numpy()
    lowest, start = int(np.argmin(smooth)), loss[:tenth].mean()
    if lowest < tenth:
        return None
    back = np.flatnonzero(smooth[lowest:] > start)
    top = lowest + back[0] if len(back) else min(end, len(lr) - 1)
    return float(lr[lowest] * BELOW), float(lr[top])


def wider(trials: Any, factor: float) -> list[float]:
    """Rates to add at the ends until a clearly worse one is below the best, and an infeasible one above.

    Above, a clearly worse one far from the best will do: instability is then not what holds the rate down.

    Args:
        trials: as for :func:`workup.judge.learning_rate.judge`.
        factor: between coarse rates.

    Example:
        >>> rows = [dict(lr=lr, final=f, initial=2.0) for lr, f in [(0.01, 1.5), (0.1, 0.2), (1.0, float("nan"))]]
        >>> wider(rows, 10.0), wider(rows[1:], 10.0)
        ([], [0.01])
    """
    seen = summary(trials)
    rates = seen.lr.tolist()
    if not seen.feasible.iloc[0]:  # a rate that trains above one that fails may be luck
        return [rates[0] / factor, rates[0] / factor**2]
    best, lag = int(np.flatnonzero(seen.best_here)[0]), _lag(seen, trials)
    below = [rates[0] / (factor if best == 0 else factor**2)] if best == 0 or lag[0] < LAG else []
    beyond = rates[-1] >= AWAY * rates[best] and lag[-1] > LAG
    return below + ([rates[-1] * factor] if seen.feasible.iloc[-1] and not beyond else [])


def finer(trials: Any, factor: float) -> list[float]:
    """Rates to add beside the best, on the side where a parabola through it has its bottom, and where training breaks.

    Asked again after each round it climbs to a best with a neighbour ``factor`` away on that side, and closes in on
    the lowest rate that fails; it then gives none.

    Example:
        >>> rows = [dict(lr=lr, final=f) for lr, f in [(0.01, 0.8), (0.1, 0.2), (1.0, float("nan"))]]
        >>> finer(rows, 10**0.5)
        [0.316228]
    """
    seen = summary(trials)
    if not seen.feasible.any():
        return []
    lr, at = np.log(seen.lr.to_numpy()) / np.log(factor), int(np.flatnonzero(seen.best_here)[0])
    wanted = [lr[at] + step for step in _beside(lr, _lag(seen, trials), at)]
    above = np.flatnonzero(~seen.feasible & (seen.index > at))
    if len(above):
        top, fails = lr[above[0] - 1], lr[above[0]]
        if round(fails - top) > max(1, round(top - lr[at]) // 2):  # the farther above the best, the less it matters
            wanted.append(top + round(fails - top) // 2)
    new = [k for k in wanted if np.abs(lr - k).min() > 0.4]
    return list(dict.fromkeys(float(f"{factor**k:.6g}") for k in sorted(new)))


def _lag(seen: pd.DataFrame, trials: Any) -> np.ndarray:
    """By rate, the share of the best's loss reduction that is missing; NaN where training fails."""
    final, start = seen.final.to_numpy(), start_of(trials_table(trials, "search"))
    lowest = float(seen.final[seen.best_here].iloc[0])
    return (final - lowest) / max(start - lowest, np.finfo(float).tiny)


def _beside(lr: np.ndarray, lag: np.ndarray, at: int) -> list[int]:
    """Steps from the best to where its bottom may lie; ``lr`` counts steps, ``lag`` is NaN where training fails."""
    gaps = [round(lr[at] - lr[at - 1]) if at else 0, round(lr[at + 1] - lr[at]) if at + 1 < len(lr) else 0]
    side, far = (1 if gaps[1] > 1 else -1), 0.0
    if all(gaps) and np.isfinite(lag[at + 1]) and np.isfinite(lag[at - 1]):
        bend, slope, _ = np.polyfit([-gaps[0], 0, gaps[1]], lag[at - 1 : at + 2], 2)
        if max(gaps) <= NARROW and bend > 0 and slope**2 / (4 * bend) < GAIN:
            return []
        far = abs(slope / (2 * bend)) if bend > 0 else 0.0
        side = 1 if slope < 0 else -1
    room, other = (gaps[1], gaps[0]) if side > 0 else (gaps[0], gaps[1])
    if room > 1:
        return [side * int(np.clip(round(far) if far else room // 2, 1, room - 1))]
    return [-side] if other > 2 else []


def contenders(trials: Any) -> list[float]:
    """The rates worth another seed: the best, and the better of its neighbours where that is as good within noise."""
    seen: pd.DataFrame = summary(trials)
    at = np.flatnonzero(seen.best_here)
    near = seen.iloc[max(0, at[0] - 1) : at[0] + 2] if len(at) else seen.iloc[:0]
    return sorted(near[near.as_good].sort_values("final").lr.head(2))
