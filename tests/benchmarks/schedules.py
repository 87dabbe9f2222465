"""Short trials for a run whose rate decays: at a constant rate, or with the schedule compressed to their length?

    python -m tests.benchmarks.schedules [workload ...] [--steps 1500]

Truth: the final training loss of a run with a cosine schedule, at peak rates a factor 10^0.25 apart, the mean of two
seeds. The trials are a tenth as long, of two other seeds. From either kind a peak rate is carried to the
whole run with several declines: as the steps grow r-fold, by r ** -decline. regret = (final loss at the nearest
rate - best) / (initial loss - best); apart = decades above the best rate; inside: whether the carry's interval, for
a decline of 0, holds the best.
"""

import argparse
import dataclasses
import math

import numpy as np
import pandas as pd
import torch

from workup import Trial, Workload, load
from workup.judge import horizon
from workup.measure.train import train

WORKLOADS = ("digits-mlp", "diabetes-regression", "breast-cancer-imbalanced", "relu-mlp-large-init")
SHARE = 0.1
RATES = [float(f"{10**k:.4g}") for k in np.arange(-3.5, 0.01, 0.25)]
KINDS = {"compressed": "workload", "constant": "constant"}
DECLINES = (0.0, 0.25, 0.5)


def cosine(fraction: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * fraction))


def sweep(workload: Workload, steps: int, shape: str, seeds: tuple[int, ...]) -> pd.DataFrame:
    """The table that the carry judges, a row a rate and seed."""
    rows = []
    for seed in seeds:
        for lr in RATES:
            trial = Trial(lr=lr, steps=steps, batch_size=workload.batch_size, seed=seed, shape=shape)
            trace = train(workload, trial)
            loss = trace.steps.loss.to_numpy()
            final = loss[-steps // 10 :].mean() if len(loss) == steps else np.nan
            rows.append({"lr": lr, "seed": seed, "status": trace.status, "final": final, "loss": loss})
    return pd.DataFrame(rows)


def compared(name: str, steps: int) -> pd.DataFrame:
    """A row a kind of trials and decline: the rate carried to, its regret and distance."""
    workload = dataclasses.replace(load(name), schedule=cosine, max_train_steps=steps)
    truth = sweep(workload, steps, "workload", (1, 2))
    start = np.median([loss[0] for loss in truth["loss"]])
    finals = truth.groupby("lr")["final"].agg(lambda f: f.mean(skipna=False))
    best, rows = finals.min(), []
    for kind, shape in KINDS.items():
        found = horizon.carry(sweep(workload, int(SHARE * steps), shape, (0, 5)), steps, decaying=True)
        low, high = found.interval or (np.nan, np.nan)
        about_sweep = {
            "workload": name,
            "trials": kind,
            "leader": found.evidence.get("leader"),
            "best": finals.idxmin(),
        }
        about_sweep["inside"] = low <= about_sweep["best"] <= high
        for decline in DECLINES if found.is_conclusive else ():
            lr = found.value * SHARE**decline
            loss = finals.iloc[int(np.argmin(np.abs(np.log(finals.index / lr))))]
            away = {"decline": decline, "lr": lr, "apart": math.log10(lr / finals.idxmin())}
            rows.append(about_sweep | away | {"regret": (loss - best) / (start - best)})
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    for name in given.workloads:
        tables.append(compared(name, given.steps))
        print(tables[-1].to_string(index=False, header=len(tables) == 1, float_format="{:.3g}".format), flush=True)
    found = pd.concat(tables)
    for (kind, decline), part in found.groupby(["trials", "decline"]):
        print(
            f"{kind}, decline {decline:g}: regret mean {part.regret.mean():.2%}, worst {part.regret.max():.2%}, "
            f"{part.apart.mean():+.2f} decades from the best (off by {part.apart.abs().mean():.2f}), of {len(part)}"
        )


if __name__ == "__main__":
    main()
