"""Workloads of six kinds for peers.py, two of them with an end that a small machine reaches.

The autoencoder stands here alone; the others are built in. Their code decides whether a kept run is still valid, so
what peers.py does with them stands in another file.
"""

import dataclasses

from torch import Tensor, nn

from workup.workload import Workload
from workup.workloads import data, digits, tabular, text


def mlp() -> Workload:
    return digits.digits_mlp()


def resnet() -> Workload:
    return dataclasses.replace(digits.digits_resnet(), max_train_steps=1500)


def transformer() -> Workload:
    return dataclasses.replace(text.text_transformer(), max_train_steps=1000)


def regression() -> Workload:
    return tabular.diabetes_regression()


def imbalanced() -> Workload:
    return tabular.breast_cancer_imbalanced()


def ill_conditioned() -> Workload:
    """First gradients two thousand times the later ones: what the first steps bear is no guide to the rest."""
    return digits.relu_mlp_large_init()


def encoder() -> nn.Module:
    """64 pixels through 12 numbers and back."""
    sides = [(64, 96), (96, 12), (12, 96), (96, 64)]
    layers = [layer for sizes in sides for layer in (nn.Linear(*sizes), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def reconstruction(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error, mean over pixels, shape [batch]."""
    return (model(batch[0]) - batch[0]).square().mean(dim=1)


def autoencoder() -> Workload:
    train, evaluate = data.digits(flat=True)
    return Workload(
        name="digits-autoencoder",
        model=encoder,
        train_data=train,
        eval_data=evaluate,
        loss=reconstruction,
        optimizer=tabular.adam,
        batch_size=64,
        lr=1e-3,
        max_train_steps=3000,
    )
