import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from workup import ParameterError, Trial, load
from workup.measure import ensemble, executors
from workup.measure.executors import execute

HERE = str(Path(__file__).with_name("executor_workloads.py"))
TRIALS = [Trial(lr=lr, steps=6, batch_size=16) for lr in (0.01, 0.03, 0.1)]


def serial(workload, trials):
    return dict(execute(workload, trials))


@pytest.fixture
def workers(monkeypatch):
    """How many there are, as a function."""
    return lambda count: monkeypatch.setattr(executors, "_devices", lambda device: [device] * count)


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for index, trace in theirs.items():
        assert (ours[index].trial, ours[index].status) == (trace.trial, trace.status)
        np.testing.assert_allclose(ours[index].steps.loss, trace.steps.loss, rtol=1e-5)


def test_an_unknown_executor_is_refused_with_the_nearest(workload):
    with pytest.raises(ParameterError, match="Did you mean 'ensemble'"):
        next(execute(workload, TRIALS, executor="ensembel"))


def test_every_executor_is_named_in_the_traces_it_gives(workload):
    assert {t.versions["executor"] for t in serial(workload, TRIALS).values()} == {"serial"}
    stacked = dict(execute(workload, TRIALS, executor="ensemble"))
    assert {t.versions["executor"] for t in stacked.values()} == {"ensemble"}
    equal(stacked, serial(workload, TRIALS))


def test_trials_that_cannot_stack_train_one_by_one_beside_those_that_can(workload):
    trials = [*TRIALS, Trial(lr=0.1, steps=6, batch_size=8)]
    found = dict(execute(workload, trials, executor="ensemble"))
    assert [found[i].versions["executor"] for i in range(4)] == ["ensemble"] * 3 + ["serial"]
    equal(found, serial(workload, trials))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.left(x) if self.left(x).sum() > 0 else self.right(x)


def test_a_model_that_cannot_be_vectorised_falls_back_and_says_so(make_workload):
    workload, notes = make_workload(model=Branching), []
    found = dict(execute(workload, TRIALS, executor="ensemble", note=notes.append))
    assert {t.versions["executor"] for t in found.values()} == {"serial"}
    assert len(notes) == 1
    assert "no ensemble of 3 trials: RuntimeError: vmap: It looks like you're attempting to use" in notes[0]
    equal(found, serial(workload, TRIALS))


def test_seeds_whose_dropout_would_differ_are_stacked_apart(make_workload):
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))  # noqa: E731
    trials = [Trial(lr=lr, steps=6, batch_size=16, seed=seed) for lr in (0.01, 0.03) for seed in (0, 1)]
    found = dict(execute(make_workload(model=model), trials, executor="ensemble"))
    assert {t.versions["executor"] for t in found.values()} == {"ensemble"}
    equal(found, serial(make_workload(model=model), trials))


@pytest.mark.parametrize(("stack_seconds", "chosen"), [(0.1, "ensemble"), (0.9, "serial")])
def test_auto_stacks_what_gains_by_it_and_says_what_it_measured(workload, monkeypatch, stack_seconds, chosen):
    monkeypatch.setattr(ensemble, "compare", lambda *_, **__: ensemble.Comparison(0.9, stack_seconds))
    notes = []
    found = dict(execute(workload, TRIALS, executor="auto", note=notes.append))
    assert {t.versions["executor"] for t in found.values()} == {chosen}
    assert f"a step of 3 trials takes {1000 * stack_seconds:.3g} ms, one by one 900 ms" in notes[0]


def interrupting(workload, at):
    """The workload's loss, whose call number ``at`` is a Ctrl-C."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return loss


def test_ctrl_c_ends_every_trial_of_a_stack_as_interrupted_with_what_it_had(make_workload):
    calls = 3 * ensemble.CHECKED + ensemble.CHECKED  # the comparison's own, plain and stacked
    workload = make_workload(loss=interrupting(make_workload, at=calls + 3))
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(trace for _, trace in execute(workload, TRIALS, executor="ensemble", save=print))
    assert {(t.status, len(t.steps)) for t in found} == {("interrupted", 2)}
    assert len(found) == 3


def test_what_cannot_be_sent_to_a_process_is_named(workload):
    with pytest.raises(ParameterError, match=r"cannot be sent to a process \(optimizer of 'small': .*reference"):
        next(execute(workload, TRIALS, executor="processes"))


def test_a_killed_worker_costs_its_trial_one_retry_and_then_the_reason(workers, tmp_path, monkeypatch):
    workers(1)
    mark = tmp_path / "kill once"
    mark.touch()
    monkeypatch.setenv("EXECUTOR_TEST_MARK", str(mark))
    trials, notes = [TRIALS[0], Trial(lr=0.1, steps=6, batch_size=16, seed=99)], []
    workload = load(f"{HERE}:deadly")
    found = dict(execute(workload, trials, executor="processes", reference=f"{HERE}:deadly", note=notes.append))
    assert [found[i].status for i in range(2)] == ["finished", "failed"]
    assert found[1].reason == "its process ended (SIGKILL, as the system does when memory runs out), twice"
    assert [note.split(" ended")[0] for note in notes] == ["the process of trial 0", "the process of trial 1"]
    assert not multiprocessing.active_children()
    equal({0: found[0]}, serial(load(f"{HERE}:plain"), trials[:1]))


def test_ctrl_c_keeps_what_has_finished_and_leaves_no_worker(workers):
    workers(2)
    trials = [TRIALS[0], Trial(lr=0.01, steps=10**6, batch_size=16)]
    chosen = execute(load(f"{HERE}:plain"), trials, executor="processes", reference=f"{HERE}:plain")
    index, trace = next(chosen)
    assert (index, trace.status) == (0, "finished")
    interrupt = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(chosen)
    assert not multiprocessing.active_children()


def test_one_process_a_gpu_or_a_core(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert executors._devices("cuda:0") == ["cuda:0", "cuda:1", "cuda:2"]
    assert set(executors._devices("cpu")) == {"cpu"}
