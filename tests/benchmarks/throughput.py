"""Saturation called by a standard sweep, against a far longer one: how often the truth lies in the interval.

    python tests/benchmarks/throughput.py [workload ...]

The truth is the size called from 15 rounds at every size; then ten sweeps of 3 rounds each.
"""

import sys

import torch

from workup import load
from workup.judge import batch_size as judge
from workup.measure import throughput
from workup.measure.train import train

SIZES = {
    "digits-mlp": [2**k for k in range(2, 11)],
    "digits-resnet": [2**k for k in range(2, 8)],
    "breast-cancer-imbalanced": [2**k for k in range(3, 9)],
}
SECONDS, REPEATS, ROUNDS, TRUTH_ROUNDS = 0.1, 10, 3, 15


def measured(workload, known, rounds, first):
    traces = []
    for seed in range(first, first + rounds):
        trials = throughput.stretches(known, lr=workload.lr / 1000, seed=seed, seconds=SECONDS)
        traces += [train(workload, trial) for trial in trials]
    return throughput.table(traces)


def compare(name):
    workload = load(name)
    known = dict.fromkeys(SIZES[name], 0.01)
    pilot = measured(workload, known, 1, 10**6)
    known = dict(zip(pilot["batch_size"], pilot["step_seconds"], strict=True))
    exhaustive = measured(workload, known, TRUTH_ROUNDS, 10**5)
    truth = judge.saturation(exhaustive)
    size = truth.value or truth.interval[1]
    called = [judge.saturation(measured(workload, known, ROUNDS, 100 * k)) for k in range(REPEATS)]
    held = sum(found.interval[0] <= size <= found.interval[1] for found in called)
    print(f"\n{name}: {truth.summary}")
    print(f"  the truth ({size}) in the interval: {held} of {REPEATS}; called {[found.value for found in called]}")
    print(f"  intervals {[tuple(found.interval) for found in called]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SIZES:
        compare(name)
