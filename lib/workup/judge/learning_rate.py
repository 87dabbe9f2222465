"""Which learning rate is best, how sure is that, and where does training break? (playbook: C1, C6, D1)

A trial is infeasible if it did not end finite, lost more than half of what it had gained, or
ends, at a rate above the best, with less than half of the best loss reduction. All of this
is relative to the sweep's own range of losses, so scaling the loss or shifting it changes no
verdict.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding

#: A trial that keeps less than this share of the loss reduction is infeasible.
KEPT = 0.5
#: Rates whose mean loss is this many standard errors from the best's are as good.
AS_GOOD = 2.0
#: The next rate up being infeasible puts lr* at the edge only if it is this near; farther, bracket first.
NEAR = 4.0
RULE = "playbook: C1, C6"


@dataclass(frozen=True)
class _Sweep:
    """What a sweep showed, a value a rate: ``lr, feasible, final (mean), error (standard error), seeds``."""

    rates: pd.DataFrame
    steps: int | None
    noise_from: str

    @property
    def best(self) -> int:
        """Row of the best feasible rate; below the lowest infeasible one where that costs next to nothing."""
        good = self.rates[self.rates["feasible"]]
        best = good["final"].idxmin()
        bad = self.rates.loc[~self.rates["feasible"], "lr"]
        below = good[good["lr"] < bad.min()] if len(bad) else good
        if len(below) and below["final"].min() <= good["final"].min() + 0.05 * np.ptp(good["final"]):
            return below["final"].idxmin()
        return best

    @property
    def unstable(self) -> tuple[float | None, float | None]:
        """(highest feasible rate below it, lowest infeasible rate above lr*); None where not tried."""
        good = self.rates[self.rates["feasible"]]
        floor = self.rates["lr"][self.best] if len(good) else 0.0
        above = self.rates[~self.rates["feasible"] & (self.rates["lr"] > floor)]["lr"]
        bad = float(above.min()) if len(above) else None
        under = good["lr"] if bad is None else good[good["lr"] < bad]["lr"]
        return (float(under.max()) if len(under) else None), bad


def judge(trials: Any) -> Finding:
    """The best learning rate of a sweep.

    Args:
        trials: a table (DataFrame, or what makes one), a row a trial: ``lr, final`` (training
            loss at the end, smoothed), and where known ``seed, status, best`` (lowest smoothed
            loss), ``initial`` (loss before training), ``loss`` (the curve, shape [steps]).

    Returns:
        Finding ``best_lr``; value None where it cannot be told. Its interval holds the rates
        that are statistically as good, by the spread over seeds, else the curves' noise, out
        to halfway to the next rate. Evidence: ``region``, ``unstable_lr``, ``lr_at_edge``,
        ``cautious_lr`` (at least 2 x below ``unstable_lr``), ``feasible``, ``infeasible``,
        ``grid_end`` ("low", "high" or None), ``extend`` (rates to add), ``steps`` (the horizon
        at which it holds).

    Raises:
        ParameterError: a missing column, or a rate that is not positive and finite.

    Example:
        >>> rows = [dict(lr=lr, final=f) for lr, f in [(0.01, 0.8), (0.1, 0.2), (1.0, float("nan"))]]
        >>> judge(rows).value
        0.1
    """
    sweep = _read(trials, "learning_rate.judge")
    rates = sweep.rates
    bad = rates.loc[~rates["feasible"], "lr"].tolist() if len(rates) else []
    good = rates[rates["feasible"]] if len(rates) else rates
    facts = {"feasible": good["lr"].tolist(), "infeasible": bad, "steps": sweep.steps, "extend": extension(trials)}
    if len(good) == 0:
        text = f"All {len(bad)} rates tried are infeasible." if bad else "No trial says anything about a learning rate."
        return _untold(text, "Sweep lower learning rates, a factor 10 at a time." if bad else "Run a sweep.", facts)
    if len(good) == 1 and not bad:
        return _untold("One rate alone cannot be called best.", "Sweep at least three rates around it.", facts)
    if len(good) > 1 and np.ptp(good["final"]) == 0:
        return _untold("All feasible rates end at the same loss.", "Train longer, or sweep wider.", facts)
    row = rates.loc[sweep.best]
    region = _region(rates, sweep.best)
    ends = _grid_end(rates, sweep.best)
    _, unstable_lr = sweep.unstable
    edge_ = _edge(sweep)
    facts |= {"region": region, "unstable_lr": unstable_lr, "lr_at_edge": edge_, "grid_end": ends}
    # At the edge another seed may fail: the highest rate tried with a factor of 2 to spare.
    spare = good.loc[good["lr"] <= (unstable_lr or np.inf) / 2, "lr"]
    facts["cautious_lr"] = float(min(spare.max(), row["lr"])) if len(spare) else None
    facts |= {"final": float(row["final"]), "error": float(row["error"]), "noise_from": sweep.noise_from}
    caveats = []
    if ends:
        caveats.append(f"It is the {ends}est rate tried: the best may lie beyond.")
    if any(b < row["lr"] for b in bad):
        caveats.append("A lower rate failed: look for a bad batch or an unlucky seed.")
    if sweep.steps:
        caveats.append(f"It holds for {sweep.steps} steps; a longer run usually wants a lower constant rate.")
    same = f", as good within the noise as {region[0]:.3g} to {region[-1]:.3g}" if len(region) > 1 else ""
    sure = "low" if ends or len(good) < 3 else "high" if sweep.noise_from == "seeds" and len(region) < 4 else "medium"
    return Finding(
        name="best_lr",
        value=float(row["lr"]),
        rule=RULE,
        summary=f"lr {row['lr']:.3g} trains best{same}" + (", at the edge of what trains." if edge_ else "."),
        interval=_interval(rates, region),
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
    under, bad = sweep.unstable if len(sweep.rates) else (None, None)
    settle, top = "", sweep.rates["lr"].max() if len(sweep.rates) else None
    if bad is None:
        text = f"Every rate up to {top:.3g} trains." if top else "No trial says anything about a learning rate."
        settle = f"Try {10 * top:.3g}." if top else "Run a sweep."
    else:
        text = f"Training breaks at lr {bad:.3g}" + (f"; {under:.3g} still trains." if under else ", the lowest tried.")
    tight = bad is not None and under is not None and bad / under <= 2
    return Finding(
        name="unstable_lr",
        value=bad,
        rule="playbook: C1, D1",
        summary=text,
        interval=(under, bad) if under and bad else None,
        confidence="low" if bad is None or under is None else "high" if tight else "medium",
        evidence={"highest_stable": under, "ratio": bad / under if under and bad else None},
        settle=settle,
    )


def edge(trials: Any) -> Finding:
    """Whether lr* sits at the very edge of the infeasible region (playbook: C6)."""
    sweep = _read(trials, "learning_rate.edge")
    some = len(sweep.rates) > 0 and bool(sweep.rates["feasible"].any())
    told = _edge(sweep) if some else None
    best = float(sweep.rates["lr"][sweep.best]) if some else None
    bad = sweep.unstable[1] if some else None
    words = {
        True: f"lr* {best} is the last rate that trains: the workload is unstable just above it.",
        False: f"lr* {best} is not at the edge: higher rates train too, to a higher loss.",
        None: "Whether lr* is at the edge cannot be told from these rates.",
    }
    return Finding(
        name="lr_at_edge",
        value=told,
        rule="playbook: C6",
        summary=words[told],
        evidence={"best_lr": best, "unstable_lr": bad, "ratio": bad / best if bad and best else None},
        settle="" if told is not None else "Try rates between lr* and the lowest infeasible one, or above the highest.",
    )


def extension(trials: Any) -> tuple[float, ...]:
    """Rates to add where the best lies at the sweep's end: two more of its own steps; () where none.

    >>> extension([dict(lr=0.01, final=0.8), dict(lr=0.1, final=0.2)])
    (1.0, 10.0)
    """
    rates = _read(trials, "learning_rate.extension").rates
    if rates.empty:
        return ()
    lrs = rates["lr"].to_numpy()
    ratio = float(np.median(lrs[1:] / lrs[:-1])) if len(lrs) > 1 else 10.0
    if not rates["feasible"].any():
        return tuple(float(f"{lrs[0] / ratio**k:.6g}") for k in (1, 2))
    best = _Sweep(rates, None, "").best
    end = _grid_end(rates, best)
    if end is None:
        return ()
    return tuple(float(f"{(lrs[-1] * ratio**k if end == 'high' else lrs[0] / ratio**k):.6g}") for k in (1, 2))


def summary(trials: Any) -> pd.DataFrame:
    """A row a rate, sorted: ``lr, feasible, final`` (mean), ``error``, ``seeds, best_here, as_good``."""
    sweep = _read(trials, "learning_rate.summary")
    rates = sweep.rates.copy()
    some = len(rates) > 0 and bool(rates["feasible"].any())
    rates["best_here"] = (rates.index == sweep.best) if some else False
    rates["as_good"] = rates["lr"].isin(_region(rates, sweep.best)) if some else False
    return rates


def carry(by_steps: Mapping[int, Finding], max_train_steps: int) -> Finding:
    """lr* at ``max_train_steps``, from lr* at two or more shorter horizons.

    The logarithm of lr* is carried on along a straight line in the logarithm of the horizon
    (rates fall with longer training), with the findings' intervals as its uncertainty.

    Returns:
        Finding ``best_lr``; None where the uncertainty exceeds a factor 10.
    """
    told = {int(s): f for s, f in by_steps.items() if f.told}
    if len(told) < 2:
        return _untold(f"lr* is known at {len(told)} horizons.", "Measure lr* at two or three horizons.", {})
    steps = np.log([float(s) for s in sorted(told)])
    value = np.log([told[s].value for s in sorted(told)])
    half = [np.ptp(np.log(f.interval)) / 2 if (f := told[s]).interval else np.log(2) for s in sorted(told)]
    slope = float(np.clip(np.polyfit(steps, value, 1)[0], -1.0, 0.0))
    far = math.log(max_train_steps) - steps[-1]
    centre = value[-1] + slope * max(far, 0.0)
    width = float(np.hypot(half[-1], np.mean(half) * math.sqrt(2) * max(far, 0.0) / np.ptp(steps)))
    facts = {"horizons": sorted(told), "rates": [told[s].value for s in sorted(told)], "slope": slope}
    if width > np.log(10):
        return _untold(
            "The trend of lr* with the horizon is too uncertain to carry.", "Measure a longer horizon.", facts
        )
    rate = float(np.exp(centre))
    return Finding(
        name="best_lr",
        value=rate,
        rule=RULE,
        summary=f"Over {max_train_steps} steps lr {rate:.3g} is expected to train best.",
        interval=(float(np.exp(centre - width)), float(np.exp(centre + width))),
        confidence="medium" if width < np.log(3) else "low",
        evidence=facts,
        caveats=("Carried from shorter runs, at a constant rate.",),
    )


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
    for name in ("lr", "final", "best", "initial", *extra):
        table[name] = pd.to_numeric(table[name], errors="coerce") if name in table else np.nan
    odd = table[~(np.isfinite(table["lr"]) & (table["lr"] > 0))]
    if len(odd):
        raise ParameterError(f"{call}: lr={odd['lr'].iloc[0]} in row {odd.index[0]}: rates are positive and finite.")
    for name, default in (("seed", 0), ("status", "finished"), ("loss", None)):
        table[name] = table.get(name, default)
    table = table[table["status"].isin(["finished", "diverged"])]
    table["trained"] = (table["status"] == "finished") & np.isfinite(table["final"])
    return table.sort_values(["lr", "seed"]).reset_index(drop=True)


def _read(trials: Any, call: str) -> _Sweep:
    table = trials_table(trials, call)
    if table.empty:
        return _Sweep(pd.DataFrame({"lr": [], "feasible": [], "final": [], "error": [], "seeds": []}), None, "none")
    table["feasible"] = _feasible(table)
    groups = table.groupby("lr")
    rates = pd.DataFrame(
        {
            "feasible": groups["feasible"].all(),
            "final": table.where(table["feasible"])["final"].groupby(table["lr"]).mean(),
            "seeds": groups.size(),
        }
    ).reset_index()
    spread, source = _noise(table, rates)
    rates["error"] = spread / np.sqrt(rates["seeds"])
    lengths = [len(c) for c in table["loss"] if isinstance(c, (list, tuple, np.ndarray, pd.Series))]
    return _Sweep(rates, max(lengths) if lengths else None, source)


def _feasible(table: pd.DataFrame) -> np.ndarray:
    ok, final = table["trained"].to_numpy(bool), table["final"].to_numpy(float)
    if not ok.any():
        return ok
    start = _start(table)
    low = final[ok].min()
    limit = start - KEPT * (start - low)
    lr = table["lr"].to_numpy(float)
    best = table["best"].to_numpy(float)
    lost = final - best > KEPT * np.maximum(start - best, 0)
    high = (lr > lr[ok][np.argmin(final[ok])]) & (final > limit)
    return ok & ~(high & (start > low)) & ~(np.isfinite(best) & lost & (final > best + (1 - KEPT) * (start - low)))


def _start(table: pd.DataFrame) -> float:
    """The loss before training: as given, else the worst of the trials' best losses, else of the lower rates' ends."""
    for name in ("initial", "best"):
        known = table[name].to_numpy(float)
        known = known[np.isfinite(known)]
        if len(known):
            return float(np.median(known) if name == "initial" else known.max())
    good = table[table["trained"]]
    return float(good.loc[good["lr"] <= good["lr"][good["final"].idxmin()], "final"].max())


def _noise(table: pd.DataFrame, rates: pd.DataFrame) -> tuple[float, str]:
    """Standard deviation of a trial's final loss near the best, and where that is known from."""
    good = table[table["feasible"]]
    if good.empty:
        return 0.0, "none"
    near = good[good["final"] <= good["final"].min() + 0.25 * np.ptp(good["final"])]
    groups = [g["final"].to_numpy() for _, g in near.groupby("lr") if len(g) > 1]
    if groups:
        return float(
            np.sqrt(sum(((g - g.mean()) ** 2).sum() for g in groups) / sum(len(g) - 1 for g in groups))
        ), "seeds"
    tails = [np.asarray(c, float)[-max(8, len(c) // 10) :] for c in near["loss"] if isinstance(c, (list, np.ndarray))]
    if tails:
        return float(np.median([1.25 * np.std(np.diff(t)) / np.sqrt(2 * len(t)) for t in tails])), "curves"
    f = rates.loc[rates["feasible"] & (rates["final"] <= near["final"].max()), "final"].to_numpy()
    bends = np.abs(f[1:-1] - (f[2:] + f[:-2]) / 2) if len(f) > 2 else np.zeros(1)
    return float(1.4826 * np.median(bends) / np.sqrt(1.5)), "neighbours"


def _region(rates: pd.DataFrame, best: int) -> list[float]:
    """The rates around the best, without a gap, that are statistically as good."""
    gap = rates["final"] - rates["final"][best]
    as_good = rates["feasible"] & (gap <= AS_GOOD * np.hypot(rates["error"], rates["error"][best]))
    first = last = best
    while first > 0 and as_good[first - 1]:
        first -= 1
    while last < len(rates) - 1 and as_good[last + 1]:
        last += 1
    return rates["lr"][first : last + 1].tolist()


def _interval(rates: pd.DataFrame, region: list[float]) -> tuple[float, float]:
    lrs = rates["lr"].to_numpy()
    below, above = lrs[lrs < region[0]], lrs[lrs > region[-1]]
    low = math.sqrt(region[0] * below[-1]) if len(below) else region[0]
    return float(low), float(math.sqrt(region[-1] * above[0]) if len(above) else region[-1])


def _grid_end(rates: pd.DataFrame, best: int) -> str | None:
    return "high" if best == len(rates) - 1 else "low" if best == 0 else None


def _edge(sweep: _Sweep) -> bool | None:
    best, (_, bad) = sweep.best, sweep.unstable
    if best == len(sweep.rates) - 1 or np.ptp(sweep.rates["final"].dropna()) == 0 < sweep.rates["feasible"].sum() - 1:
        return None
    above = sweep.rates.loc[best + 1]
    if above["feasible"]:
        return False
    return True if bad is not None and bad <= NEAR * sweep.rates["lr"][best] else None


def _untold(summary: str, settle: str, facts: dict[str, Any]) -> Finding:
    return Finding(
        name="best_lr", value=None, rule=RULE, summary=summary, settle=settle, confidence="low", evidence=facts
    )
