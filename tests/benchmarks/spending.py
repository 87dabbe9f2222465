"""What the learning-rate search spends against training every rate, and whether it finds the same lr*.

    python -m tests.benchmarks.spending [--sweeps FOLDER] [--kept FOLDER] [workload ...]

Built-in workloads and those of kinds.py are trained: every rate a factor 10^0.25 apart from a hundredth to a hundred
times its own, two seeds, 300 steps, against notebook 04's steps on ``standard``, its range test included; --kept keeps
the trials there, so that a second run only adds what it lacks. With --sweeps the search is replayed on real sweeps of
36 rates (as tests/benchmarks/regret.py reads them), at 300 and 2,000 steps, from the usual default rate and from a
tenth and ten times of it; they hold no range test. Printed: the share of trial-steps spent, and lr* against that of
all rates. Marks: 25% of the steps, and lr* within a grid step in 5 of 6. The search's numbers (judge/search.py) were
chosen on the real sweeps and on built-in workloads: only those named UNSEEN had no part in that.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import workup
from workup.experiments import learning_rate as experiment
from workup.judge import learning_rate, search

UNSEEN = ("text-transformer", "residual-unnormalised", "post-norm-mlp")
WORKLOADS = ("digits-mlp", "digits-resnet", "diabetes-regression", "tests.benchmarks.kinds:autoencoder")
WORKLOADS += ("relu-mlp-large-init", UNSEEN[0])
COARSE, DECADE = 4, 5  # steps of FOLDER's grid, 10^0.2


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
    tried = {i for i in (middle - DECADE, middle, middle + COARSE) if 0 <= i < len(rates)}
    for step, factor in ((search.wider, 10 ** (0.2 * COARSE)), (search.finer, 10**0.2)):
        for _ in range(experiment.ROUNDS):
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
                yield row(f"{name}, {steps} steps, from {start:g}", ours, every, spent / whole, 0.2)


def trained(reference, kept):
    """Notebook 04's own steps against every rate; both from one study, so that no trial is trained twice."""
    name = reference.rpartition(":")[2]
    about = {"workload": reference, "study": f"{kept}/{name}", "device": "cpu", "executor": "ensemble"}
    session = workup.start("04_learning_rate", about)
    ranged = session.run(experiment.range_test(session))
    ours = session.run(experiment.plan(session, ranged))
    ours = experiment.refine(session, experiment.widen(session, ours))
    grid = [session.workload.lr * 10 ** (0.25 * k) for k in range(-8, 9)]
    every = session.run([experiment.at(ours[0].trial, lr, seed=seed) for lr in grid for seed in (0, 1)])
    spent, whole = (sum(len(trace.steps) for trace in traces) for traces in (ranged + ours, every))
    return row(f"{name}, trained", experiment.table(ours), experiment.table(every), spent / whole, 0.25)


def row(name, ours, every, share, step):
    found, best = learning_rate.judge(ours), learning_rate.judge(every)
    apart = (
        abs(np.log10(found.value / best.value)) / step
        if found.is_conclusive and best.is_conclusive
        else np.inf * (found.is_conclusive != best.is_conclusive)
    )
    region = best.evidence.get("region", [np.nan])
    as_good = bool(found.is_conclusive and region[0] * 0.99 <= found.value <= region[-1] * 1.01)
    return {"sweep": name, "best": best.value, "found": found.value, "apart": apart, "as_good": as_good, "share": share}


def rows(folder=None, workloads=WORKLOADS, kept=None):
    """A line of the table a source: name, figure, mark."""
    with tempfile.TemporaryDirectory() as aside:
        done = [trained(name, kept or aside) for name in workloads]
    table = pd.DataFrame([*(replayed(folder) if folder else ()), *done])
    print(table.to_string(index=False, float_format="{:.3g}".format))
    for kind, part in table.groupby(table.sweep.str.endswith("trained")):
        near, share = (part.apart < 1.2).sum(), part.share.mean()
        yield (
            "search, trained" if kind else "search, replayed",
            f"{share:.0%} of the steps ({part.share.min():.0%} to {part.share.max():.0%}); lr* within a grid step in "
            f"{near} of {len(part)}, within it or statistically as good in {((part.apart < 1.2) | part.as_good).sum()}",
            "at most 25%, 5 of 6" if kind else "at most 40%, 19 of 20",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--sweeps", type=Path, metavar="FOLDER")
    parser.add_argument("--kept", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    for row in rows(given.sweeps, given.workloads, given.kept):
        print(*row, sep="  |  ", flush=True)
