"""The range test that begins the learning-rate sweep, on a bowl whose stability limit is known."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Study, Workload
from workup.experiments import learning_rate
from workup.experiments.session import Session

#: Loss 0.5 * CURVATURE * w^2: gradient descent trains below 2 / CURVATURE, best at 1 / CURVATURE.
CURVATURE = 10.0


class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))


def bowl_loss(model, batch):
    return 0.5 * CURVATURE * model.w**2 + 0 * batch[0][:, 0]


@pytest.fixture
def session(tmp_path):
    workload = Workload(
        name="bowl",
        model=Bowl,
        train_data=TensorDataset(torch.zeros(32, 1)),
        eval_data=None,
        loss=bowl_loss,
        optimizer=torch.optim.SGD,
        batch_size=8,
        lr=1e-3,
        max_train_steps=600,
    )
    study = Study.open(tmp_path / "s", workload="bowl", fingerprint={})
    about = {"notebook": "04_learning_rate", "reference": "", "device": "cpu", "seed": 0, "fingerprint": "f"}
    return Session(workload=workload, study=study, budget="standard", knobs={}, **about)


def test_the_sweep_begins_near_what_breaks_wherever_the_user_stands(session):
    (first,) = learning_rate.range_test(session)
    assert (first.steps, first.shape, first.lr) == (100, "rising", 1.0)
    rates = [trial.lr for trial in learning_rate.plan(session, session.run([first]))]
    assert rates[0] < 1 / CURVATURE < rates[-1]
    assert 2 / CURVATURE <= rates[-1] <= 40 / CURVATURE
    steps = np.log10(np.array(rates) / session.workload.lr) / 0.25
    assert steps == pytest.approx(np.rint(steps), abs=1e-4)


def test_a_given_rate_and_smoke_need_no_range_test(session):
    given = dataclasses.replace(session, knobs={"lr": 0.02})
    assert learning_rate.range_test(given) == []
    assert 0.02 in [trial.lr for trial in learning_rate.plan(given, [])]
    assert learning_rate.range_test(dataclasses.replace(session, budget="smoke")) == []
