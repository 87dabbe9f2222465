"""Saturation called by sweeps of three rounds, against an exhaustive measurement: how often the truth lies inside.

    OMP_NUM_THREADS=1 python tests/benchmarks/throughput.py [workload ...]

Ten sweeps of three rounds, and thirty rounds of the truth, on each of three workloads. A round of the
truth is measured after each round of a sweep, since a machine's mood changes within minutes: what is
compared is then the sweep's few rounds with many, and not one minute with another. The truth is the
definition read off the medians of its thirty rounds: the smallest size that no larger one outruns by more
than a tenth; the shares that the sizes reach are printed too, since near the mark a hair decides. The data is
taken several times over, for sizes at which even a small network saturates. Two to five minutes a workload
on an idle machine.
"""

import sys

import torch

from workup import load
from workup.judge import batch_size as judge
from workup.measure import throughput
from workup.measure.train import train

SIZES = {
    "digits-mlp": [2**k for k in range(3, 13)],
    "digits-resnet": [2**k for k in range(2, 10)],
    "text-transformer": [2**k for k in range(8)],
}
SECONDS, SWEEPS, ROUNDS = 0.1, 10, 3


def measured(workload, known, seed):
    """A round: a stretch at every size."""
    trials = throughput.stretches(known, lr=workload.lr / 1000, seed=seed, seconds=SECONDS)
    return [train(workload, trial) for trial in trials]


def compare(name):
    workload = load(name)
    if len(workload.train_data) < 20_000:
        workload = throughput.wrapped(workload, SIZES[name][-1])
    pilot = throughput.table(measured(workload, dict.fromkeys(SIZES[name], 0.01), 10**6))
    known = dict(zip(pilot["batch_size"], pilot["step_seconds"], strict=True))
    sweeps, exhaustive = [[] for _ in range(SWEEPS)], []
    for k in range(SWEEPS * ROUNDS):
        sweeps[k // ROUNDS] += measured(workload, known, k)
        exhaustive += measured(workload, known, 10**5 + k)
    table = judge.speeds(throughput.table(exhaustive)).set_index("batch_size")
    shares = table["examples_per_second"] / table["examples_per_second"].max()
    truth = int((shares >= 1 - judge.GAIN).idxmax())
    called = [judge.saturation(throughput.table(traces)) for traces in sweeps]
    held = sum(found.interval[0] <= truth <= found.interval[1] for found in called)
    print(f"\n{name}: throughput as a share of the highest: {shares.round(3).to_dict()}")
    print(f"  the truth ({truth}) in the interval: {held} of {SWEEPS}; called {[found.value for found in called]}")
    print(f"  intervals {[tuple(found.interval) for found in called]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SIZES:
        compare(name)
