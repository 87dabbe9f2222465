"""Byte-level language models over Python's own sources: a transformer with the norm before, or after.

Norm(x + f(x)), the original arrangement, is known to need a long warmup or a low learning rate;
x + f(Norm(x)) is the form in wide use (playbook: C8).
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workup.workload import Workload
from workup.workloads import data

CONTEXT, WIDTH, HEADS, DEPTH = 32, 32, 2, 6


class Attention(nn.Module):
    """Causal self-attention, [batch, positions, width] → the same.

    In plain operations: torch's fused attention has no batching rule, so several models could not train as one.
    """

    future: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = scores.masked_fill(self.future[:length, :length], -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Layer(nn.Module):
    """Attention, then a two-layer network, each in a residual step with its norm before or after."""

    def __init__(self, post_norm: bool) -> None:
        super().__init__()
        self.post_norm = post_norm
        network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.branches = nn.ModuleList([Attention(), network])
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


def next_byte(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Cross-entropy of the next byte, mean over positions, shape [batch], nats."""
    logits, targets = model(batch[0][:, :-1]), batch[0][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)


def accuracy(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Share of bytes predicted right, shape [batch]."""
    return (model(batch[0][:, :-1]).argmax(dim=-1) == batch[0][:, 1:]).float().mean(dim=1)


def adam(params: object, lr: float) -> torch.optim.Optimizer:
    """Adam with β = (0.9, 0.98), as transformers were first trained."""
    return torch.optim.Adam(params, lr=lr, betas=(0.9, 0.98))  # type: ignore[arg-type]


def text_transformer() -> Workload:
    """A pre-norm transformer over bytes of Python source, Adam."""
    return _workload("text-transformer", post_norm=False)


def text_transformer_postnorm() -> Workload:
    """The same transformer with its norms after the residual sum."""
    return _workload("text-transformer-postnorm", post_norm=True)


def _workload(name: str, *, post_norm: bool) -> Workload:
    train, evaluate = data.python_sources(context=CONTEXT)
    return Workload(
        name=name,
        model=partial(Transformer, post_norm),
        train_data=train,
        eval_data=evaluate,
        loss=next_byte,
        optimizer=adam,
        batch_size=16,
        lr=3e-4,
        max_train_steps=5000,
        metrics={"accuracy": accuracy},
    )
