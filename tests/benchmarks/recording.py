"""What recording costs: the whole of train() against the bare PyTorch loop, paired in one run.

    python -m tests.benchmarks.recording [workload ...]

Both loops build the same model, draw the same batches through the same loader and take
equally many steps; they alternate, and a round's ratio is that of neighbours. Printed: the
median ratio and its quartiles. The mark: 1.05 on digits-resnet, 1.02 on text-transformer.
"""

import statistics
import sys
import time

import torch

from workup import Trial, load
from workup.measure import data
from workup.measure.train import train

ROUNDS = 25
STEPS = {"digits-mlp": 1000, "digits-resnet": 100, "text-transformer": 50}
MARK = {"digits-resnet": 1.05, "text-transformer": 1.02}


def bare(workload, trial):
    """The loop a user writes, and nothing else."""
    torch.manual_seed(trial.seed)
    model = workload.build_model().train()
    optimizer = workload.optimizer(model.parameters(), trial.lr)
    batches = data.batches(workload, trial.batch_size, seed=trial.seed, device="cpu")
    for _ in range(trial.steps):
        loss = workload.loss(model, next(batches)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def seconds(run, *args):
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def ratios(name):
    workload = load(name)
    trial = Trial(lr=workload.lr / 10, steps=STEPS.get(name, 100), batch_size=workload.batch_size)
    bare(workload, trial), train(workload, trial)
    found = []
    for turn in range(ROUNDS):
        pair = [(bare, "bare"), (train, "recorded")]
        took = {label: seconds(run, workload, trial) for run, label in (pair if turn % 2 else pair[::-1])}
        found.append((took["recorded"] / took["bare"], took["bare"] / trial.steps))
    return found


def rows(names=tuple(STEPS)):
    """A line of the table a workload: name, figure, mark."""
    for name in names:
        found = ratios(name)
        low, middle, high = statistics.quantiles([ratio for ratio, _ in found], n=4)
        step = statistics.median(step for _, step in found)
        figure = f"{middle:.3f} ({low:.3f} to {high:.3f}), bare step {1000 * step:.2f} ms"
        yield f"recording, {name}", figure, f"at most {MARK[name]}" if name in MARK else ""


if __name__ == "__main__":
    for row in rows(tuple(sys.argv[1:]) or tuple(STEPS)):
        print(*row, sep="  |  ", flush=True)
