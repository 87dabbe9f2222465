import dataclasses
import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from workup import Trial, load
from workup.measure import ensemble
from workup.measure.optimizers import OPTIMIZERS
from workup.measure.train import train

MEASURED = ("loss", "grad_norm", "eval_loss")


def sweep(rates=(0.003, 0.01, 0.03), steps=50, batch_size=16, **changes):
    return [Trial(lr=lr, steps=steps, batch_size=batch_size, **changes) for lr in rates]


def both(workload, trials):
    stacked = dict(ensemble.run(workload, trials))
    return [(train(workload, trial), stacked[index]) for index, trial in enumerate(trials)]


def apart(plain, stacked, names=MEASURED):
    """The largest relative difference of any recorded number."""
    assert list(stacked.steps.columns) == list(plain.steps.columns)
    assert (stacked.status, len(stacked.steps)) == (plain.status, len(plain.steps))
    for exact in ("step", "lr", "clipped", "examples"):
        np.testing.assert_array_equal(stacked.steps[exact], plain.steps[exact])
    found = [0.0]
    for name in names:
        ours, theirs = stacked.steps[name], plain.steps[name]
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        found += list((ours - theirs).abs().div(theirs.abs())[np.isfinite(theirs)])
    return max(found)


def doubled(workload):
    """The workload in float64."""
    data = torch.utils.data.TensorDataset(workload.train_data.tensors[0].double(), workload.train_data.tensors[1])
    model = workload.model
    return dataclasses.replace(workload, model=lambda: model().double(), train_data=data, eval_data=data)


SMALL = ("rmsprop", "adam", "nadam")


def stable(optimizer):
    return (1e-4, 1e-3) if optimizer in SMALL else (0.003, 0.03)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["small", "digits-mlp"])
def test_a_stack_trains_as_the_plain_loop_does(name, optimizer, workload):
    workload = workload if name == "small" else load(name)
    trials = sweep(stable(optimizer), optimizer=optimizer, eval_every=10, eval_examples=32)
    assert max(apart(*pair) for pair in both(workload, trials)) < 1e-4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["small", "digits-mlp"])
def test_in_float64_it_agrees_within_1e_10(name, optimizer, workload):
    workload = doubled(workload if name == "small" else load(name))
    pairs = both(workload, sweep(stable(optimizer), optimizer=optimizer))
    assert max(apart(*pair) for pair in pairs) < 1e-10


@pytest.mark.parametrize("name", ["digits-resnet", "text-transformer"])
def test_in_float64_batch_norm_convolutions_and_attention_agree_too(name):
    workload = load(name)
    model, tensors = workload.model, workload.train_data.tensors
    data = torch.utils.data.TensorDataset(*(t.double() if t.is_floating_point() else t for t in tensors))
    workload = dataclasses.replace(workload, model=lambda: model().double(), train_data=data, eval_data=None)
    pairs = both(workload, sweep((0.3 * workload.lr, workload.lr), steps=6, batch_size=8))
    assert max(apart(*pair) for pair in pairs) < 1e-10


def test_trials_may_differ_in_warmup_schedule_clipping_seed_and_length(make_workload):
    workload = make_workload(schedule=lambda fraction: 1 - fraction)
    base = {"batch_size": 16, "eval_every": 7}
    trials = [
        Trial(lr=0.1, steps=40, warmup_steps=10, **base),
        Trial(lr=0.1, steps=40, shape="workload", **base),
        Trial(lr=0.1, steps=50, clip_norm=0.5, **base),
        Trial(lr=0.1, steps=30, seed=1, **base),
        Trial(lr=0.05, steps=40, seed=2, clip_norm=0.1, **base),
    ]
    assert max(apart(*pair) for pair in both(workload, trials)) < 1e-4


def test_weight_decay_and_groups_with_rates_of_their_own(make_workload):
    def grouped(params, lr):
        params = list(params)
        groups = [{"params": params[:2], "lr": lr, "weight_decay": 0.1}, {"params": params[2:], "lr": lr / 7}]
        return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)

    workload = make_workload(optimizer=grouped)
    assert max(apart(*pair) for pair in both(workload, sweep((1e-3, 3e-3, 1e-2)))) < 1e-4


class Tied(nn.Module):
    """A frozen first layer, and one matrix used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.third(torch.tanh(self.second(self.first(x))))))


def normed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def dropped():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))


@pytest.mark.parametrize("model", [Tied, normed, dropped])
def test_tied_and_frozen_weights_batch_norm_and_dropout_are_as_in_the_plain_loop(model, make_workload):
    pairs = both(make_workload(model=model), sweep(eval_every=5))
    assert max(apart(*pair) for pair in pairs) < 1e-4


def test_dropout_of_several_seeds_is_drawn_anew_and_so_not_the_plain_loops(make_workload):
    workload = make_workload(model=dropped)
    trials = [Trial(lr=0.01, steps=5, batch_size=16, seed=seed) for seed in (0, 1)]
    with pytest.raises(ensemble.Unfit, match=r"lr 0.01, step 0: loss .*, plain loop"):
        ensemble.compare(workload, trials)
    assert ensemble.groups(trials, by_seed=True) == [[0], [1]]


def test_a_trial_that_diverges_leaves_and_the_others_do_not_notice(workload):
    calm = sweep((0.01, 0.03), optimizer="momentum")
    with_wild = dict(ensemble.run(workload, [calm[0], *sweep((1e30,), optimizer="momentum"), calm[1]]))
    assert with_wild[1].status == "diverged"
    assert not math.isfinite(with_wild[1].steps.loss.iloc[-1])
    assert len(with_wild[1].steps) == len(train(workload, with_wild[1].trial).steps) < 5
    for stacked, trial in ((with_wild[0], calm[0]), (with_wild[2], calm[1])):
        assert apart(train(workload, trial), stacked) < 1e-4


def test_time_is_shared_by_the_trials_of_a_stack(workload, monkeypatch):
    ticks = itertools.count()  # a clock that each look moves by a second
    monkeypatch.setattr(
        "workup.measure.train.time", SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=time.monotonic)
    )
    traces = dict(ensemble.run(workload, sweep((0.01, 0.03, 0.1), steps=5)))
    for trace in traces.values():
        assert trace.steps.data_seconds.tolist() == [1] * 5
        assert trace.steps.seconds.tolist() == [2] * 5


class Branching(nn.Module):
    """Which layer a batch takes depends on its values."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.left(x) if self.left(x).sum() > 0 else self.right(x)


def test_data_dependent_control_flow_is_unfit_and_the_message_says_so(make_workload):
    with pytest.raises(ensemble.Unfit, match="data-dependent control flow"):
        ensemble.compare(make_workload(model=Branching), sweep())


def test_an_operator_that_cannot_be_vectorised_is_named(make_workload):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") + model(batch[0]).sum().item()

    with pytest.raises(ensemble.Unfit, match=r"\.item\(\)"):
        ensemble.compare(make_workload(loss=loss), sweep())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precision": "bf16"}, "precision bf16"),
        ({"optimizer": lambda params, lr: torch.optim.Rprop(params, lr=lr)}, "Rprop's step"),
        (
            {"optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, weight_decay=lr / 10)},
            "SGD's step may differ by more than lr",
        ),
    ],
)
def test_what_a_stack_does_not_do_it_refuses(changes, why, make_workload):
    with pytest.raises(ensemble.Unfit, match=why):
        list(ensemble.run(make_workload(**changes), sweep()))


@pytest.mark.parametrize("clips", [{"clip_percentile": 90}, {"clip_norm": 1.0, "clip_from": 5}])
def test_a_threshold_that_changes_on_the_way_is_left_to_the_plain_loop(clips, workload):
    with pytest.raises(ensemble.Unfit, match="clipped by the plain loop"):
        dict(ensemble.run(workload, sweep(**clips)))


def test_changed_models_train_stacked_as_in_the_plain_loop_and_apart_from_others(workload):
    trials = sweep(change="2.weight=0 2.bias=0")
    assert max(apart(*pair) for pair in both(workload, trials)) < 1e-4
    assert ensemble.groups([*trials, *sweep()]) == [[0, 1, 2], [3, 4, 5]]


def test_a_disagreement_past_rounding_is_found(workload, monkeypatch):
    real = ensemble.Stack._update

    def wrong(self, step):
        real(self, step)
        with torch.no_grad():
            self.leaves[0][1] += 0.01

    monkeypatch.setattr(ensemble.Stack, "_update", wrong)
    with pytest.raises(ensemble.Unfit, match=r"lr 0.01, step 1: loss"):
        ensemble.compare(workload, sweep())


def test_nothing_of_the_callers_changes(workload):
    before = torch.get_rng_state()
    list(ensemble.run(workload, sweep(steps=3)))
    assert torch.equal(before, torch.get_rng_state())
