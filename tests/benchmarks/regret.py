"""What does a rate chosen from the start of a sweep cost by its end?

    python -m tests.benchmarks.regret FOLDER [--every 2 --after 1]

FOLDER holds real sweeps at constant learning rates as runs.parquet, first_steps.parquet and
whole_run.parquet (run, step, loss or loss_median; cut from the DeepOBS baselines, see
tests/data/README.md). From the first tenth of each sweep's run, and from its first 2,000 steps,
a rate is chosen; regret = (its final training loss - the sweep's best) / (initial loss - best).
"leader" is the best rate of the short run, "workup" what is carried from there. The carry's constants
were weighed on these sweeps, so the test is "unseen": for the sweeps of each data set, the constants
that a small grid finds best on the other data sets alone. One of them is the weight of the sweep's own
trend beside the decline that all share. "inside": whether the interval given holds the sweep's best.
With --every 2 a sweep has only each second of its rates, from the first or, with --after 1, the second on.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from workup.finding import Finding
from workup.judge import horizon, learning_rate


def sweeps(
    folder: Path, every: int = 1, after: int = 0
) -> Iterator[tuple[str, pd.DataFrame, dict[str, pd.DataFrame], int]]:
    """(name, runs by lr, {horizon: trials with curves}, steps of the whole run) of each sweep."""
    runs = pd.read_parquet(folder / "runs.parquet")
    first = dict(list(pd.read_parquet(folder / "first_steps.parquet").groupby("run")))
    whole = dict(list(pd.read_parquet(folder / "whole_run.parquet").groupby("run")))
    for (problem, optimizer), group in runs[runs.seed == 42].groupby(["problem", "optimizer"]):
        group = group.sort_values("lr").iloc[after::every]
        steps = int(group.steps_logged.iloc[0])
        early = [first[r].loss.to_numpy(float) for r in group.run]
        tenth = [whole[r].loss_median[whole[r].step < 0.1 * steps].to_numpy(float) for r in group.run]
        tables = {"10%": _trials(group, early, tenth), "2,000 steps": _trials(group, early, early)}
        yield f"{problem} {optimizer}", group.set_index("lr").sort_index(), tables, steps


def _trials(group: pd.DataFrame, early: list[np.ndarray], curves: list[np.ndarray]) -> pd.DataFrame:
    ends = [np.mean(c[-max(1, len(c) // 10) :]) for c in curves]
    starts = [c[0] for c in early]
    return pd.DataFrame({"lr": group.lr.to_numpy(), "final": ends, "initial": starts, "loss": curves})


def regret(runs: pd.DataFrame, lr: float | None) -> float:
    """Of the tried rate nearest to ``lr``; NaN for no rate, inf for one whose run is not finite at its end."""
    if lr is None:
        return np.nan
    row = runs.iloc[int(np.argmin(np.abs(np.log(runs.index / lr))))]
    best = runs.final_train.min()
    value = (row.final_train - best) / (runs.first_train.median() - best)
    return float(value) if np.isfinite(value) else np.inf


#: What is chosen among for the data set left out: as good, margin to what breaks, decline, the own trend's weight.
GRID = {"WITHIN": (0.01, 0.02, 0.03), "NEAR": (2.0, 4.0), "DECLINE": (0.3, 0.4, 0.5, 0.6), "own": (0.0, 0.25, 0.5)}
#: The regrets that a choice should not exceed.
BARS = {"10%": 0.03, "2,000 steps": 0.10}


def carried(trials: pd.DataFrame, steps: int, span: int) -> dict[tuple[float, ...], float | None]:
    """The rate that is carried to, by the constants in the order of ``GRID``."""
    ours, rates = (horizon.WITHIN, horizon.NEAR), {}
    for horizon.WITHIN, horizon.NEAR in itertools.product(GRID["WITHIN"], GRID["NEAR"]):
        found = learning_rate.carry(trials, steps, steps=span)
        for decline, own in itertools.product(GRID["DECLINE"], GRID["own"]):
            constants = horizon.WITHIN, horizon.NEAR, decline, own
            rates[constants] = with_decline(found, steps / span, decline, own) if found.is_conclusive else None
    horizon.WITHIN, horizon.NEAR = ours
    return rates


def with_decline(found: Finding, ratio: float, decline: float, own: float) -> float:
    """The finding's rate by another decline, drawn towards the sweep's own trend by the weight ``own``."""
    fall = decline + own * (np.clip(found.evidence["trend"], 0, 1) - decline)
    return float(found.evidence["from"] * ratio**-fall)


def cost(found: pd.DataFrame) -> float:
    """Mean regret in units of its bar, at most ten of them; "cannot tell" costs what the bar allows."""
    share = found["regret"] / found["horizon"].map(BARS)
    return float(share.clip(upper=10.0).fillna(1.0).mean())


def unseen(tried: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Each data set's sweeps under the constants chosen on the other data sets."""
    data = tried["sweep"].str.split("_").str[0]
    for name in data.unique():
        best = tried[data != name].groupby("constants")[["horizon", "regret"]].apply(cost).idxmin()
        print(f"Without {name}: " + ", ".join(f"{k} {v:g}" for k, v in zip(GRID, best, strict=True)))
        yield tried[(data == name) & (tried["constants"] == best)].assign(who="unseen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--after", type=int, default=0)
    given = parser.parse_args()
    rows, tried = [], []
    for name, runs, tables, steps in sweeps(given.folder, given.every, given.after):
        for at, trials in tables.items():
            span, best = min(2000, steps) if at != "10%" else steps // 10, runs.final_train.idxmin()
            about_run = {"horizon": at, "sweep": name, "best": best}
            leads = learning_rate.judge(trials.drop(columns="loss")).value
            rows.append(about_run | {"who": "leader", "lr": leads, "regret": regret(runs, leads)})
            ours = learning_rate.carry(trials, steps, steps=span)
            low, high = ours.interval or (np.nan, np.nan)
            about = {"low": low, "high": high, "inside": low <= best <= high, "sure": ours.confidence}
            rows.append(about_run | {"who": "workup", "lr": ours.value, "regret": regret(runs, ours.value)} | about)
            for constants, lr in carried(trials, steps, span).items():
                tried.append(about_run | {"constants": constants, "lr": lr, "regret": regret(runs, lr)})
    found = pd.concat([pd.DataFrame(rows), *unseen(pd.DataFrame(tried))], ignore_index=True)
    key = ["horizon", "sweep", "best"]
    shown = found.pivot(index=key, columns="who", values=["lr", "regret"])
    shown.columns = [f"{what} {who}" for what, who in shown.columns]
    shown = shown.join(found[found.who == "workup"].set_index(key)[["low", "high", "inside", "sure"]])
    print(shown.to_string(float_format="{:.3g}".format))
    for (at, who), part in found.groupby(["horizon", "who"]):
        lost = part["regret"].dropna()
        inside = part.loc[part["low"].notna(), "inside"]
        print(
            f"{at} {who}: median {lost.median():.2%}, worst {lost.max():.2%}, diverge {np.isinf(lost).sum()}, "
            f"cannot tell {len(part) - len(lost)} of {len(part)}"
            + (f", interval holds the best {inside.astype(bool).sum()} of {len(inside)}" if len(inside) else "")
        )


if __name__ == "__main__":
    main()
