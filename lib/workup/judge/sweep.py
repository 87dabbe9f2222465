"""A learning-rate sweep as a table of rates: which train, how well, and how sure that is (playbook: C1, C6).

A trial is infeasible if it did not end finite, gave back half of what it had gained, or, at a
rate above the best, ends with less than half of the best loss reduction or stalls on a plateau
that the best leaves behind. All of it is relative to the sweep's own range of losses: scaling the
loss or shifting it changes no verdict.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.judge.given import curve, frame

#: A trial that keeps less than this share of the loss reduction is infeasible.
KEPT = 0.5
#: Rates whose mean loss is within this many standard errors of the best's are as good.
AS_GOOD = 2.0
#: The next rate up being infeasible puts lr* at the edge only if it is this near; farther, bracket first.
NEAR = 4.0
#: A plateau this share of the loss reduction above the best, and this many standard errors, is a stall.
STALLED, PLAIN = 0.1, 4.0
HUGE = 1e306
#: How a trial may have ended; those that ended otherwise than by themselves say nothing about their rate.
STATUSES = ("finished", "diverged", "out_of_memory", "interrupted", "failed")
#: A finished trial of fewer losses than this tells nothing of its rate.
SHORT = 8


@dataclass(frozen=True)
class Sweep:
    """A row a rate, sorted: ``lr, feasible, final`` (mean), ``error`` (of the mean), ``seeds``; what it rests on."""

    rates: pd.DataFrame
    steps: int | None = None
    noise_from: str = "none"
    stalled: tuple[float, ...] = ()

    @cached_property
    def good(self) -> pd.DataFrame:
        return self.rates[self.rates["feasible"]]

    @property
    def bad(self) -> pd.Series:
        return self.rates.loc[~self.rates["feasible"], "lr"]

    @cached_property
    def best(self) -> int:
        """Row of the best feasible rate; of one below the lowest infeasible where that costs next to nothing."""
        final = self.rates["final"].to_numpy(float)
        below = np.where(self.rates["lr"] < self.bad.min(), final, np.nan) if len(self.bad) else final
        close = np.nanmin(final) + 0.05 * np.ptp(self.good["final"])
        return int(np.nanargmin(below if np.nanmin(below, initial=np.inf) <= close else final))

    @property
    def unstable(self) -> tuple[float | None, float | None]:
        """(highest feasible rate below it, lowest infeasible rate above lr*); None where there is none."""
        above = self.bad[self.bad > (self.rates["lr"][self.best] if len(self.good) else 0.0)]
        under = self.good["lr"][self.good["lr"] < above.min()] if len(above) else self.good["lr"]
        return (float(under.max()) if len(under) else None), (float(above.min()) if len(above) else None)

    @property
    def end(self) -> str | None:
        """The end of the grid that the best sits at."""
        return "high" if self.best == len(self.rates) - 1 else "low" if self.best == 0 else None

    @property
    def boundless(self) -> bool:
        """Whether up to the best each rate lowers the loss in proportion: trials too short, or a loss without floor."""
        upto = self.good[self.good["lr"] <= self.rates["lr"][self.best]].tail(4)
        falls = -np.diff(upto["final"])
        rise = (upto["lr"].to_numpy()[2:] / upto["lr"].to_numpy()[1:-1]) if len(upto) == 4 else np.empty(0)
        return bool(len(rise) and np.all(falls > 0) and np.all(falls[1:] >= KEPT * rise * falls[:-1]))

    @property
    def level(self) -> bool:
        """Whether several rates train, all to the same loss."""
        return len(self.good) > 1 and np.ptp(self.good["final"]) == 0

    @property
    def edge(self) -> bool | None:
        if not len(self.good) or self.level or self.end == "high":
            return None
        if self.rates["feasible"][self.best + 1]:
            return False
        return True if self.rates["lr"][self.best + 1] / NEAR <= self.rates["lr"][self.best] else None

    @cached_property
    def region(self) -> list[float]:
        """The rates around the best, without a gap, that are statistically as good."""
        gap = self.rates["final"] - self.rates["final"][self.best]
        error = np.hypot(self.rates["error"], self.rates["error"][self.best])
        as_good = (self.rates["feasible"] & (gap <= AS_GOOD * error)).to_numpy()
        worse = np.flatnonzero(~as_good)
        first = worse[worse < self.best].max(initial=-1) + 1
        last = worse[worse > self.best].min(initial=len(as_good))
        return self.rates["lr"][first:last].tolist()

    @property
    def interval(self) -> tuple[float, float]:
        """The region, out to halfway (in the logarithm) to the next rate on each side."""
        lrs, region = self.rates["lr"].to_numpy(), self.region
        below, above = lrs[lrs < region[0]], lrs[lrs > region[-1]]
        low = math.sqrt(region[0] * below[-1]) if len(below) else region[0]
        return float(low), float(math.sqrt(region[-1] * above[0]) if len(above) else region[-1])

    @property
    def extension(self) -> tuple[float, ...]:
        if self.rates.empty or (len(self.good) and self.end is None):
            return ()
        lrs = self.rates["lr"].to_numpy()
        ratio = np.median(np.diff(np.log(lrs))) if len(lrs) > 1 else np.log(10.0)
        up = len(self.good) and self.end == "high"
        powers = np.log(lrs[-1] if up else lrs[0]) + (ratio if up else -ratio) * np.array([1, 2])
        return tuple(float(f"{lr:.6g}") for lr in np.exp(np.clip(powers, -700, 700)))


def read(trials: Any, call: str) -> Sweep:
    return sweep_of(trials_table(trials, call))


def trials_table(trials: Any, call: str, *, extra: tuple[str, ...] = ()) -> pd.DataFrame:
    """``trials`` checked and sorted by lr, with ``seed, status, best, initial, loss`` filled in and ``trained``.

    ``trained``: finished and finite. Trials that ran out of memory, failed, were interrupted or finished within a
    few steps say nothing about a learning rate and are left out; of equal rows one is kept.
    """
    table = frame(trials, call)
    if table.empty:
        return pd.DataFrame(columns=["lr", "seed", "status", "final", "best", "initial", "loss", "trained", *extra])
    missing = [c for c in ("lr", "final", *extra) if c not in table]
    if missing:
        raise ParameterError(
            f"{call}: the table has no column {', '.join(missing)}. It has {', '.join(map(str, table))}."
        )
    for name, default in (("seed", 0), ("status", "finished")):
        table[name] = table[name].astype(object).where(table[name].notna(), default) if name in table else default
    if unknown := sorted({str(s) for s in table["status"]} - {*STATUSES}):
        raise ParameterError(f"{call}: status={unknown[0]!r} is none of {', '.join(STATUSES)}.")
    cells = table["loss"] if "loss" in table else [None] * len(table)
    curves = [_losses(c, f"{call}: loss of row {i}") for i, c in enumerate(cells)]
    table["loss"] = pd.Series(curves, dtype=object)
    for name in ("lr", "final", "best", "initial", *extra):
        column = curve(table[name], f"{call}: {name}") if name in table else np.full(len(table), np.nan)
        table[name] = column if name == "lr" else _bounded(column)
    odd = table[~(np.isfinite(table["lr"]) & (table["lr"] > 0))]
    if len(odd):
        raise ParameterError(f"{call}: lr={odd['lr'].iloc[0]} in row {odd.index[0]}: rates are positive and finite.")
    for name, take in (("initial", lambda c: c[0]), ("best", _lowest)):
        seen = [take(c) if c is not None and len(c) else np.nan for c in table["loss"]]
        table[name] = table[name].fillna(pd.Series(seen, index=table.index))
    table = table[table["status"].isin(["finished", "diverged"])]
    table["trained"] = (table["status"] == "finished") & np.isfinite(table["final"])
    short = np.array([c is not None and len(c) < SHORT for c in table["loss"]], bool)
    table = table[~(short & table["trained"])].drop_duplicates(["lr", "seed", "status", "final", *extra])
    return table.sort_values(["lr", "seed"], key=lambda c: c if c.name == "lr" else c.astype(str), ignore_index=True)


def _losses(cell: Any, name: str) -> np.ndarray | None:
    """A trial's curve, shape [n]; None where the table gives none, or a single number."""
    none = cell is None or cell is pd.NA or (np.isscalar(cell) and not isinstance(cell, str))
    return None if none else _bounded(curve(cell, name))


def _bounded(losses: np.ndarray) -> np.ndarray:
    """``losses`` with what is too large to take differences of as infinite."""
    return np.where(np.abs(losses) > HUGE, np.copysign(np.inf, losses), losses)


def _lowest(loss: np.ndarray) -> float:
    """Lowest mean over a tenth of the curve."""
    return float(pd.Series(loss).rolling(max(1, len(loss) // 10)).mean().min())


@np.errstate(over="ignore", invalid="ignore")  # infinite losses have no difference
def sweep_of(table: pd.DataFrame) -> Sweep:
    if table.empty:
        return Sweep(
            pd.DataFrame({c: [] for c in ("lr", "feasible", "final", "error", "seeds")}).astype({"feasible": bool})
        )
    table = table.assign(feasible=_feasible(table))
    stalled = _stalled(table)
    table["feasible"] &= ~stalled
    rates = table.groupby("lr").agg(feasible=("feasible", "all"), final=("final", "mean"), seeds=("seed", "size"))
    rates = rates.reset_index()
    rates.loc[~rates["feasible"], "final"] = np.nan
    spread, source = _noise(table, rates)
    rates["error"] = spread / np.sqrt(rates["seeds"])
    lengths = [len(c) for c in table["loss"] if c is not None]
    return Sweep(rates, max(lengths, default=None), source, tuple(table["lr"][stalled].unique().tolist()))


def _feasible(table: pd.DataFrame) -> np.ndarray:
    ok = table["trained"].to_numpy(bool)
    if not ok.any():
        return ok
    lr, final, best = (table[c].to_numpy(float) for c in ("lr", "final", "best"))
    start, low = start_of(table), final[ok].min()
    high = (lr > lr[ok][np.argmin(final[ok])]) & (final > start - KEPT * (start - low)) & (start > low)
    lost = final - best > (1 - KEPT) * max(start - low, 0.0)
    return ok & ~high & ~(lost & (start > low))


def _stalled(table: pd.DataFrame) -> np.ndarray:
    """Which feasible trials above lr* got nowhere over their last three quarters while the best fell away from them."""
    found, ok = np.zeros(len(table), bool), table["feasible"].to_numpy(bool)
    if not ok.any():
        return found
    leader = table.iloc[int(np.flatnonzero(ok)[table["final"][ok].argmin()])]
    descent = start_of(table) - leader["final"]
    for i in np.flatnonzero(ok & (table["lr"] > leader["lr"])):
        found[i] = stuck(table["loss"][i], leader["loss"], descent)
    return found


def stuck(loss: Any, best: Any, descent: float, fall: float = KEPT) -> bool:
    """Whether a curve got nowhere over its last three quarters while ``best`` fell away from it; shapes [n], n alike.

    Args:
        descent: from the loss before training to the best one's end; the gap is a share of it.
        fall: share of the gap that ``best`` must have come down since its second quarter.
    """
    if np.ndim(loss) != 1 or np.ndim(best) != 1 or len(loss) != len(best) or len(loss) < 4 * SHORT:
        return False
    own, other = np.asarray(loss, float), np.asarray(best, float)
    if not (np.isfinite(own).all() and np.isfinite(other).all()):
        return False
    unit = 2.0 ** np.frexp(max(np.abs(own).max(), np.abs(other).max()))[1]
    own, other = own / unit, other / unit
    (_, *flat), (_, then, _, now) = ([np.median(q) for q in np.array_split(c, 4)] for c in (own, other))
    gap, noise = flat[-1] - now, np.std([np.diff(c[len(c) // 2 :]) for c in (own, other)], axis=1) / np.sqrt(2)
    error = 1.25 * np.hypot(*noise) / np.sqrt(len(own) / 4)  # of a difference of medians over a quarter
    clear = gap > max(STALLED * descent / unit, PLAIN * error)
    return bool(clear and np.ptp(flat) < 0.2 * gap and then - now > fall * gap)


def start_of(table: pd.DataFrame) -> float:
    """The loss before training: as recorded, else the highest that a rate up to the best got down to or ended at."""
    known = table["initial"].to_numpy(float)
    if np.isfinite(known).any():
        return float(np.median(known[np.isfinite(known)]))
    good = table[table["trained"]]
    slow = good[good["lr"] <= good["lr"].iloc[int(good["final"].argmin())]]
    return float(np.nanmax(slow[["best", "final"]].to_numpy(float)))


def _noise(table: pd.DataFrame, rates: pd.DataFrame) -> tuple[float, str]:
    """Standard deviation of a trial's final loss near the best, and where that is known from."""
    good = table[table["feasible"]]
    if good.empty:
        return 0.0, "none"
    means = rates.loc[rates["feasible"]].set_index("lr")["final"]
    near = good[good["lr"].isin(means.index[means <= means.min() + 0.25 * np.ptp(means)])]
    unit = 2.0 ** np.frexp(near["final"].abs().max())[1]  # what is squared below stays finite and above 0
    groups = [g.to_numpy() / unit for _, g in near.groupby("lr")["final"] if len(g) > 1]
    if groups:
        squares = sum(((g - g.mean()) ** 2).sum() for g in groups)
        return unit * float(np.sqrt(squares / sum(len(g) - 1 for g in groups))), "seeds"
    tails = [c[-max(8, len(c) // 10) :] / unit for c in near["loss"] if c is not None]
    tails = [t for t in tails if np.isfinite(t).all()]
    if tails:
        return unit * float(np.median([1.25 * np.std(np.diff(t)) / np.sqrt(2 * len(t)) for t in tails])), "curves"
    f = rates.loc[rates["feasible"] & (rates["final"] <= near["final"].max()), "final"].to_numpy()
    bends = np.abs(f[1:-1] - (f[2:] + f[:-2]) / 2) if len(f) > 2 else np.zeros(1)
    return float(1.4826 * np.median(bends) / np.sqrt(1.5)), "neighbours"
