"""What many tests train: a small classifier on random but learnable data."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Workload


def cross_entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def small_data(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


@pytest.fixture
def make_workload():
    """A function making the small workload, with any field replaced."""

    def make(**changes):
        fields = {
            "name": "small",
            "model": small_model,
            "train_data": small_data(200, 0),
            "eval_data": small_data(50, 1),
            "loss": cross_entropy,
            "optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
            "batch_size": 16,
            "lr": 0.05,
            "max_train_steps": 400,
        }
        return Workload(**{**fields, **changes})

    return make


@pytest.fixture
def workload(make_workload):
    return make_workload()
