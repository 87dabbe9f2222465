"""What does a rate chosen from the start of a sweep cost by its end?

    python tests/benchmarks/regret.py FOLDER

FOLDER holds real sweeps at constant learning rates as runs.parquet, first_steps.parquet and
whole_run.parquet (run, step, loss or loss_median; cut from the DeepOBS baselines, see
tests/data/README.md). From the first tenth of each sweep's run, and from its first 2,000 steps,
a rate is chosen; regret = (its final training loss - the sweep's best) / (initial loss - best).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from workup.judge import learning_rate


def sweeps(folder: Path) -> Iterator[tuple[str, pd.DataFrame, dict[str, pd.DataFrame], int]]:
    """(name, runs by lr, {horizon: trials with curves}, steps of the whole run) of each sweep."""
    runs = pd.read_parquet(folder / "runs.parquet")
    first = dict(list(pd.read_parquet(folder / "first_steps.parquet").groupby("run")))
    whole = dict(list(pd.read_parquet(folder / "whole_run.parquet").groupby("run")))
    for (problem, optimizer), group in runs[runs.seed == 42].groupby(["problem", "optimizer"]):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    rows = []
    for name, runs, tables, steps in sweeps(parser.parse_args().folder):
        for horizon, trials in tables.items():
            span = min(2000, steps) if horizon != "10%" else steps // 10
            leads = learning_rate.judge(trials.drop(columns="loss")).value
            carried = learning_rate.carry(trials, steps, steps=span)
            told = {"sweep": name, "horizon": horizon, "best": runs.final_train.idxmin()}
            told |= {"leader": leads, "regret_leader": regret(runs, leads)}
            told |= {"workup": carried.value, "regret": regret(runs, carried.value)}
            told["within"] = carried.told and carried.interval[0] * 0.99 <= told["best"] <= carried.interval[1] * 1.01
            rows.append(told)
    found = pd.DataFrame(rows)
    print(found.sort_values(["horizon", "sweep"]).to_string(index=False, float_format="{:.3g}".format))
    for horizon, part in found.groupby("horizon"):
        for who, column in (("leader", "regret_leader"), ("workup", "regret")):
            told = part[column].dropna()
            print(
                f"{horizon} {who}: median {told.median():.2%}, worst {told.max():.2%}, "
                f"cannot tell {part[column].isna().sum()} of {len(part)}"
            )


if __name__ == "__main__":
    main()
