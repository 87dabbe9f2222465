"""Workloads that a worker finds by this file's path: a plain one, and some that kill or outgrow their worker."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Workload

DEADLY_SEED = 99


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def momentum(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def kills_once_or_always(built, batch):
    """Kills its process where the seed says so, or once where the file named in the environment is still there."""
    once = Path(os.environ.get("EXECUTOR_TEST_MARK", "absent"))
    if torch.initial_seed() == DEADLY_SEED or once.exists():
        once.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(built, batch)


def kills_its_node_once(built, batch):
    """Kills the parent of its process, a Ray node, where the file named in the environment is still there."""
    once = Path(os.environ.get("EXECUTOR_TEST_MARK", "absent"))
    if once.exists():
        once.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(built, batch)


def greedy(built, batch):
    """Asks for more memory than any machine has."""
    return cross_entropy(built, batch) + torch.empty(2**50).sum()


def make(loss):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    fields = {"name": "sent", "model": model, "optimizer": momentum, "batch_size": 16, "lr": 0.05}
    return Workload(**fields, train_data=data, eval_data=data, loss=loss, max_train_steps=10**6)


plain, deadly = make(cross_entropy), make(kills_once_or_always)
node_killer, too_large = make(kills_its_node_once), make(greedy)
