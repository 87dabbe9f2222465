"""What many tests train: a small classifier on random but learnable data; and a clock that no busy machine delays."""

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Workload


def cross_entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def small_data(examples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


@pytest.fixture
def make_workload():
    """A function making the small workload, with any field replaced."""

    def make(**changes):
        fields = {
            "name": "small",
            "model": small_model,
            "train_data": small_data(200, 0),
            "eval_data": small_data(50, 1),
            "loss": cross_entropy,
            "optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
            "batch_size": 16,
            "lr": 0.05,
            "max_train_steps": 400,
        }
        return Workload(**{**fields, **changes})

    return make


@pytest.fixture
def workload(make_workload):
    return make_workload()


class Clock:
    """Time that passes only where a test says so, in place of the module ``time``."""

    def __init__(self):
        self.now = self.worked = self.start = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def work(self, seconds):
        self.now, self.worked = self.now + seconds, self.worked + seconds

    def perf_counter(self):
        self.now += 1e-6  # a loop that waits for time to pass ends
        return self.now

    def thread_time(self):
        return self.worked


class Worked:
    """One epoch of a DataLoader whose workers make their batches in the clock's time, each a few ahead."""

    def __init__(self, loader, clock, starts):
        self.loader, self.clock, self._sampler_iter = loader, clock, iter(loader.batch_sampler)
        self.free, self.queue, self.made = [clock.now + starts] * loader.num_workers, deque(), 0
        for _ in range(loader.num_workers * loader.prefetch_factor):
            self.put()

    def put(self):
        if (picks := next(self._sampler_iter, None)) is not None:
            worker, began = self.made % len(self.free), self.clock.now
            batch = self.loader.collate_fn([self.loader.dataset[i] for i in picks])
            self.free[worker] = max(self.free[worker], began) + self.clock.now - began
            self.clock.now, self.made = began, self.made + 1
            self.queue.append((self.free[worker], batch))

    def __next__(self):
        if not self.queue:
            raise StopIteration
        ready, batch = self.queue.popleft()
        self.clock.now = max(self.clock.now, ready)
        self.put()
        return batch


class Workers:
    """A DataLoader in the clock's time; starting its workers takes ``start`` seconds, once if they persist."""

    def __init__(self, loader, clock, start):
        self.loader, self.clock, self.start = loader, clock, start

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __iter__(self):
        if not self.num_workers:
            return iter(self.loader)
        starts, self.start = self.start, 0.0 if self.persistent_workers else self.start
        return Worked(self.loader, self.clock, starts)


@pytest.fixture
def clock(monkeypatch):
    """The time that the input pipeline is measured in. Waits are planted with ``clock.sleep``; workers are simulated,
    and take ``clock.start`` seconds to start."""
    from workup.measure import data, loader, stages

    clock, real = Clock(), data.loader
    monkeypatch.setattr(loader, "time", clock)
    monkeypatch.setattr(stages, "time", clock)
    monkeypatch.setattr(data, "loader", lambda *args, **kwargs: Workers(real(*args, **kwargs), clock, clock.start))
    return clock


@pytest.fixture
def emulated():
    """A context manager within which torch has an accelerator: ``emulated(kind="cuda", total=bytes, count=1)``."""
    from emulated.accelerator import emulated

    return emulated
