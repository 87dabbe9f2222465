"""Handwritten digits: small networks of common kinds, and some that each show one phenomenon (playbook: C2, C8, E6).

``digits-resnet-stride`` is the procedures' own example of an unstable variant: the same network
with one block's stride changed from 2×2 to 1×1. The pooling window stays what it was, so the
classifier sees four times as many features: it trains as well at a low learning rate, and fails
at one that the other still trains at.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data
from workup.workloads.tabular import adam

Batch = tuple[Tensor, Tensor]
#: Of the residual networks without convolutions.
WIDTH, DEPTH = 64, 12


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], nats."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the prediction is right, shape [batch]."""
    return (model(batch[0]).argmax(dim=-1) == batch[1]).float()


def momentum(params: object, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)  # type: ignore[arg-type]


def mlp(hidden: int = 2) -> nn.Sequential:
    """64 → ``hidden`` ReLU layers of 128 → 10."""
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.ReLU()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def large_init() -> nn.Module:
    """:func:`mlp` of six layers, its weights 1.5 times He's initialisation."""
    model = mlp(hidden=6)
    for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.weight, std=1.5 * math.sqrt(2 / layer.in_features))
        nn.init.zeros_(layer.bias)
    return model


class Block(nn.Module):
    """shortcut(x) + Conv(ReLU(Norm(Conv(ReLU(Norm(x)))))), [batch, inputs, side, side]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(hidden)))


def resnet(*, middle_stride: int = 2) -> nn.Module:
    """Three residual blocks over [batch, 1, 8, 8], a 2×2 pooling window, ten logits."""
    features = 32 * (2 // middle_stride) ** 2
    blocks = [Block(8, 8, 1), Block(8, 16, middle_stride), Block(16, 32, 2)]
    head = [nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(features, 10)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), *blocks, *head)


class Residual(nn.Module):
    """x + scale · f(x) with f two layers, a norm before f, after the sum, or none; [batch, width] → the same."""

    def __init__(self, *, norm: str = "none", scale: float = 1.0) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.before = nn.LayerNorm(WIDTH) if norm == "pre" else nn.Identity()
        self.after = nn.LayerNorm(WIDTH) if norm == "post" else nn.Identity()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.scale * self.branch(self.before(x)))


def residual_stack(*, norm: str = "none", scale: float = 1.0) -> nn.Module:
    """``DEPTH`` of :class:`Residual` between two linear layers."""
    blocks = [Residual(norm=norm, scale=scale) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 10))


def digits_mlp() -> Workload:
    """A two-layer network on 8×8 digits, SGD with momentum."""
    return _workload("digits-mlp", mlp, lr=0.01)


def digits_resnet() -> Workload:
    """A small residual network with batch norm on 8×8 digits, SGD with momentum."""
    return _workload("digits-resnet", resnet, lr=0.01, flat=False)


def digits_resnet_stride() -> Workload:
    """``digits-resnet`` with one block's stride 1×1 in place of 2×2."""
    return _workload("digits-resnet-stride", partial(resnet, middle_stride=1), lr=0.01, flat=False)


def residual_unnormalised() -> Workload:
    """x + 2 f(x) without normalisation: the best learning rate lies at the edge of the unstable ones."""
    return _workload("residual-unnormalised", partial(residual_stack, scale=2.0), lr=1e-3)


def relu_mlp_large_init() -> Workload:
    """Six ReLU layers initialised 1.5 times too large: the first gradients are the largest by far."""
    return _workload("relu-mlp-large-init", large_init, lr=1e-3)


def post_norm_mlp() -> Workload:
    """Norm(x + f(x)), twelve deep: fails at learning rates that its pre-norm twin trains at."""
    return _workload("post-norm-mlp", partial(residual_stack, norm="post"), lr=1e-3, optimizer=adam)


def pre_norm_mlp() -> Workload:
    """x + f(Norm(x)), twelve deep."""
    return _workload("pre-norm-mlp", partial(residual_stack, norm="pre"), lr=1e-3, optimizer=adam)


def _workload(
    name: str, model: Callable[[], nn.Module], *, lr: float, optimizer: Callable = momentum, flat: bool = True
) -> Workload:
    """``model`` on the digits, batch 64: images [batch, 64], or [batch, 1, 8, 8] where not ``flat``."""
    train, evaluate = data.digits(flat=flat)
    return Workload(
        name=name,
        model=model,
        train_data=train,
        eval_data=evaluate,
        loss=cross_entropy,
        optimizer=optimizer,
        batch_size=64,
        lr=lr,
        max_train_steps=3000,
        metrics={"accuracy": accuracy},
    )
