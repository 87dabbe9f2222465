"""What a sweep costs by executor, against the plain loop with as many threads as there are cores: 13 rates, paired.

    python -m tests.benchmarks.sweep [steps] [workload or executor ...]

Each run is a fresh process, as a notebook's kernel is, timed from the first trial's start to the last
one's end: measuring steps, starting workers and all. The plain loop stands beside the others in every
round, and a ratio is that of one round. Printed: the median of the plain loop's seconds over the
executor's, its range, the largest relative difference of a loss at rates up to the workload's own (at the
edge of stability rounding grows without bound), and the most memory its processes held together.
Marks, at 300 steps on two cores: auto 1.8 on the digits, 1.25 on the transformer.
"""

import pickle
import statistics
import subprocess
import sys
import time

import numpy as np
import psutil

from workup import Trial, load

ROUNDS, STEPS = 3, 150
WORKLOADS = ("digits-mlp", "digits-resnet", "text-transformer")
COMPARED = ("ensemble", "processes", "auto")


def sweep(workload, steps):
    rates = workload.lr * 10 ** np.linspace(-1.5, 1.5, 13)
    return [Trial(lr=float(lr), steps=steps, batch_size=workload.batch_size) for lr in rates]


def one(name, executor, steps):
    """In a process of its own: (seconds, {index: (lr, losses, executor)}, notes) to its standard output."""
    from workup.measure.executors import execute
    from workup.measure.train import train

    workload, notes = load(name), []
    trials = sweep(workload, steps)
    train(workload, trials[0], first=2)  # what any first trial imports
    start = time.perf_counter()
    found = dict(execute(workload, trials, executor=executor, reference=name, note=notes.append))
    seconds = time.perf_counter() - start
    summary = {i: (t.trial.lr, t.steps.loss.to_numpy(), t.versions["executor"]) for i, t in found.items()}
    sys.stdout.buffer.write(pickle.dumps((seconds, summary, notes)))


def run(name, executor, steps):
    """(seconds, traces, notes, peak bytes of the process and its children)."""
    command = [sys.executable, "-m", "tests.benchmarks.sweep", "--one", name, executor, str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, held(process.pid))
        time.sleep(1.0)
    assert process.returncode == 0, f"{name} by {executor} failed"
    return (*pickle.loads(process.stdout.read()), peak)


def held(pid):
    """Bytes of a process and all below it; what they share counts once."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += getattr(process.memory_full_info(), "pss", process.memory_info().rss)
    except psutil.Error:
        pass  # one ended meanwhile
    return total


def apart(plain, other, most):
    """The largest relative difference of a loss at rates up to ``most``."""
    calm = [i for i, (lr, *_) in plain.items() if lr <= 1.01 * most]
    return max(float(np.abs(other[i][1] / plain[i][1] - 1).max()) for i in calm)


def rows(names=WORKLOADS, steps=STEPS, rounds=ROUNDS, compared=COMPARED):
    """A line of the table a workload and executor: name, figure, why."""
    for name in names:
        seen = {executor: [] for executor in compared}
        for _ in range(rounds):
            plain, theirs, _, room = run(name, "serial", steps)
            for executor in compared:
                took, ours, notes, peak = run(name, executor, steps)
                seen[executor].append((plain / took, apart(theirs, ours, load(name).lr), peak / room, ours, notes))
        for executor, found in seen.items():
            ratios = [each[0] for each in found]
            used = ", ".join(sorted({kind for *_, kind in found[-1][3].values()}))
            yield (
                f"sweep of 13 x {steps}, {name}, {executor} ({used})",
                f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}; the plain "
                f"loop last took {plain:.1f} s), losses within {max(each[1] for each in found):.1e}, "
                f"memory x {statistics.median(each[2] for each in found):.1f}",
                "; ".join(found[-1][4]),
            )


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--one"]:
        one(given[1], given[2], int(given[3]))
    else:
        steps = int(given.pop(0)) if given and given[0].isdecimal() else STEPS
        compared = tuple(each for each in given if each in COMPARED) or COMPARED
        names = tuple(each for each in given if each not in COMPARED) or WORKLOADS
        for row in rows(names, steps, compared=compared):
            print(*row, sep="  |  ", flush=True)
