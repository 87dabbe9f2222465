"""Each planted cause of an instability is found by name; its healthy twin has none."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Study, Workload
from workup.experiments import causes, instability
from workup.experiments.session import Session
from workup.measure import data

BAD_STEP, BATCH = 40, 16


class Growing(nn.Module):
    """The identity, by way of a factor that grows by a fifth each step: past fp16's range from about step 60 on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += self.training
        return x * 1.2 ** self.calls.item() / 1.2 ** self.calls.item()


def network(middle=nn.Identity, times=1.0):
    model = nn.Sequential(nn.Linear(8, 16), middle(), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model[3].weight.data.mul_(times)
    return model


def examples():
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


def cause(tmp_path, budget="smoke", **changes):
    fields = {
        "name": "planted",
        "model": network,
        "train_data": examples(),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        "optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.5),
        "batch_size": BATCH,
        "lr": 0.02,
        "max_train_steps": 90,
    }
    session = Session(
        notebook="05_instability",
        workload=Workload(**{**fields, **changes}),
        reference="",
        study=Study.open(tmp_path / "s", workload="planted", fingerprint={}),
        device="cpu",
        seed=0,
        budget=budget,
        knobs={"steps": 90},
        fingerprint="f",
    )
    return causes.find(session, session.run(instability.plan(session)))


def test_a_healthy_workload_has_no_cause(tmp_path):
    assert cause(tmp_path, lr=0.005, batch_size=64).value == "none"


def test_a_bad_batch_is_named_with_its_examples(tmp_path):
    spoiled = examples()
    plain = Workload(
        name="w",
        model=network,
        train_data=spoiled,
        loss=print,
        optimizer=print,
        batch_size=BATCH,
        lr=1,
        max_train_steps=1,
    )
    picks = data.indices(plain, BATCH, seed=0, step=BAD_STEP)
    spoiled.tensors[0][picks[:5]] *= 300
    spoiled.tensors[1][picks[:5]] = (spoiled.tensors[1][picks[:5]] + 1) % 3
    found = cause(tmp_path, train_data=spoiled)
    assert found.value == "bad_batch"
    assert found.evidence["batch"]["step"] == BAD_STEP
    # One of the five may happen to be labelled as the network guesses it: its loss is then low.
    named = found.evidence["batch"]["examples"]
    assert len(named) >= 3
    assert set(named) <= set(picks[:5])
    assert "Without its update the loss goes on as before" in found.summary


def test_a_layer_initialised_a_hundred_times_too_large_is_named(tmp_path):
    found = cause(tmp_path, model=lambda: network(times=100.0))
    assert found.value == "initialisation"
    assert "3.weight begins at" in found.summary
    assert float(found.evidence["initialisation"]["change"].partition("=*")[2]) == pytest.approx(0.01, rel=0.5)


def test_an_overflow_of_fp16_is_named_with_the_module(tmp_path):
    found = cause(tmp_path, model=lambda: network(middle=Growing), precision="fp16")
    assert found.value == "overflow"
    assert "first in 1." in found.summary
    assert "In fp32 the same trial goes on as before" in found.summary


def test_a_rate_too_high_is_told_by_the_sharpness(tmp_path):
    class Bowl(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))

    found = cause(
        tmp_path,
        budget="thorough",
        model=Bowl,
        loss=lambda model, batch: 5 * model.w**2 + 0 * batch[0][:, 0],
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr),
        lr=0.12,
    )
    # The curvature is 10: above 2 / lr at 2 x 0.12, below it at 0.12.
    assert found.value == "learning_rate"
    assert found.evidence["sharpness"] == pytest.approx(10, rel=1e-3)
    assert found.evidence["sharpness_limit"] == pytest.approx(2 / 0.24)
    assert found.evidence["stable_lr"] == pytest.approx(0.12)


def test_the_examples_of_a_step_are_those_of_its_batch():
    numbers = TensorDataset(torch.arange(50.0)[:, None])
    fields = {"name": "w", "model": network, "loss": print, "optimizer": print, "lr": 1, "max_train_steps": 1}
    indexed = Workload(train_data=numbers, batch_size=8, **fields)
    listed = dataclasses.replace(indexed, train_data=[(x.item(),) for x in numbers.tensors[0]])
    for workload in (indexed, listed):
        batches = data.batches(workload, 8, seed=3, device="cpu")
        for step in range(14):
            seen = np.asarray(next(batches)[0]).ravel()
            assert data.indices(workload, 8, seed=3, step=step) == seen.tolist()
