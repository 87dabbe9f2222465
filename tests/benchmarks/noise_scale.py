"""The critical batch size predicted from the gradient's noise, against the steps that a goal really took.

    python tests/benchmarks/noise_scale.py [workload ...]

At each size the learning rate is retuned over a grid of six; the goal is the evaluation loss that
today's settings reach in 200 steps. Prediction and experiment start from the same seed.
"""

import sys
import tempfile

import torch

from workup import start
from workup.experiments import batch_size as experiment
from workup.judge import batch_size as judge

SIZES = {"digits-mlp": (32, 64, 128, 256, 512), "breast-cancer-imbalanced": (16, 32, 64, 128, 256)}


def compare(name):
    with tempfile.TemporaryDirectory() as folder:
        session = start("02_batch_size", {"workload": name, "study": folder, "device": "cpu"})
        predicted = judge.critical(experiment.noise(session))
        reached = experiment.to_goal(session, SIZES[name])
    measured = judge.measured_critical(reached)
    print(f"\n{name}\n  predicted {predicted.value} {predicted.interval}: {predicted.summary}")
    print(f"  measured  {measured.value}: {measured.summary}")
    for size, rows in reached.groupby("batch_size"):
        steps = {float(row.lr): row.steps for row in rows.itertuples()}
        print(f"  {size:>6}  steps by learning rate: {steps}")
    if predicted.told and measured.told:
        print(f"  predicted / measured = {predicted.value / measured.value:.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or SIZES:
        compare(name)
