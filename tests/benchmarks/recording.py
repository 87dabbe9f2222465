"""What recording costs: the whole of train() against the bare PyTorch loop, paired in one run, on one thread.

    python -m tests.benchmarks.recording [workload ...]

Both loops build the same model, draw the same batches through the same loader and take
equally many steps; they alternate for about a minute, and a round's ratio is that of neighbours.
Printed: the median ratio and its quartiles, by the clock and by the CPU time of the process (on a
busy machine only the second says much), and what the gradient's norm alone takes of a bare step.
Marks: 1.02 on digits-resnet and text-transformer, 1.05 on digits-mlp, whose step takes less than a millisecond.
"""

import statistics
import sys
import time

import torch

from workup import Trial, load
from workup.measure import data
from workup.measure.train import JOINED, grad_norm, train

SECONDS, LEAST = 60, 15
STEPS = {"digits-mlp": 600, "digits-resnet": 60, "text-transformer": 25}
MARK = {"digits-mlp": 1.05, "digits-resnet": 1.02, "text-transformer": 1.02}


def bare(workload, trial):
    """The loop a user writes, and nothing else; returns the model with its last gradients."""
    torch.manual_seed(trial.seed)
    model = workload.build_model().train()
    optimizer = workload.optimizer(model.parameters(), trial.lr)
    batches = data.batches(workload, trial.batch_size, seed=trial.seed, device="cpu")
    for _ in range(trial.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model, next(batches)).mean()
        loss.backward()
        optimizer.step()
    return model


def seconds(run, *args):
    """(by the clock, of the CPU)"""
    start, used = time.perf_counter(), time.process_time()
    run(*args)
    return time.perf_counter() - start, time.process_time() - used


def rounds(workload, trial):
    """((clock, CPU) of the bare loop, the same of the recorded one) a round."""
    bare(workload, trial), train(workload, trial)
    found, began = [], time.monotonic()
    while len(found) < LEAST or time.monotonic() - began < SECONDS:
        pair = [bare, train] if len(found) % 2 else [train, bare]
        took = {run: seconds(run, workload, trial) for run in pair}
        found.append((took[bare], took[train]))
    return found


def norm_seconds(workload, trial):
    """The least CPU time that the norm of a whole gradient takes, as train() takes it."""
    params = list(bare(workload, trial).parameters())
    joined = sum(p.numel() for p in params) <= JOINED * len(params)
    repeated = [seconds(lambda: [grad_norm(params, joined=joined) for _ in range(100)])[1] for _ in range(30)]
    return min(repeated) / 100


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def rows(names=tuple(STEPS)):
    """A line of the table a workload: name, figure, mark."""
    for name in names:
        workload = load(name)
        trial = Trial(lr=workload.lr / 10, steps=STEPS.get(name, 50), batch_size=workload.batch_size)
        found = rounds(workload, trial)
        clock, cpu = ([recorded[k] / plain[k] for plain, recorded in found] for k in range(2))
        step = statistics.median(plain[1] for plain, _ in found) / trial.steps
        norm = norm_seconds(workload, trial) / step
        figure = (
            f"CPU time x {quartiles(cpu)}, clock x {quartiles(clock)}, {len(found)} rounds; "
            f"a bare step takes {1000 * step:.2f} ms, the norm alone {norm:.1%} of that"
        )
        yield f"recording, {name}", figure, f"at most {MARK[name]}" if name in MARK else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows(tuple(sys.argv[1:]) or tuple(STEPS)):
        print(*row, sep="  |  ", flush=True)
