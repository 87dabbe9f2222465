"""Time to a learning rate, and its regret: Workup's standard sweep beside what a user would pick today.

    python -m tests.benchmarks.peers [workload ...]

Truth: the final loss of 300 steps at rates a factor 10^0.25 apart, with other initial weights and batches; regret =
(final loss at the nearest rate - best) / (initial loss - best). Beside it steps taken and wall time. Lightning's
lr_find and a sweep of 20 trials by Optuna with its median pruner run where they are installed, and are said to be
skipped where not; torch-lr-finder's rule is re-stated in range_tests.py.
"""

import contextlib
import importlib.util
import io
import logging
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
from tests.benchmarks import range_tests

import workup
from workup.experiments import learning_rate as experiment
from workup.measure.data import batches, loader

WORKLOADS, STEPS = ("digits-mlp", "relu-mlp-large-init", "pre-norm-mlp"), 300


def by_workup(name, executor="serial"):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        about = {"workload": name, "study": folder + "/study", "device": "cpu", "executor": executor}
        session = workup.start("04_learning_rate", about)
        traces = session.run(experiment.plan(session))
        traces = experiment.refine(session, experiment.widen(session, traces))
        best = experiment.conclude(session, traces)[0]
    return best.value, sum(len(trace.steps) for trace in traces)


def by_lightning(name):
    import lightning
    from lightning.pytorch.tuner import Tuner

    workload = workup.load(name)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.lr = workload.build_model(), workload.lr

        def training_step(self, batch):
            return workload.loss(self.model, batch).mean()

        def configure_optimizers(self):
            return workload.optimizer(self.model.parameters(), self.lr)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, default_root_dir=folder, **quiet)
        found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader(workload, workload.batch_size, seed=0))
    return found.suggestion(), len(found.results["loss"])


def by_torch_lr_finder(name):
    lr, loss = range_tests.range_test(workup.load(name), low=1e-7, high=10, beta=0.95, stop=5)
    lr, loss, taken = lr[10:-5], loss[10:-5], len(lr)
    return float(lr[np.argmin(np.gradient(loss))]), taken


def by_optuna(name, trials=20):
    """A plain sweep: lr log-uniform over six decades, a trial pruned where it lags the median of those before."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    workload, taken = workup.load(name), [0]

    def objective(trial):
        lr = trial.suggest_float("lr", 1e-5, 10, log=True)
        torch.manual_seed(0)
        model = workload.build_model().train()
        optimizer, losses = workload.optimizer(model.parameters(), lr), []
        drawn = batches(workload, workload.batch_size, seed=0, device="cpu")
        for step in range(STEPS):
            loss = workload.loss(model, next(drawn)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            taken[0] += 1
            if (step + 1) % 30 == 0:
                trial.report(float(np.mean(losses[-30:])), step)
                if not np.isfinite(losses[-1]) or trial.should_prune():
                    raise optuna.TrialPruned
        return float(np.mean(losses[-30:]))

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, n_trials=trials)
    return study.best_params["lr"], taken[0]


WAYS = {
    "Workup, standard": (by_workup, None),
    "Workup, standard, auto": (lambda name: by_workup(name, "auto"), None),
    "Lightning lr_find": (by_lightning, "lightning"),
    "torch-lr-finder, re-stated": (by_torch_lr_finder, None),
    "Optuna, 20 trials, median pruner": (by_optuna, "optuna"),
}


def rows(workloads=WORKLOADS):
    """A line of the table a workload and way: name, figure, mark."""
    for name in workloads:
        workload = workup.load(name)
        truth = range_tests.sweep(workload, STEPS, seed=1, rates=range_tests.RATES)
        finals, start = np.array([row["final"] for row in truth]), np.median([row["loss"][0] for row in truth])
        best = np.nanmin(finals)
        for way, (find, package) in WAYS.items():
            if package and not importlib.util.find_spec(package):
                yield f"{name}, {way}", f"skipped: {package} is not installed", ""
                continue
            began = time.perf_counter()
            lr, steps = find(name)
            seconds = time.perf_counter() - began
            near = int(np.abs(np.log(range_tests.RATES) - np.log(lr)).argmin()) if lr else None
            loss = np.inf if near is None or not np.isfinite(finals[near]) else finals[near]
            regret = (loss - best) / (start - best)
            yield f"{name}, {way}", f"lr {lr:.3g}, regret {regret:.1%}, {steps:,} steps, {seconds:.1f} s", ""


if __name__ == "__main__":
    for row in rows(tuple(sys.argv[1:]) or WORKLOADS):
        print(*row, sep="  |  ", flush=True)
