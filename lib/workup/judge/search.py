"""A learning-rate search that spends little: which rates, and which with other seeds, to try next (playbook: C1, C6).

Coarse rates bracket the best; finer ones close in on it and on where training breaks; other seeds go to
the rates that could be the best. Against every rate of the finer grid: tests/benchmarks/spending.py.
"""

from typing import Any

import numpy as np
import pandas as pd

from workup.judge.learning_rate import summary
from workup.judge.sweep import start_of, trials_table

#: The lowest rate brackets the best once it lacks this share of the best's loss reduction; nearer, the curve
#: of final losses may have a second bottom below it, as one of the real sweeps has.
LAG = 0.3


def wider(trials: Any, factor: float) -> list[float]:
    """Rates to add at the ends until a clearly worse one is below the best, and an infeasible one above.

    Args:
        trials: as for :func:`workup.judge.learning_rate.judge`.
        factor: between coarse rates.

    Example:
        >>> rows = [dict(lr=lr, final=f, initial=2.0) for lr, f in [(0.01, 1.5), (0.1, 0.2), (1.0, float("nan"))]]
        >>> wider(rows, 10.0), wider(rows[1:], 10.0)
        ([], [0.01, 0.001])
    """
    seen, start = summary(trials), start_of(trials_table(trials, "search.wider"))
    rates, final = seen.lr.tolist(), seen.final.to_numpy()
    if not seen.feasible.iloc[0] or seen.best_here.iloc[0]:  # a rate that trains above one that fails may be luck
        return [rates[0] / factor, rates[0] / factor**2]
    if seen.feasible.iloc[-1]:
        return [rates[-1] * factor]
    low = np.nanmin(final)
    return [rates[0] / factor] if final[0] - low < LAG * (start - low) else []


def finer(trials: Any, factor: float) -> list[float]:
    """Rates to add ``factor`` beside the best, and above the highest that trains; none where they are there already.

    Asked again after each round it climbs to a best that has neighbours, and closes in on where training breaks.

    Example:
        >>> rows = [dict(lr=lr, final=f) for lr, f in [(0.01, 0.8), (0.1, 0.2), (1.0, float("nan"))]]
        >>> finer(rows, 10**0.5)
        [0.0316228, 0.316228]
    """
    seen = summary(trials)
    if not seen.feasible.any():
        return []
    best, edge = float(seen.lr[seen.best_here].iloc[0]), float(seen.lr[seen.feasible].max())
    wanted = [best / factor, best * factor] + ([edge * factor] if seen.lr.iloc[-1] > edge else [])
    known = np.log(seen.lr.to_numpy())
    new = [lr for lr in wanted if np.abs(known - np.log(lr)).min() > 0.4 * np.log(factor)]
    return list(dict.fromkeys(float(f"{lr:.6g}") for lr in new))


def contenders(trials: Any) -> list[float]:
    """The rates worth other seeds: the best, and its neighbours where they train."""
    seen: pd.DataFrame = summary(trials)
    at = np.flatnonzero(seen.best_here)
    near = seen.iloc[max(0, at[0] - 1) : at[0] + 2] if len(at) else seen.iloc[:0]
    return near.lr[near.feasible].tolist()
