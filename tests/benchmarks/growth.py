"""What a study costs as it grows: against its trials (10 to 10,000, of 300 steps), and against a trial's steps.

    python -m tests.benchmarks.growth [most trials] [most steps]

Printed, a row a size: opening the study, listing all its traces, resuming a sweep of 20 trials that are there, and
writing its report; then, a row a number of steps, keeping a trace, reading it, and judging its stability [s].
Mark: opening a study of 10,000 trials in at most 2 s.
"""

import contextlib
import io
import os
import sys
import tempfile
import time

import numpy as np
import pandas as pd

from workup import Study, Trace, Trial, load
from workup.experiments.session import Session
from workup.judge import stability
from workup.show.report import write_report
from workup.workload import fingerprint, trial_fingerprint

TRIALS, STEPS = (10, 100, 1_000, 10_000), (100, 1_000, 10_000, 100_000)


def clocked(function):
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def trace(trial):
    n = trial.steps
    loss = 2 * np.exp(-np.arange(n) / (n / 3)) * np.random.default_rng(0).lognormal(0, 0.1, n)
    columns = {"step": np.arange(n), "lr": trial.lr, "loss": loss, "grad_norm": loss, "clipped": False}
    timing = {"eval_loss": np.nan, "seconds": 1e-3, "data_seconds": 1e-4, "examples": trial.batch_size}
    return Trace(trial=trial, steps=pd.DataFrame({**columns, **timing}))


def grown(folder, workload, count):
    """A study of ``count`` finished trials: one trace written, the others its copies under their own names."""
    parts = fingerprint(workload)
    study, known = (
        Study.open(folder, workload=workload.name, fingerprint=parts),
        trial_fingerprint(parts, workload, "cpu"),
    )
    trials = [Trial(lr=0.001 * (k + 1), steps=300, batch_size=64) for k in range(count)]
    first = study.save_trace(trials[0].id(known), trace(trials[0]))
    for trial in trials[1:]:
        os.link(first, first.with_name(f"{trial.id(known)}.parquet"))
    return trials, parts, known


def by_trials(count):
    workload = load("digits-mlp")
    with tempfile.TemporaryDirectory() as folder:
        trials, parts, known = grown(folder + "/study", workload, count)
        opening, study = clocked(lambda: Study.open(folder + "/study", workload=workload.name, fingerprint=parts))
        listing, _ = clocked(lambda: sum(1 for _ in study.traces()))
        about = {"notebook": "04_learning_rate", "workload": workload, "reference": "digits-mlp", "study": study}
        session = Session(**about, device="cpu", seed=0, budget="standard", knobs={}, fingerprint=known)
        with contextlib.redirect_stdout(io.StringIO()):
            resuming, _ = clocked(lambda: session.run(trials[-20:]))
        reporting, _ = clocked(lambda: write_report(study))
    return {"opening": opening, "listing": listing, "resuming 20": resuming, "reporting": reporting}


def by_steps(steps):
    kept = trace(Trial(lr=0.1, steps=steps, batch_size=64))
    writing, data = clocked(kept.to_bytes)
    reading, _ = clocked(lambda: Trace.from_bytes(data))
    judging, _ = clocked(lambda: stability.judge(kept.steps.loss, grad_norm=kept.steps.grad_norm))
    return {"keeping": writing, "reading": reading, "judging": judging}


def rows(most_trials=TRIALS[-1], most_steps=STEPS[-1]):
    """A line of the table a size: name, figure, mark."""
    by_trials(10), by_steps(100)  # imports
    for unit, sizes, most, measure in (
        ("trials", TRIALS, most_trials, by_trials),
        ("steps", STEPS, most_steps, by_steps),
    ):
        for size in [size for size in sizes if size <= most]:
            figure = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in measure(size).items())
            yield f"{size:,} {unit}", figure, "opening 10,000: 2 s" if size == 10_000 and unit == "trials" else ""


if __name__ == "__main__":
    for row in rows(*map(int, sys.argv[1:])):
        print(*row, sep="  |  ", flush=True)
