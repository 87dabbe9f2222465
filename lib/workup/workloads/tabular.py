"""A regression and an imbalanced binary classification on small tables."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data

Batch = tuple[Tensor, Tensor]


def regressor() -> nn.Module:
    """10 → 32 → 32 → 1."""
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], in variances of the training target."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets, reduction="none")


def absolute_error(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], in standard deviations of the training target."""
    inputs, targets = batch
    return (model(inputs) - targets).abs()


def adam(params: object, lr: float) -> torch.optim.Optimizer:
    """Adam as torch has it."""
    return torch.optim.Adam(params, lr=lr)  # type: ignore[arg-type]


def diabetes_regression() -> Workload:
    """Progression of a disease from ten measurements, Adam. A constant prediction has a loss of 1."""
    train, evaluate = data.diabetes()
    return Workload(
        name="diabetes-regression",
        model=regressor,
        train_data=train,
        eval_data=evaluate,
        loss=squared_error,
        optimizer=adam,
        batch_size=32,
        lr=1e-3,
        max_train_steps=2000,
        metrics={"absolute_error": absolute_error},
        initial_loss=1.0,
    )


def classifier() -> nn.Module:
    """30 → 32 → 32 → 1, the logit of the minority class."""
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def binary_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], nats."""
    inputs, labels = batch
    return F.binary_cross_entropy_with_logits(model(inputs), labels, reduction="none")


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the prediction is right, shape [batch]."""
    inputs, labels = batch
    return ((model(inputs) > 0) == (labels > 0.5)).float()


def minority_correct(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the minority class is there and predicted, shape [batch]; the sum is the count (playbook: F3)."""
    inputs, labels = batch
    return ((model(inputs) > 0) & (labels > 0.5)).float()


def breast_cancer_imbalanced() -> Workload:
    """Malignant or not, one in eleven malignant, Adam."""
    train, evaluate = data.breast_cancer()
    return Workload(
        name="breast-cancer-imbalanced",
        model=classifier,
        train_data=train,
        eval_data=evaluate,
        loss=binary_cross_entropy,
        optimizer=adam,
        batch_size=32,
        lr=1e-3,
        max_train_steps=2000,
        metrics={"accuracy": accuracy, "minority_correct": minority_correct},
    )
