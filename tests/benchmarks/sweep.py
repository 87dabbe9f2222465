"""What a sweep costs by executor, against the plain loop: 13 rates, paired in one run.

    python -m tests.benchmarks.sweep [steps] [workload ...]

Executors alternate, and a round's ratio is that of neighbours. Printed: the median of the plain
loop's seconds over the executor's, its range, and the largest relative difference of a loss at
rates up to the workload's own: at the edge of stability rounding grows without bound. Run with
OMP_NUM_THREADS=1 on a busy machine.
"""

import statistics
import sys
import time

import numpy as np

from workup import Trial, load
from workup.measure.executors import execute

ROUNDS, STEPS = 3, 300
WORKLOADS = ("digits-mlp", "digits-resnet", "text-transformer")
COMPARED = ("ensemble", "processes", "auto")


def sweep(workload, steps):
    rates = workload.lr * 10 ** np.linspace(-1.5, 1.5, 13)
    return [Trial(lr=float(lr), steps=steps, batch_size=workload.batch_size) for lr in rates]


def timed(name, executor, steps, notes):
    workload = load(name)
    start = time.perf_counter()
    found = dict(execute(workload, sweep(workload, steps), executor=executor, reference=name, note=notes.append))
    return time.perf_counter() - start, found


def apart(plain, other, most):
    """The largest relative difference of a loss at rates up to ``most``."""
    calm = [i for i, trace in plain.items() if trace.trial.lr <= 1.01 * most]
    return max(float((other[i].steps.loss / plain[i].steps.loss - 1).abs().max()) for i in calm)


def rows(names=WORKLOADS, steps=STEPS, rounds=ROUNDS, compared=COMPARED):
    """A line of the table a workload and executor: name, figure, mark."""
    for name in names:
        timed(name, "serial", 2, [])
        for executor in compared:
            ratios, differences, notes = [], [], []
            for _ in range(rounds):
                (plain, theirs), (took, ours) = (timed(name, each, steps, notes) for each in ("serial", executor))
                ratios.append(plain / took)
                differences.append(apart(theirs, ours, load(name).lr))
            low, high, middle = min(ratios), max(ratios), statistics.median(ratios)
            used = sorted({trace.versions["executor"] for trace in ours.values()})
            figure = f"{middle:.2f} times as fast ({low:.2f} to {high:.2f}), losses within {max(differences):.1e}"
            yield (
                f"sweep of 13 × {steps}, {name}, {executor} ({', '.join(used)})",
                figure,
                "auto: at least 1.8 on digits",
            )


if __name__ == "__main__":
    given = sys.argv[1:]
    steps = int(given.pop(0)) if given and given[0].isdecimal() else STEPS
    for row in rows(tuple(given) or WORKLOADS, steps):
        print(*row, sep="  |  ", flush=True)
