"""What the learning-rate search spends against training every rate, and whether it finds the same lr*.

    python -m tests.benchmarks.spending [FOLDER] [workload ...]

FOLDER holds real sweeps of 36 rates (as tests/benchmarks/regret.py reads them): they are replayed, at 300 and 2,000
steps, from the usual default rate and from a tenth and ten times of it. A built-in workload is trained: every rate a
factor 10^0.25 apart from a hundredth to a hundred times its own, two seeds, 300 steps, against notebook 04's steps on
``standard``. Printed: the share of trial-steps spent, and lr* against that of all rates. Marks: 40% of the steps, and
lr* within a grid step in 19 of 20. The search's one number (judge/search.py, LAG) was chosen on FOLDER's sweeps.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from workup.judge import learning_rate, search

WORKLOADS = ("digits-mlp", "residual-unnormalised", "relu-mlp-large-init", "diabetes-regression", "pre-norm-mlp")
COARSE = 3  # steps of FOLDER's grid, 10^0.6


def curves(folder):
    """(name, rates, losses of the first 2,000 steps by rate) of each sweep."""
    runs = pd.read_parquet(folder / "runs.parquet")
    first = dict(list(pd.read_parquet(folder / "first_steps.parquet").groupby("run")))
    for (problem, optimizer), group in runs[runs.seed == 42].groupby(["problem", "optimizer"]):
        group = group.sort_values("lr")
        yield f"{problem} {optimizer}", group.lr.to_numpy(), [first[run].loss.to_numpy(float) for run in group.run]


def trial(lr, losses, steps):
    losses = losses[:steps]
    bad = np.flatnonzero(~np.isfinite(losses))
    losses = losses[: bad[0] + 1] if len(bad) else losses
    end = float(np.mean(losses[-(steps // 10) :])) if not len(bad) else np.nan
    status = "diverged" if len(bad) else "finished"
    return {"lr": lr, "status": status, "final": end, "initial": losses[0], "loss": losses}


def replay(rates, losses, steps, start):
    """The trials that the search runs from the rate nearest ``start``."""
    near = lambda lr: int(np.abs(np.log(rates / lr)).argmin())  # noqa: E731
    middle = near(start)
    tried = {i for i in (middle - COARSE, middle, middle + COARSE) if 0 <= i < len(rates)}
    for step, factor in ((search.wider, 10 ** (0.2 * COARSE)), (search.finer, 10**0.2)):
        for _ in range(6):
            known = [trial(rates[i], losses[i], steps) for i in sorted(tried)]
            new = {near(lr) for lr in step(known, factor)} - tried
            if not new:
                break
            tried |= new
    return [trial(rates[i], losses[i], steps) for i in sorted(tried)]


def replayed(folder):
    for name, rates, losses in curves(folder):
        for steps in (300, 2000):
            steps = min(steps, max(map(len, losses)))
            every = [trial(*each, steps) for each in zip(rates, losses, strict=True)]
            default = 1e-3 if name.endswith("Adam") else 1e-2
            for start in (default / 10, default, default * 10):
                ours = replay(rates, losses, steps, start)
                spent, whole = (sum(len(each["loss"]) for each in trials) for trials in (ours, every))
                yield told(f"{name}, {steps} steps, from {start:g}", ours, every, spent / whole, 0.2)


def trained(name):
    """Notebook 04's own steps against every rate; both from one study, so that no trial is trained twice."""
    import workup
    from workup.experiments import learning_rate as experiment

    with tempfile.TemporaryDirectory() as folder:
        about = {
            "workload": name,
            "study": folder + "/study",
            "device": "cpu",
            "budget": "standard",
            "executor": "auto",
        }
        session = workup.start("04_learning_rate", about)
        first = experiment.plan(session)
        ours = experiment.refine(session, experiment.widen(session, session.run(first)))
        middle = first[len(first) // 2]
        grid = [middle.lr * 10 ** (0.25 * k) for k in range(-8, 9)]
        every = session.run([experiment.at(middle, lr, seed=seed) for lr in grid for seed in (0, 1)])
    spent, whole = (sum(len(trace.steps) for trace in traces) for traces in (ours, every))
    return told(f"{name}, trained", experiment.table(ours), experiment.table(every), spent / whole, 0.25)


def told(name, ours, every, share, step):
    found, best = learning_rate.judge(ours), learning_rate.judge(every)
    apart = (
        abs(np.log10(found.value / best.value)) / step
        if found.told and best.told
        else np.inf * (found.told != best.told)
    )
    region = best.evidence.get("region", [np.nan])
    as_good = bool(found.told and region[0] * 0.99 <= found.value <= region[-1] * 1.01)
    return {"sweep": name, "best": best.value, "found": found.value, "apart": apart, "as_good": as_good, "share": share}


def rows(folder=None, workloads=WORKLOADS):
    """A line of the table a source: name, figure, mark."""
    table = pd.DataFrame([*(replayed(folder) if folder else ()), *(trained(name) for name in workloads)])
    print(table.to_string(index=False, float_format="{:.3g}".format))
    for kind, part in table.groupby(table.sweep.str.endswith("trained")):
        near, share = (part.apart < 1.2).sum(), part.share.mean()
        yield (
            "search, trained" if kind else "search, replayed",
            f"{share:.0%} of the steps ({part.share.min():.0%} to {part.share.max():.0%}); lr* within a grid step in "
            f"{near} of {len(part)}, within it or statistically as good in {((part.apart < 1.2) | part.as_good).sum()}",
            "at most 40%, 19 of 20",
        )


if __name__ == "__main__":
    given = sys.argv[1:]
    place = Path(given.pop(0)) if given and Path(given[0]).is_dir() else None
    for row in rows(place, tuple(given) or WORKLOADS):
        print(*row, sep="  |  ", flush=True)
