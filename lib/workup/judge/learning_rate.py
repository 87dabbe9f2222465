"""Which learning rate is best, how sure is that, and where does training break? (playbook: C1, C6, D1)

A trial is infeasible if it did not end finite, gave back half of what it had gained, or, at a
rate above the best, ends with less than half of the best loss reduction. All of it is relative
to the sweep's own range of losses: scaling the loss or shifting it changes no verdict.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding

#: A trial that keeps less than this share of the loss reduction is infeasible.
KEPT = 0.5
#: Rates whose mean loss is within this many standard errors of the best's are as good.
AS_GOOD = 2.0
#: The next rate up being infeasible puts lr* at the edge only if it is this near; farther, bracket first.
NEAR = 4.0
#: Carried to a longer run: the lowest rate within this share of the loss reduction of the leader,
#: times (steps ratio) ** -DECLINE. Both from real sweeps (tests/benchmarks/regret.py), where the
#: leader of a short run was 1 to 10 times too high for the whole one, and too low costs less than too high.
WITHIN, DECLINE = 0.01, 0.2
#: lr* falls at most in proportion to the horizon; one that moves faster as it doubles is not settled.
MOVES = 3.0
RULE = "playbook: C1, C6"


@dataclass(frozen=True)
class _Sweep:
    """A row a rate, sorted: ``lr, feasible, final`` (mean), ``error`` (of the mean), ``seeds``; what it rests on."""

    rates: pd.DataFrame
    steps: int | None = None
    noise_from: str = "none"

    @cached_property
    def good(self) -> pd.DataFrame:
        return self.rates[self.rates["feasible"]]

    @property
    def bad(self) -> pd.Series:
        return self.rates.loc[~self.rates["feasible"], "lr"]

    @cached_property
    def best(self) -> int:
        """Row of the best feasible rate; of one below the lowest infeasible where that costs next to nothing."""
        below = self.good[self.good["lr"] < self.bad.min()] if len(self.bad) else self.good
        if len(below) and below["final"].min() <= self.good["final"].min() + 0.05 * np.ptp(self.good["final"]):
            return int(below["final"].idxmin())
        return int(self.good["final"].idxmin())

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
    def level(self) -> bool:
        """Whether several rates train, all to the same loss."""
        return len(self.good) > 1 and np.ptp(self.good["final"]) == 0

    @property
    def edge(self) -> bool | None:
        if not len(self.good) or self.level or self.end == "high":
            return None
        if self.rates["feasible"][self.best + 1]:
            return False
        return True if self.rates["lr"][self.best + 1] <= NEAR * self.rates["lr"][self.best] else None

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
        ratio = float(np.median(lrs[1:] / lrs[:-1])) if len(lrs) > 1 else 10.0
        up = len(self.good) and self.end == "high"
        return tuple(float(f"{lrs[-1] * ratio**k if up else lrs[0] / ratio**k:.6g}") for k in (1, 2))


def judge(trials: Any) -> Finding:
    """The best learning rate of a sweep.

    Args:
        trials: a table (DataFrame, or what makes one), a row a trial: ``lr, final`` (training
            loss at the end, smoothed), and where known ``seed, status, best`` (lowest smoothed
            loss), ``initial`` (loss before training), ``loss`` (the curve, shape [steps]).

    Returns:
        Finding ``best_lr``; value None where it cannot be told. The interval holds the rates
        that are statistically as good, by the spread over seeds, else the curves' noise, else
        how unevenly neighbours lie. Evidence: ``region, unstable_lr, lr_at_edge, feasible,
        infeasible, grid_end`` ("low", "high" or None), ``extend`` (rates to add), ``steps``
        (the horizon at which it holds).

    Raises:
        ParameterError: a missing column, or a rate that is not positive and finite.

    Example:
        >>> rows = [dict(lr=lr, final=f) for lr, f in [(0.01, 0.8), (0.1, 0.2), (1.0, float("nan"))]]
        >>> judge(rows).value
        0.1
    """
    sweep = _read(trials, "learning_rate.judge")
    good, bad = sweep.good["lr"].tolist(), sweep.bad.tolist()
    facts: dict[str, Any] = {"feasible": good, "infeasible": bad, "steps": sweep.steps, "extend": sweep.extension}
    if not good:
        text = f"All {len(bad)} rates tried are infeasible." if bad else "No trial says anything about a learning rate."
        return _untold(text, "Sweep lower learning rates, a factor 10 at a time." if bad else "Run a sweep.", facts)
    if len(good) == 1 and not bad:
        return _untold("One rate alone cannot be called best.", "Sweep at least three rates around it.", facts)
    if sweep.level:
        return _untold("All feasible rates end at the same loss.", "Train longer, or sweep wider.", facts)
    row, region, end = sweep.rates.loc[sweep.best], sweep.region, sweep.end
    facts |= {"region": region, "unstable_lr": sweep.unstable[1], "lr_at_edge": sweep.edge, "grid_end": end}
    facts |= {"final": float(row["final"]), "error": float(row["error"]), "noise_from": sweep.noise_from}
    caveats = []
    if end:
        caveats.append(f"It is the {end}est rate tried: the best may lie beyond.")
    if any(b < row["lr"] for b in bad):
        caveats.append("A lower rate failed: look for a bad batch or an unlucky seed.")
    same = f", as good within the noise as {region[0]:.3g} to {region[-1]:.3g}" if len(region) > 1 else ""
    sure = "low" if end or len(good) < 3 else "high" if sweep.noise_from == "seeds" and len(region) < 4 else "medium"
    return Finding(
        name="best_lr",
        value=float(row["lr"]),
        rule=RULE,
        summary=f"lr {row['lr']:.3g} trains best{same}" + (", at the edge of what trains." if sweep.edge else "."),
        interval=sweep.interval,
        confidence=sure,
        evidence=facts,
        caveats=tuple(caveats),
    )


def unstable(trials: Any) -> Finding:
    """unstable_base_learning_rate: the lowest infeasible rate above lr*, bracketed from below (playbook: D1).

    Returns:
        Finding ``unstable_lr``; the interval is (highest rate that trains, lowest that does not).
        None where no rate tried breaks.
    """
    sweep = _read(trials, "learning_rate.unstable")
    under, bad = sweep.unstable
    top = sweep.rates["lr"].max() if len(sweep.rates) else None
    if bad:
        text = f"Training breaks at lr {bad:.3g}" + (f"; {under:.3g} still trains." if under else ", the lowest tried.")
    else:
        text = f"Every rate up to {top:.3g} trains." if top else "No trial says anything about a learning rate."
    return Finding(
        name="unstable_lr",
        value=bad,
        rule="playbook: C1, D1",
        summary=text,
        interval=(under, bad) if under and bad else None,
        confidence="low" if not (bad and under) else "high" if bad / under <= 2 else "medium",
        evidence={"highest_stable": under, "ratio": bad / under if under and bad else None},
        settle="" if bad else f"Try {10 * top:.3g}." if top else "Run a sweep.",
    )


def edge(trials: Any) -> Finding:
    """Whether lr* sits at the very edge of the infeasible region (playbook: C6)."""
    sweep = _read(trials, "learning_rate.edge")
    best = float(sweep.rates["lr"][sweep.best]) if len(sweep.good) else None
    bad = sweep.unstable[1]
    words = {
        True: f"lr* {best} is the last rate that trains: the workload is unstable just above it.",
        False: f"lr* {best} is not at the edge: higher rates train too, to a higher loss.",
        None: "Whether lr* is at the edge cannot be told from these rates.",
    }
    return Finding(
        name="lr_at_edge",
        value=sweep.edge,
        rule="playbook: C6",
        summary=words[sweep.edge],
        evidence={"best_lr": best, "unstable_lr": bad, "ratio": bad / best if bad and best else None},
        settle=""
        if sweep.edge is not None
        else "Try rates between lr* and the lowest infeasible, or above the highest.",
    )


def summary(trials: Any) -> pd.DataFrame:
    """A row a rate, sorted: ``lr, feasible, final`` (mean), ``error, seeds, best_here, as_good``."""
    sweep = _read(trials, "learning_rate.summary")
    rates, some = sweep.rates.copy(), len(sweep.good) > 0
    rates["best_here"] = (rates.index == sweep.best) if some else False
    rates["as_good"] = rates["lr"].isin(sweep.region) if some else False
    return rates


def carry(trials: Any, max_train_steps: int, *, steps: int | None = None) -> Finding:
    """The constant rate to expect best over ``max_train_steps``, from shorter trials (playbook: A4, C1).

    lr* falls with the horizon: the lowest rate nearly as good as the leader is taken, and
    lowered by a power of the ratio of horizons. It is taken at a quarter, a half and the whole
    of the trials too; where that jumps, nothing is carried.

    Args:
        trials: as for :func:`judge`, each with its ``loss`` curve, shape [n], n alike.
        max_train_steps: of the real run.
        steps: that the curves span, where they do not hold one value a step.

    Returns:
        Finding ``best_lr`` with an interval; None where the trend does not carry.
    """
    table = trials_table(trials, "learning_rate.carry")
    curves = [c for c in table["loss"] if np.ndim(c) == 1 and len(c)]
    if len(curves) < max(1, len(table)):
        return _untold("There are no loss curves to see a trend in.", "Give each trial's curve as `loss`.", {})
    n = max(map(len, curves))
    span = n if steps is None else steps
    if max_train_steps < span:
        raise ParameterError(
            f"learning_rate.carry(max_train_steps={max_train_steps}): shorter than the trials, {span}."
        )
    seen = {round(span * share): _leader(table, round(n * share)) for share in (0.25, 0.5, 1.0)}
    facts = {"horizons": list(seen), "rates": [r[0] if r else None for r in seen.values()], "decline": DECLINE}
    known = [r[0] for r in seen.values() if r]
    if len(known) < 3 or n < 40:
        return _untold("The trials are too short or too few train.", "Train longer, at more and lower rates.", facts)
    if max(known[1] / known[2], known[2] / known[1]) > MOVES:
        return _untold(f"lr* still moves more than {MOVES:g}-fold as the horizon doubles.", "Train longer.", facts)
    ratio = max_train_steps / span
    rate, leader = known[-1] * ratio**-DECLINE, seen[span][1]  # type: ignore[index]
    return Finding(
        name="best_lr",
        value=float(f"{rate:.6g}"),
        rule="playbook: A4, C1",
        summary=f"Over {max_train_steps} steps lr {rate:.3g} should train best; after {span}, {leader:.3g} leads.",
        interval=(float(rate * ratio ** (-2 * DECLINE)), float(leader)),
        confidence="medium" if ratio <= 20 else "low",
        evidence=facts | {"leader": leader, "steps": max_train_steps},
        caveats=("Carried from shorter runs by a rule of thumb, for a constant rate.",),
    )


def _leader(table: pd.DataFrame, n: int) -> tuple[float, float] | None:
    """(lowest rate nearly as good as the best, the best rate) after the first ``n`` values of the curves."""
    ends = [np.mean(c[:n][-max(1, n // 10) :]) if len(c) >= n else np.nan for c in map(np.asarray, table["loss"])]
    sweep = _sweep(table.assign(final=ends, best=np.nan, trained=np.isfinite(ends)))
    if len(sweep.good) < 3:
        return None
    best, start = sweep.best, _start(table)
    near = sweep.rates["feasible"] & (
        sweep.rates["final"] <= sweep.rates["final"][best] + WITHIN * (start - sweep.rates["final"][best])
    )
    gaps = np.flatnonzero(~near.to_numpy()[:best])
    return float(sweep.rates["lr"][gaps.max(initial=-1) + 1]), float(sweep.rates["lr"][best])


def trials_table(trials: Any, call: str, *, extra: tuple[str, ...] = ()) -> pd.DataFrame:
    """``trials`` checked and sorted by lr, with ``seed, status, best, initial, loss`` filled in and ``trained``.

    ``trained``: finished and finite. Trials that ran out of memory, failed or were
    interrupted say nothing about a learning rate and are left out.
    """
    table = pd.DataFrame(trials).copy()
    if table.empty:
        return pd.DataFrame(columns=["lr", "seed", "status", "final", "best", "initial", "loss", "trained", *extra])
    missing = [c for c in ("lr", "final", *extra) if c not in table]
    if missing:
        raise ParameterError(
            f"{call}: the table has no column {', '.join(missing)}. It has {', '.join(map(str, table))}."
        )
    for name, default in (("seed", 0), ("status", "finished"), ("loss", None)):
        table[name] = table.get(name, default)
    for name in ("lr", "final", "best", "initial", *extra):
        table[name] = pd.to_numeric(table[name], errors="coerce") if name in table else np.nan
    odd = table[~(np.isfinite(table["lr"]) & (table["lr"] > 0))]
    if len(odd):
        raise ParameterError(f"{call}: lr={odd['lr'].iloc[0]} in row {odd.index[0]}: rates are positive and finite.")
    firsts = [c[0] if np.ndim(c) == 1 and len(c) else np.nan for c in table["loss"]]
    table["initial"] = table["initial"].fillna(pd.Series(firsts, index=table.index))
    table = table[table["status"].isin(["finished", "diverged"])]
    table["trained"] = (table["status"] == "finished") & np.isfinite(table["final"])
    return table.sort_values(["lr", "seed"]).reset_index(drop=True)


def _read(trials: Any, call: str) -> _Sweep:
    return _sweep(trials_table(trials, call))


def _sweep(table: pd.DataFrame) -> _Sweep:
    if table.empty:
        return _Sweep(
            pd.DataFrame({c: [] for c in ("lr", "feasible", "final", "error", "seeds")}).astype({"feasible": bool})
        )
    table = table.assign(feasible=_feasible(table))
    rates = table.groupby("lr").agg(feasible=("feasible", "all"), final=("final", "mean"), seeds=("seed", "size"))
    rates = rates.reset_index()
    rates.loc[~rates["feasible"], "final"] = np.nan
    spread, source = _noise(table, rates)
    rates["error"] = spread / np.sqrt(rates["seeds"])
    lengths = [len(c) for c in table["loss"] if np.ndim(c) == 1]
    return _Sweep(rates, max(lengths, default=None), source)


def _feasible(table: pd.DataFrame) -> np.ndarray:
    ok = table["trained"].to_numpy(bool)
    if not ok.any():
        return ok
    lr, final, best = (table[c].to_numpy(float) for c in ("lr", "final", "best"))
    start, low = _start(table), final[ok].min()
    high = (lr > lr[ok][np.argmin(final[ok])]) & (final > start - KEPT * (start - low)) & (start > low)
    lost = final - best > (1 - KEPT) * max(start - low, 0.0)
    return ok & ~high & ~(lost & (start > low))


def _start(table: pd.DataFrame) -> float:
    """The loss before training: as recorded, else the highest that a rate up to the best got down to or ended at."""
    known = table["initial"].to_numpy(float)
    if np.isfinite(known).any():
        return float(np.median(known[np.isfinite(known)]))
    good = table[table["trained"]]
    slow = good[good["lr"] <= good["lr"][good["final"].idxmin()]]
    return float(np.nanmax(slow[["best", "final"]].to_numpy(float)))


def _noise(table: pd.DataFrame, rates: pd.DataFrame) -> tuple[float, str]:
    """Standard deviation of a trial's final loss near the best, and where that is known from."""
    good = table[table["feasible"]]
    if good.empty:
        return 0.0, "none"
    near = good[good["final"] <= good["final"].min() + 0.25 * np.ptp(good["final"])]
    groups = [g.to_numpy() for _, g in near.groupby("lr")["final"] if len(g) > 1]
    if groups:
        squares = sum(((g - g.mean()) ** 2).sum() for g in groups)
        return float(np.sqrt(squares / sum(len(g) - 1 for g in groups))), "seeds"
    tails = [np.asarray(c, float)[-max(8, len(c) // 10) :] for c in near["loss"] if np.ndim(c) == 1]
    if tails:
        return float(np.median([1.25 * np.std(np.diff(t)) / np.sqrt(2 * len(t)) for t in tails])), "curves"
    f = rates.loc[rates["feasible"] & (rates["final"] <= near["final"].max()), "final"].to_numpy()
    bends = np.abs(f[1:-1] - (f[2:] + f[:-2]) / 2) if len(f) > 2 else np.zeros(1)
    return float(1.4826 * np.median(bends) / np.sqrt(1.5)), "neighbours"


def _untold(text: str, settle: str, facts: dict[str, Any]) -> Finding:
    return Finding(name="best_lr", value=None, rule=RULE, summary=text, settle=settle, confidence="low", evidence=facts)
