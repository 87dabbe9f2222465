"""Handwritten digits: a small network of each of the two common kinds.

``digits-resnet-stride`` is the procedures' own example of an unstable variant: the same network
with one block's stride changed from 2×2 to 1×1. The pooling window stays what it was, so the
classifier sees four times as many features: it trains as well at a low learning rate, and fails
at one that the other still trains at.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data

Batch = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Shape [batch], nats."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """1.0 where the prediction is right, shape [batch]."""
    inputs, labels = batch
    return (model(inputs).argmax(dim=-1) == labels).float()


def momentum(params: object, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)  # type: ignore[arg-type]


def mlp() -> nn.Module:
    """64 → 128 → 128 → 10."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


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


def resnet_stride() -> nn.Module:
    """:func:`resnet` with its middle block's stride 1×1."""
    return resnet(middle_stride=1)


def classification(
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


def digits_mlp() -> Workload:
    """A two-layer network on 8×8 digits, SGD with momentum."""
    return classification("digits-mlp", mlp, lr=0.01)


def digits_resnet() -> Workload:
    """A small residual network with batch norm on 8×8 digits, SGD with momentum."""
    return classification("digits-resnet", resnet, lr=0.01, flat=False)


def digits_resnet_stride() -> Workload:
    """``digits-resnet`` with one block's stride 1×1 in place of 2×2."""
    return classification("digits-resnet-stride", resnet_stride, lr=0.01, flat=False)
