"""What a learning rate costs by the end of training: Workup's and three finders' beside an exhaustive sweep.

    python -m tests.benchmarks.peers [--kept FOLDER] [--json FILE] [kind ...]

Kinds: the functions of kinds.py. Truth: rates a factor 10^0.25 apart, each trained to the
workload's end with two seeds that no search has seen. A way's rate is read there at the nearest rate, or trained too
where that is more than a factor 10^0.125 away. Regret = (loss - lowest) / (loss before training - lowest), of the
evaluation loss at the end, of that of the best of twenty checkpoints (playbook: F4), and of the training loss over
the last tenth. Beside it the steps that each spent. Lightning's lr_find and torch-lr-finder are the real ones and are
said to be skipped where they are not installed; fastai's valley is re-stated in range_tests.py. --kept keeps every
trial, so that what was interrupted goes on. Half an hour of one core for all seven.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import tempfile
import warnings

import numpy as np
import pandas as pd
import torch
from tests.benchmarks import range_tests

import workup
from workup.experiments import learning_rate as experiment
from workup.measure.data import loader
from workup.trace import Trial

KINDS = ("mlp", "resnet", "transformer", "regression", "imbalanced", "autoencoder", "ill_conditioned")
#: Steps of a factor 10^0.25 from the workload's own rate; fewer, around the best, where a run takes half a minute.
GRID = {"resnet": range(-1, 8), "transformer": range(1, 7)}
SEEDS, CHECKPOINTS = (10, 11), 20
#: Evaluated on so many examples, where there are more.
EXAMPLES = {"transformer": 512}
MEASURES = ("eval", "best_eval", "train")


def by_workup(session):
    """Both rates of notebook 04 on ``standard``: best at its own horizon, and carried to the end."""
    ranged = session.run(experiment.range_test(session))
    traces = session.run(experiment.plan(session, ranged))
    traces = experiment.refine(session, experiment.widen(session, traces))
    best = experiment.conclude(session, traces)[0]
    spent = sum(len(trace.steps) for trace in ranged + traces)
    carried = best.evidence["carried"]["value"]
    return {"Workup, best of the sweep": (best.value, spent), "Workup, carried to the end": (carried, spent)}


def by_lightning(session):
    import lightning
    from lightning.pytorch.tuner import Tuner

    workload = session.workload

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.lr = workload.build_model(), workload.lr

        def training_step(self, batch):
            return workload.loss(self.model, batch).mean()

        def configure_optimizers(self):
            return workload.optimizer(self.model.parameters(), self.lr)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict.fromkeys(silent, False)
        trainer = lightning.Trainer(accelerator="cpu", max_steps=300, default_root_dir=folder, **quiet)
        found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader(workload, workload.batch_size, seed=0))
    return {"Lightning lr_find": (found.suggestion(), len(found.results["loss"]))}


def by_torch_lr_finder(session):
    import matplotlib
    from torch_lr_finder import LRFinder, TrainDataLoaderIter

    matplotlib.use("Agg")
    workload = session.workload

    class Whole(TrainDataLoaderIter):
        def inputs_labels_from_batch(self, batch):
            return batch, torch.zeros(())

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = workload.build_model()

        def forward(self, batch):
            return workload.loss(self.model, batch).mean()

    torch.manual_seed(0)
    model = Loss()
    finder = LRFinder(model, workload.optimizer(model.parameters(), 1e-7), lambda loss, _: loss, device="cpu")
    finder.range_test(Whole(loader(workload, workload.batch_size, seed=0)), end_lr=10, num_iter=100)
    return {"torch-lr-finder": (finder.plot()[1], len(finder.history["lr"]))}


def by_fastai(session):
    lr, loss = range_tests.range_test(session.workload, low=1e-7, high=10, beta=0.98, stop=4)
    return {"fastai valley, re-stated": (float(range_tests.valley(lr[10:-5], loss[10:-5])), len(lr))}


WAYS = ((by_workup, None), (by_lightning, "lightning"), (by_torch_lr_finder, "torch_lr_finder"), (by_fastai, None))


def to_the_end(session, kind, rates):
    """A row a rate: losses, mean of the seeds, inf where one diverges; and the steps taken."""
    workload = session.workload
    end = workload.max_train_steps
    how = {"eval_every": end // CHECKPOINTS, "eval_examples": EXAMPLES.get(kind, 1024)}
    trial = Trial(lr=workload.lr, steps=end, batch_size=workload.batch_size, **how)
    rows = []
    for trace in session.run([experiment.at(trial, lr, seed=seed) for lr in rates for seed in SEEDS]):
        seen = trace.steps.eval_loss.dropna() if trace.status == "finished" else pd.Series([np.inf])
        losses = seen.iloc[-1], seen.min(), experiment.final_loss(trace)
        losses = [loss if np.isfinite(loss) else np.inf for loss in losses]
        rows.append([trace.trial.lr, *losses, trace.steps.loss[0], len(trace.steps)])
    table = pd.DataFrame(rows, columns=["lr", *MEASURES, "start", "steps"])
    return table.groupby("lr").agg(dict.fromkeys([*MEASURES, "start"], "mean") | {"steps": "sum"})


def compared(kind, kept):
    """A row a way: its rate, regrets and steps; and the ways that were skipped."""
    about = {"workload": f"tests.benchmarks.kinds:{kind}", "study": f"{kept}/{kind}", "device": "cpu"}
    session = workup.start("04_learning_rate", about)
    grid = [experiment.at(Trial(lr=1.0, steps=1, batch_size=1), session.workload.lr * 10 ** (k / 4)).lr
            for k in GRID.get(kind, range(-6, 8))]  # fmt: skip
    truth = to_the_end(session, kind, grid)
    lowest, start = truth[list(MEASURES)].min(), truth.start.mean()
    rows = [
        row(kind, "every rate to the end", truth.loc[truth["eval"].idxmin()], truth["eval"].idxmin(), lowest, start)
    ]
    rows[0]["steps"] = int(truth.steps.sum())
    for find, package in WAYS:
        if package and not importlib.util.find_spec(package):
            print(f"{kind}: skipped, {package} is not installed", flush=True)
            continue
        found = quietly(find, session)
        for way, (lr, spent) in found.items():
            if lr is None:
                rows.append({"workload": kind, "way": way, "steps": spent})
                continue
            near = min(grid, key=lambda rate: abs(np.log(rate / lr)))
            stands = abs(np.log10(near / lr)) <= 0.126
            losses = truth.loc[near] if stands else to_the_end(session, kind, [lr]).iloc[0]
            rows.append(row(kind, way, losses, lr, lowest, start) | {"steps": spent})
    return rows


def quietly(find, session):
    with warnings.catch_warnings(), io.StringIO() as aside:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
            return find(session)


def row(kind, way, losses, lr, lowest, start):
    regrets = {f"{name} regret": (losses[name] - lowest[name]) / (start - lowest[name]) for name in MEASURES}
    return {"workload": kind, "way": way, "lr": lr, "eval loss": losses["eval"], **regrets}


def markdown(table):
    """The table as the README has it."""

    def share(value):
        return (
            "no rate"
            if np.isnan(value)
            else "diverges"
            if np.isinf(value)
            else ">100%"
            if value > 1
            else f"{value:.1%}"
        )

    lines = ["| workload | way | lr | final evaluation loss | regret | of the best checkpoint | of the training loss |"
             " steps spent |", "|---|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for each in table.to_dict("records"):
        regrets = " | ".join(share(each[f"{name} regret"]) for name in MEASURES)
        lines.append(
            f"| {each['workload']} | {each['way']} | {each['lr']:.2g} | {each['eval loss']:.3g} | {regrets} "
            f"| {each['steps']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS, metavar="kind")
    parser.add_argument("--kept", metavar="FOLDER")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as aside:
        rows = [each for kind in given.kinds for each in compared(kind, given.kept or aside)]
    table = pd.DataFrame(rows)
    print(markdown(table))
    regrets = table.groupby("way", sort=False)[[f"{name} regret" for name in MEASURES]]
    print(regrets.agg(["median", "max"]).to_string(float_format="{:.1%}".format))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1, default=float)


if __name__ == "__main__":
    main()
