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
from workup.measure import ensemble, executors, workers
from workup.measure.executors import execute

HERE = str(Path(__file__).with_name("executor_workloads.py"))
TRIALS = [Trial(lr=lr, steps=6, batch_size=16) for lr in (0.01, 0.03, 0.1)]


def serial(workload, trials):
    return dict(execute(workload, trials))


@pytest.fixture
def room(monkeypatch):
    """How many processes there are room for, as a function; ``auto`` takes none of them for begun."""
    monkeypatch.setattr(workers, "_begun", [])
    return lambda count: monkeypatch.setattr(workers, "places", lambda device: [(device, {})] * count)


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


LONG = [Trial(lr=lr, steps=300, batch_size=16) for lr in (0.01, 0.03, 0.1, 0.3)]


@pytest.mark.parametrize(
    ("stack", "share", "cores", "chosen"),
    [
        (0.1, (0.5, 0.1), 1, "ensemble"),
        (0.95, (0.5, 0.1), 1, "plain loop"),
        (0.1, (0.45, 0.09), 2, "ensemble"),
        (0.9, (0.45, 0.40), 2, "ensembles in processes"),
        (1.1, (0.45, 0.50), 2, "processes"),
        (1.1, (0.80, 0.90), 2, "plain loop"),
    ],
)
def test_auto_takes_what_a_few_steps_promise_most_of_and_says_why(stack, share, cores, chosen, room, monkeypatch):
    room(cores)
    took = {4: ensemble.Comparison(1.0, stack), 2: ensemble.Comparison(*share)}
    monkeypatch.setattr(ensemble, "compare", lambda workload, trials, device: took[len(trials)])
    monkeypatch.setattr(executors, "_pace", lambda *_: 0.25)
    monkeypatch.setattr(workers, "start_seconds", lambda: 4.0)
    notes, place = [], f"{HERE}:plain"
    here, away = executors._auto(load(place), LONG, "cpu", place, notes.append)
    assert (here, away) == {
        "plain loop": ([([i], False) for i in range(4)], []),
        "ensemble": ([([0, 1, 2, 3], True)], []),
        "processes": ([], [([i], False) for i in range(4)]),
        "ensembles in processes": ([], [([0, 2], True), ([1, 3], True)]),
    }[chosen]
    assert notes[0].startswith(f"auto: {chosen} for 4 trials (a step of 4 trials takes {1000 * stack:.3g} ms")


def test_auto_compares_nothing_where_that_would_take_too_much_of_a_short_sweep(workload, monkeypatch):
    monkeypatch.setattr(ensemble, "compare", None)
    notes = []
    found = dict(execute(workload, TRIALS, executor="auto", note=notes.append))
    assert {t.versions["executor"] for t in found.values()} == {"serial"}
    assert "comparing ways would take too much of it" in notes[0]


@pytest.mark.parametrize(("pace", "spread"), [(1.0, True), (0.001, False)])
def test_auto_spreads_trials_that_do_not_stack_where_they_are_long(pace, spread, room, monkeypatch):
    room(2)
    monkeypatch.setattr(executors, "_pace", lambda *_: pace)
    monkeypatch.setattr(workers, "start_seconds", lambda: 4.0)
    trials, place = [Trial(lr=0.1, steps=300, batch_size=size) for size in (8, 16, 32)], f"{HERE}:plain"
    here, away = executors._auto(load(place), trials, "cpu", place, print)
    assert (away if spread else here) == [([0], False), ([1], False), ([2], False)]


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


def test_a_killed_worker_costs_its_trial_one_retry_and_then_the_reason(room, tmp_path, monkeypatch):
    room(1)
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


def test_a_trial_larger_than_memory_is_told_so_and_costs_no_worker(room):
    room(1)
    place = f"{HERE}:too_large"
    found = dict(execute(load(place), TRIALS[:2], executor="processes", reference=place))
    assert [found[i].status for i in range(2)] == ["out_of_memory"] * 2


def test_ctrl_c_keeps_what_has_finished_and_leaves_no_worker(room):
    room(2)
    trials = [TRIALS[0], Trial(lr=0.01, steps=10**6, batch_size=16)]
    chosen = execute(load(f"{HERE}:plain"), trials, executor="processes", reference=f"{HERE}:plain")
    index, trace = next(chosen)
    assert (index, trace.status) == (0, "finished")
    interrupt = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(chosen)
    assert not multiprocessing.active_children()


def test_one_process_a_gpu_that_it_sees_alone_or_a_core(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    pins = [{"CUDA_VISIBLE_DEVICES": pin} for pin in ("4", "6")]
    assert workers.places("cuda:0") == [("cuda:0", pin) for pin in pins]
    assert {device for device, _ in workers.places("cpu")} == {"cpu"}


def test_a_stack_in_a_process_whose_process_is_lost_trains_again_one_by_one(room, tmp_path, monkeypatch):
    room(1)
    mark = tmp_path / "kill once"
    mark.touch()
    monkeypatch.setenv("EXECUTOR_TEST_MARK", str(mark))
    notes, place = [], f"{HERE}:deadly"
    spread = workers.spread(place, TRIALS, [([0, 1, 2], True)], device="cpu", save=None, note=notes.append)
    found = dict(spread)
    assert notes[0].startswith("the process of trial 0, 1, 2 ended (SIGKILL")
    assert {t.versions["executor"] for t in found.values()} == {"processes"}
    equal(found, serial(load(f"{HERE}:plain"), TRIALS))


def test_a_stack_in_a_process_gives_the_plain_loops_traces(room):
    room(1)
    spread = workers.spread(f"{HERE}:plain", TRIALS, [([0, 1, 2], True)], device="cpu", save=None, note=print)
    found = dict(spread)
    assert {t.versions["executor"] for t in found.values()} == {"ensemble"}
    equal(found, serial(load(f"{HERE}:plain"), TRIALS))
