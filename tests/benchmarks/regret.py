"""What does a rate chosen from the start of a sweep cost by its end?

    python tests/benchmarks/regret.py FOLDER [--every 2 --after 1]

FOLDER holds real sweeps at constant learning rates as runs.parquet, first_steps.parquet and
whole_run.parquet (run, step, loss or loss_median; cut from the DeepOBS baselines, see
tests/data/README.md). From the first tenth of each sweep's run, and from its first 2,000 steps,
a rate is chosen; regret = (its final training loss - the sweep's best) / (initial loss - best).
The carry's constants stem from these sweeps: "workup" in the table is a fit. "unseen" is the test:
for the sweeps of each data set, constants chosen by the same figures on the other data sets alone.
With --every 2 a sweep has only each second of its rates, from the first or, with --after 1, the second on.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from workup.judge import learning_rate


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


#: What is chosen among for the data set left out, and the regrets that a choice should not exceed (the aim).
WITHIN, DECLINE = (0.003, 0.01, 0.03), (0.0, 0.1, 0.15, 0.2, 0.25, 0.3)
BARS = {"10%": 0.03, "2,000 steps": 0.10}
OURS = learning_rate.WITHIN, learning_rate.DECLINE


def carried(trials: pd.DataFrame, steps: int, span: int) -> dict[tuple[float, float], float | None]:
    """The rate that is carried to, by the constants (WITHIN, DECLINE)."""
    found = {}
    learning_rate.DECLINE = 0.0
    for learning_rate.WITHIN in WITHIN:
        lr = learning_rate.carry(trials, steps, steps=span).value
        for decline in DECLINE:
            found[learning_rate.WITHIN, decline] = None if lr is None else lr * (steps / span) ** -decline
    return found


def cost(found: pd.DataFrame) -> float:
    """Mean regret in units of its bar, at most ten of them; "cannot tell" costs what the bar allows."""
    share = found["regret"] / found["horizon"].map(BARS)
    return float(share.clip(upper=10.0).fillna(1.0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--after", type=int, default=0)
    given = parser.parse_args()
    rows, tried = [], []
    for name, runs, tables, steps in sweeps(given.folder, given.every, given.after):
        for horizon, trials in tables.items():
            span = min(2000, steps) if horizon != "10%" else steps // 10
            told = {"sweep": name, "horizon": horizon, "best": runs.final_train.idxmin()}
            leads = learning_rate.judge(trials.drop(columns="loss")).value
            rows.append(told | {"who": "leader", "lr": leads, "regret": regret(runs, leads)})
            for constants, lr in carried(trials, steps, span).items():
                tried.append(told | {"constants": constants, "lr": lr, "regret": regret(runs, lr)})
    every = pd.DataFrame(tried)
    every["data"] = every["sweep"].str.split().str[0]
    for data in every["data"].unique():
        seen = every[every["data"] != data].groupby("constants")[["horizon", "regret"]].apply(cost)
        print(f"Constants without {data}: (WITHIN, DECLINE) = {seen.idxmin()}")
        rows += (
            every[(every["data"] == data) & (every["constants"] == seen.idxmin())]
            .assign(who="unseen")
            .to_dict("records")
        )
    rows += every[every["constants"] == OURS].assign(who="workup").to_dict("records")
    found = pd.DataFrame(rows)
    shown = found.pivot(index=["horizon", "sweep", "best"], columns="who", values=["lr", "regret"])
    print(shown.to_string(float_format="{:.3g}".format))
    for (horizon, who), part in found.groupby(["horizon", "who"]):
        regrets = part["regret"].dropna()
        figures = f"median {regrets.median():.2%}, worst {regrets.max():.2%}"
        print(f"{horizon} {who}: {figures}, cannot tell {len(part) - len(regrets)} of {len(part)}")


if __name__ == "__main__":
    main()
