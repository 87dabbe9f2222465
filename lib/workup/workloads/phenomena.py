"""Small models on digits that each show one phenomenon within seconds, and its cure (playbook: C2, C8, E6)."""

import itertools
import math
from functools import partial

from torch import Tensor, nn

from workup.workload import Workload
from workup.workloads.digits import classification
from workup.workloads.tabular import adam

WIDTH, DEPTH = 64, 12


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


def residual_unnormalised() -> Workload:
    """x + 2 f(x) without normalisation: the best learning rate lies at the edge of the unstable ones."""
    return classification("residual-unnormalised", partial(_stack, scale=2.0), lr=1e-3)


def relu_mlp_large_init() -> Workload:
    """Six ReLU layers initialised 1.5 times too large: the first gradients are the largest by far."""
    return classification("relu-mlp-large-init", _large_init, lr=1e-3)


def post_norm_mlp() -> Workload:
    """Norm(x + f(x)), twelve deep: fails at learning rates that its pre-norm twin trains at."""
    return classification("post-norm-mlp", partial(_stack, norm="post"), lr=1e-3, optimizer=adam)


def pre_norm_mlp() -> Workload:
    """x + f(Norm(x)), twelve deep."""
    return classification("pre-norm-mlp", partial(_stack, norm="pre"), lr=1e-3, optimizer=adam)


def _stack(*, norm: str = "none", scale: float = 1.0) -> nn.Module:
    blocks = [Residual(norm=norm, scale=scale) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 10))


def _large_init() -> nn.Module:
    widths = [64] + [128] * 6
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1.5 * math.sqrt(2 / layer.in_features))
            nn.init.zeros_(layer.bias)
    return model
