"""Byte-level language models over Python's own sources: a transformer with the norm before, or after.

Norm(x + f(x)), the original arrangement, is known to need a long warmup or a low learning rate;
x + f(Norm(x)) is the form in wide use (playbook: C8).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data

CONTEXT, WIDTH, HEADS, DEPTH = 64, 48, 4, 8


class Attention(nn.Module):
    """Causal self-attention, [batch, positions, width] → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        heads = self.qkv(x).view(batch, positions, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, WIDTH))


class Layer(nn.Module):
    """Attention, then a two-layer network, each in a residual step with its norm before or after."""

    def __init__(self, post_norm: bool) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.branches = nn.ModuleList(
            [Attention(), nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + branch(x)) if self.post_norm else x + branch(norm(x))
        return x


class Transformer(nn.Module):
    """[batch, positions] bytes → [batch, positions, 256] logits of the next byte."""

    def __init__(self, post_norm: bool) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*[Layer(post_norm) for _ in range(DEPTH)])
        self.norm = nn.Identity() if post_norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.head.weight, std=0.1 / math.sqrt(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(self.bytes(tokens) + places)))


def pre_norm() -> nn.Module:
    """The form in wide use, x + f(Norm(x))."""
    return Transformer(post_norm=False)


def post_norm() -> nn.Module:
    """The original form, Norm(x + f(x))."""
    return Transformer(post_norm=True)


def next_byte(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Cross-entropy of the next byte, mean over positions, shape [batch], nats."""
    tokens = batch[0]
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)


def accuracy(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Share of bytes predicted right, shape [batch]."""
    tokens = batch[0]
    return (model(tokens[:, :-1]).argmax(dim=-1) == tokens[:, 1:]).float().mean(dim=1)


def adam(params: object, lr: float) -> torch.optim.Optimizer:
    """Adam with β = (0.9, 0.98), as transformers were first trained."""
    return torch.optim.Adam(params, lr=lr, betas=(0.9, 0.98))  # type: ignore[arg-type]


def text_transformer() -> Workload:
    """A pre-norm transformer over bytes of Python source, Adam."""
    return _workload("text-transformer", pre_norm)


def text_transformer_postnorm() -> Workload:
    """The same transformer with its norms after the residual sum."""
    return _workload("text-transformer-postnorm", post_norm)


def _workload(name: str, model: object) -> Workload:
    train, evaluate = data.python_sources(context=CONTEXT)
    return Workload(
        name=name,
        model=model,  # type: ignore[arg-type]
        train_data=train,
        eval_data=evaluate,
        loss=next_byte,
        optimizer=adam,
        batch_size=16,
        lr=3e-4,
        max_train_steps=5000,
        metrics={"accuracy": accuracy},
    )
