"""Workloads that a child process finds by this file's path: hungry, deadly, slow and plain ones."""

import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Workload

MIB = 2**20


def make(loss, examples=4096):
    x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1))
    return Workload(
        name="probed",
        model=lambda: nn.Linear(4, 1),
        train_data=data,
        eval_data=data,
        loss=loss,
        optimizer=lambda params, lr: torch.optim.Adam(params, lr),
        batch_size=8,
        lr=0.01,
        max_train_steps=100,
    )


def squared(model, batch):
    return (model(batch[0])[:, 0] - batch[1]) ** 2


def one_mib_an_example(model, batch):
    held = torch.ones(len(batch[0]), MIB // 4)
    return squared(model, batch) + 0 * held[:, 0]


def kills_itself_at_32(model, batch):
    if len(batch[0]) >= 32:
        os.kill(os.getpid(), signal.SIGKILL)
    return squared(model, batch)


def aborts_at_32(model, batch):
    if len(batch[0]) >= 32:
        os.abort()
    return squared(model, batch)


def exits_at_32(model, batch):
    if len(batch[0]) >= 32:
        os._exit(3)
    return squared(model, batch)


def sleeps_at_32(model, batch):
    time.sleep(60 if len(batch[0]) >= 32 else 0)
    return squared(model, batch)


def plain():
    return make(squared)


def few():
    return make(squared, examples=100)


def hungry():
    return make(one_mib_an_example)


def killed():
    return make(kills_itself_at_32)


def aborted():
    return make(aborts_at_32)


def exited():
    return make(exits_at_32)


def sleepy():
    return make(sleeps_at_32)
