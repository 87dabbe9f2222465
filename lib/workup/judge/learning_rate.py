"""Which learning rate is best, how sure is that, and where does training break? (playbook: C1, C6, D1)

What makes a trial infeasible, and rates equally good: :mod:`workup.judge.sweep`.
"""

import dataclasses
from typing import Any

import pandas as pd

from workup.finding import Finding
from workup.judge.horizon import carry as carry  # the same question for a longer run
from workup.judge.sweep import read

RULE = "playbook: C1, C6"
AGAIN = "Run a sweep, of more than a few steps a trial."


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
        infeasible, stalled`` (those of them that sit on a plateau), ``grid_end`` ("low", "high"
        or None), ``extend`` (rates to add), ``steps``
        (the horizon at which it holds).

    Raises:
        ParameterError: a missing column, or a rate that is not positive and finite.

    Example:
        >>> rows = [dict(lr=lr, final=f) for lr, f in [(0.01, 0.8), (0.1, 0.2), (1.0, float("nan"))]]
        >>> judge(rows).value
        0.1
    """
    sweep = read(trials, "learning_rate.judge")
    good, bad = sweep.good["lr"].tolist(), sweep.bad.tolist()
    facts: dict[str, Any] = {"feasible": good, "infeasible": bad, "steps": sweep.steps, "extend": sweep.extension}
    if not good:
        text = f"All {len(bad)} rates tried are infeasible." if bad else "No trial says anything about a learning rate."
        return _inconclusive(text, "Sweep lower learning rates, a factor 10 at a time." if bad else AGAIN, facts)
    if len(good) == 1 and not bad:
        return _inconclusive("One rate alone cannot be called best.", "Sweep at least three rates around it.", facts)
    if sweep.level:
        return _inconclusive("All feasible rates end at the same loss.", "Train longer, or sweep wider.", facts)
    lr, final, error = (float(sweep.rates[c].iloc[sweep.best]) for c in ("lr", "final", "error"))
    region, end = sweep.region, sweep.end
    facts |= {"region": region, "unstable_lr": sweep.unstable[1], "lr_at_edge": sweep.edge, "grid_end": end}
    facts["stalled"] = sweep.stalled
    facts |= {"final": final, "error": error, "noise_from": sweep.noise_from}
    caveats = []
    if end:
        caveats.append(f"It is the {end}est rate tried: the best may lie beyond.")
    if sweep.boundless:
        caveats.append("The loss falls in proportion to the rate: it has no lowest value, or the trials are too short.")
    if any(b < lr for b in bad):
        caveats.append("A lower rate failed: look for a bad batch or an unlucky seed.")
    same = f", as good within the noise as {region[0]:.3g} to {region[-1]:.3g}" if len(region) > 1 else ""
    sure = (
        "low" if caveats or len(good) < 3 else "high" if sweep.noise_from == "seeds" and len(region) < 4 else "medium"
    )
    return Finding(
        name="best_lr",
        value=lr,
        rule=RULE,
        summary=f"lr {lr:.3g} trains best{same}" + (", at the edge of what trains." if sweep.edge else "."),
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
    sweep = read(trials, "learning_rate.unstable")
    under, bad = sweep.unstable
    top = sweep.rates["lr"].max() if len(sweep.rates) else None
    if bad in sweep.stalled:
        text = f"Training gets stuck at lr {bad:.3g}: no progress in half of the steps, while {under:.3g} goes on."
    elif bad:
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
        evidence={"highest_stable": under, "ratio": bad / under if under and bad else None, "stalled": sweep.stalled},
        settle="" if bad else f"Try {10 * top:.3g}." if top else AGAIN,
    )


def edge(trials: Any) -> Finding:
    """Whether lr* sits at the very edge of the infeasible region (playbook: C6)."""
    sweep = read(trials, "learning_rate.edge")
    best = float(sweep.rates["lr"][sweep.best]) if len(sweep.good) else None
    bad = sweep.unstable[1]
    at = f"{best:.3g}" if best else ""
    words = {
        True: f"lr* {at} is the last rate that trains: the workload is unstable just above it.",
        False: f"lr* {at} is not at the edge: higher rates train too, to a higher loss.",
        None: "Whether lr* is at the edge cannot be told from these rates.",
    }
    return Finding(
        name="lr_at_edge",
        value=sweep.edge,
        confidence="low" if sweep.edge is None else "medium",
        rule="playbook: C6",
        summary=words[sweep.edge],
        evidence={"best_lr": best, "unstable_lr": bad, "ratio": bad / best if bad and best else None},
        settle=""
        if sweep.edge is not None
        else "Try rates between lr* and the lowest infeasible, or above the highest.",
    )


def summary(trials: Any) -> pd.DataFrame:
    """A row a rate, sorted: ``lr, feasible, final`` (mean), ``error, seeds, best_here, as_good``."""
    sweep = read(trials, "learning_rate.summary")
    rates, some = sweep.rates.copy(), len(sweep.good) > 0
    rates["best_here"] = (rates.index == sweep.best) if some else False
    rates["as_good"] = rates["lr"].isin(sweep.region) if some else False
    return rates


def whole_run(best: Finding, carried: Finding) -> tuple[Finding, Finding]:
    """(``best_lr`` as sure as it is for the whole run, ``peak_lr``: the rate to train the whole run with).

    Args:
        best: from :func:`judge`. carried: from :func:`carry`.
    """
    if not (best.is_conclusive and carried.is_conclusive):
        return best, carried
    least, most = sorted((best.value, carried.value))
    low, high = best.interval or (best.value, best.value)
    if not low <= carried.value <= high and best.confidence == "high":
        best = dataclasses.replace(best, confidence="medium")
    if most > 3 * least:
        best = dataclasses.replace(best, confidence="low")
    steps, after = carried.evidence.get("steps"), best.evidence.get("steps")
    why = f"best to expect over {steps:,} steps; after {after:,}, {best.value:.3g} leads" if steps and after else ""
    return best, dataclasses.replace(carried, because=why)


def _inconclusive(text: str, settle: str, facts: dict[str, Any]) -> Finding:
    return Finding(name="best_lr", value=None, rule=RULE, summary=text, settle=settle, confidence="low", evidence=facts)
