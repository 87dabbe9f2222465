"""The critical batch size predicted from the gradient's noise, against the steps that a goal really took.

    python tests/benchmarks/noise_scale.py [workload ...]

At each size the learning rate is retuned over a grid of six; the goal is nine tenths of the fall that the
evaluation loss makes under today's settings in 200 steps (near the floor it is luck who reaches it first).
The sizes reach far below the critical one, where the steps double from one to the next. Prediction and
experiment start from the same seed.
"""

import sys
import tempfile

import torch

from workup import start
from workup.experiments import batch_size as experiment
from workup.judge import critical_size as judge

SIZES = {
    "digits-mlp": (8, 16, 32, 64, 128, 512),
    "breast-cancer-imbalanced": (2, 4, 8, 16, 64, 256),
    "diabetes-regression": (4, 8, 16, 32, 64, 256),
    "residual-unnormalised": (8, 16, 32, 64, 128, 512),
    "pre-norm-mlp": (8, 16, 32, 64, 128, 512),
}


def compare(name):
    with tempfile.TemporaryDirectory() as folder:
        session = start("02_batch_size", {"workload": name, "study": folder, "device": "cpu"})
        predicted = judge.critical(experiment.noise(session))
        reached = experiment.to_goal(session, SIZES[name])
    measured = judge.measured_critical(reached)
    for what, found in (("predicted", predicted), ("measured", measured)):
        low, high = found.interval or (0, float("inf"))
        print(f"{name}: {what} {found.value} ({low:.0f} to {high:.0f}): {found.summary}")
    for size, rows in reached.groupby("batch_size"):
        steps = {float(row.lr): row.steps for row in rows.itertuples()}
        print(f"  {size:>6}  steps by learning rate: {steps}")
    if measured.is_conclusive:
        low, high = predicted.interval
        held = "holds" if low <= measured.value <= high else "does not hold"
        ratio = measured.value / predicted.value if predicted.is_conclusive else float("nan")
        print(f"  the interval predicted {held} the size measured, at {ratio:.2f} of the noise scale", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SIZES:
        compare(name)
