"""Learning rates that range tests suggest, beside a sweep's, judged by an exhaustive sweep of longer runs.

    python tests/benchmarks/range_tests.py [workload ...]

The rules of fastai, Lightning and torch-lr-finder are re-stated from their sources with their
defaults: one run of 100 steps with an exponentially rising rate. Workup sweeps rates for fewer steps
than the truth (``judge``) and carries the best to its horizon (``carry``). Regret is taken there, with
other initial weights and batches: (final loss at the nearest rate - best) / (initial loss - best).
"""

import argparse

import numpy as np
import pandas as pd
import torch

from workup import Trial, load
from workup.judge import learning_rate
from workup.measure.data import batches
from workup.measure.train import train
from workup.workloads import BUILT_IN

RATES = [float(f"{10**k:.4g}") for k in np.arange(-4, 1.01, 0.25)]
#: Small enough for every rate over 1,500 steps, from sweeps of 300; the others: every second rate, 400 from 150.
SMALL = {"digits-mlp", "diabetes-regression", "breast-cancer-imbalanced", "relu-mlp-large-init"}


def range_test(workload, *, low, high, steps=100, beta, stop, seed=0):
    """(rates, losses smoothed by a debiased average) of a range test that stops at ``stop`` times its best loss."""
    torch.manual_seed(seed)
    model = workload.build_model().train()
    optimizer = workload.optimizer(model.parameters(), low)
    drawn = batches(workload, workload.batch_size, seed=seed, device="cpu")
    rates, losses, mean, best = [], [], 0.0, np.inf
    for i in range(steps):
        lr = low * (high / low) ** (i / (steps - 1))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = workload.loss(model, next(drawn)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = beta * mean + (1 - beta) * float(loss.detach())
        smooth = mean / (1 - beta ** (i + 1))
        rates.append(lr)
        losses.append(smooth)
        best = min(best, smooth)
        if i > 1 and not smooth <= stop * best:
            break
    return np.array(rates), np.array(losses)


def valley(rates, losses):
    """fastai: halfway along the longest decreasing subsequence."""
    n, end, start = len(losses), 0, 0
    longest = [1] * n
    for i in range(1, n):
        for j in range(i):
            if losses[i] < losses[j] and longest[i] < longest[j] + 1:
                longest[i] = longest[j] + 1
            if longest[end] < longest[i]:
                end, start = i, i - longest[i]
    third = (end - start) / 3
    return rates[start + int(third) + int(third / 2)]


def slide(rates, losses, *, apart=15, threshold=0.005):
    """fastai: from the right, the first stretch over which the slope hardly changes."""
    slope = np.gradient(losses)
    right, left = -1, -1 - apart
    found = rates[left]
    while left >= -len(losses) and abs(slope[right] - slope[left]) > threshold:
        found = rates[left]
        right, left = right - 1, left - 1
    return found


def suggestions(workload):
    """{rule: rate} of the six range-test rules."""
    lr, loss = range_test(workload, low=1e-7, high=10, beta=0.98, stop=4)
    lr, loss = lr[10:-5], loss[10:-5]
    found = {
        "fastai valley": valley(lr, loss),
        "fastai slide": slide(lr, loss),
        "fastai minimum": lr[np.argmin(loss)] / 10,
        "fastai steep": lr[np.argmin(np.diff(loss) / np.diff(np.log(lr)))],
    }
    lr, loss = range_test(workload, low=1e-8, high=1, beta=0.98, stop=4)
    found["Lightning"] = lr[10:-1][np.argmin(np.gradient(loss[10:-1], lr[10:-1]))]
    lr, loss = range_test(workload, low=1e-7, high=10, beta=0.95, stop=5)
    found["torch-lr-finder"] = lr[10:-5][np.argmin(np.gradient(loss[10:-5]))]
    return found


def sweep(workload, steps, *, seed, rates):
    """The table that ``learning_rate`` judges."""
    rows = []
    for lr in rates:
        trace = train(workload, Trial(lr=lr, steps=steps, batch_size=workload.batch_size, seed=seed))
        loss = trace.steps.loss.to_numpy()
        final = loss[-steps // 10 :].mean() if len(loss) == steps else np.nan
        rows.append({"lr": lr, "status": trace.status, "final": final, "loss": loss})
    return rows


def regrets(name):
    """A row a rule: the rate it suggests, and its regret; inf where a run at the nearest rate diverges."""
    workload, small = load(name), name in SMALL
    steps, rates = (1500, RATES) if small else (400, RATES[::2])
    truth = sweep(workload, steps, seed=1, rates=rates)
    finals = np.array([r["final"] for r in truth])
    best, start = np.nanmin(finals), np.median([r["loss"][0] for r in truth])
    found = {"best": rates[int(np.nanargmin(finals))], **suggestions(workload)}
    short = sweep(workload, 300 if small else 150, seed=0, rates=RATES[::2])
    found["workup judge"] = learning_rate.judge(short).value
    found["workup carry"] = learning_rate.carry(short, steps).value
    rows = []
    for rule, lr in found.items():
        loss = np.nan
        if lr is not None:
            loss = finals[np.argmin(np.abs(np.log(rates) - np.log(lr)))]
            loss = loss if np.isfinite(loss) else np.inf
        rows.append({"workload": name, "rule": rule, "lr": lr, "regret": (loss - best) / (start - best)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(BUILT_IN))
    torch.set_num_threads(1)
    rows = []
    for name in parser.parse_args().workloads:
        rows += regrets(name)
        print(pd.DataFrame(rows[-9:]).to_string(index=False, header=False, float_format="{:.3g}".format), flush=True)
    found = pd.DataFrame(rows)
    print(found.pivot(index="workload", columns="rule", values="regret").T.to_string(float_format="{:.1%}".format))
    by_rule = found.groupby("rule", sort=False)["regret"]
    print(by_rule.agg(["median", "max", "count"]).to_string(float_format="{:.1%}".format))


if __name__ == "__main__":
    main()
