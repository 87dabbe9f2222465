"""Handwritten digits: a small network of each of the two common kinds.

``digits-resnet-stride`` is the procedures' own example of an unstable variant: the same network
with one block's stride changed from 2×2 to 1×1. The pooling window stays what it was, so the
classifier sees four times as many features and the last stage four times as many positions.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Shape [batch], nats."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
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
    """x + Conv(ReLU(Norm(Conv(ReLU(Norm(x)))))), the shortcut a 1×1 convolution where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, height / stride, width / stride]."""
        hidden = self.conv1(F.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(hidden)))


def resnet(*, middle_stride: int = 2) -> nn.Module:
    """Three residual blocks over [batch, 1, 8, 8], a 2×2 pooling window, ten logits."""
    side = 2 // middle_stride
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        Block(16, 16, 1),
        Block(16, 32, middle_stride),
        Block(32, 64, 2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 10),
    )


def resnet_stride() -> nn.Module:
    """:func:`resnet` with its middle block's stride 1×1."""
    return resnet(middle_stride=1)


def digits_mlp() -> Workload:
    """A two-layer network on 8×8 digits, SGD with momentum."""
    train, evaluate = data.digits()
    return Workload(
        name="digits-mlp",
        model=mlp,
        train_data=train,
        eval_data=evaluate,
        loss=cross_entropy,
        optimizer=momentum,
        batch_size=64,
        lr=0.01,
        max_train_steps=3000,
        metrics={"accuracy": accuracy},
    )


def digits_resnet() -> Workload:
    """A small residual network with batch norm on 8×8 digits, SGD with momentum."""
    return _residual("digits-resnet", resnet)


def digits_resnet_stride() -> Workload:
    """``digits-resnet`` with one block's stride 1×1 in place of 2×2."""
    return _residual("digits-resnet-stride", resnet_stride)


def _residual(name: str, model: object) -> Workload:
    train, evaluate = data.digits(flat=False)
    return Workload(
        name=name,
        model=model,  # type: ignore[arg-type]
        train_data=train,
        eval_data=evaluate,
        loss=cross_entropy,
        optimizer=momentum,
        batch_size=64,
        lr=0.01,
        max_train_steps=2000,
        metrics={"accuracy": accuracy},
    )
