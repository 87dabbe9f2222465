"""A regression and an imbalanced binary classification on small tables, both with Adam."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data

Batch = tuple[Tensor, Tensor]


def network(inputs: int) -> nn.Module:
    """[batch, inputs] → 32 → 32 → [batch]: a prediction, or the logit of the minority class."""
    hidden = [nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(32, 1), nn.Flatten(0))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], in variances of the training target."""
    return F.mse_loss(model(batch[0]), batch[1], reduction="none")


def absolute_error(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], in standard deviations of the training target."""
    return F.l1_loss(model(batch[0]), batch[1], reduction="none")


def binary_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], nats."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the prediction is right, shape [batch]."""
    return ((model(batch[0]) > 0) == (batch[1] > 0.5)).float()


def minority_correct(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the minority class is there and predicted, shape [batch]; the sum is the count (playbook: F3)."""
    return ((model(batch[0]) > 0) & (batch[1] > 0.5)).float()


def adam(params: object, lr: float) -> torch.optim.Optimizer:
    """Adam as torch has it."""
    return torch.optim.Adam(params, lr=lr)  # type: ignore[arg-type]


def diabetes_regression() -> Workload:
    """Progression of a disease from ten measurements. A constant prediction has a loss of 1."""
    how: dict[str, Any] = {"metrics": {"absolute_error": absolute_error}, "initial_loss": 1.0}
    return _workload("diabetes-regression", data.diabetes(), loss=squared_error, **how)


def breast_cancer_imbalanced() -> Workload:
    """Malignant or not, one in eleven malignant."""
    metrics = {"accuracy": accuracy, "minority_correct": minority_correct}
    return _workload("breast-cancer-imbalanced", data.breast_cancer(), loss=binary_cross_entropy, metrics=metrics)


def _workload(name: str, split: data.Split, **how: Any) -> Workload:
    train, evaluate = split
    return Workload(
        name=name,
        model=partial(network, train.tensors[0].shape[1]),
        train_data=train,
        eval_data=evaluate,
        optimizer=adam,
        batch_size=32,
        lr=1e-3,
        max_train_steps=2000,
        **how,
    )
