"""Where the time of one batch goes before training sees it, and which of its fields training never looks at."""

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import IterableDataset, default_collate

from workup.measure import data, devices
from workup.measure.state import preserved, seed_everything
from workup.measure.steps import stepper
from workup.measure.syncs import address, watched
from workup.workload import Workload, size

#: Where data sets keep their transforms (torchvision's names), and the data sets they wrap.
TRANSFORMS = ("transform", "target_transform", "transforms")
WRAPPED = ("dataset", "datasets")


class Clock:
    """Wall and CPU seconds by stage, in order of first use."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], np.ndarray] = {}

    def time(self, kind: str, stage: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``call(*args, **kwargs)``, its time booked under ``stage``."""
        began = np.array([time.perf_counter(), time.thread_time()])
        try:
            return call(*args, **kwargs)
        finally:
            spent = np.array([time.perf_counter(), time.thread_time()]) - began
            self.spent[kind, stage] = self.spent.get((kind, stage), 0.0) + spent


class Timed:
    """A transform that books its time, and is otherwise the one it wraps."""

    def __init__(self, call: Any, clock: Clock) -> None:
        self.call, self.stage, self.clock = call, getattr(call, "__name__", type(call).__name__), clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.clock.time("transform", self.stage, self.call, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["call"], name)


def stages(
    workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0, batches: int = 4
) -> pd.DataFrame:
    """The time of one batch by stage, in one process: read, each transform, collate, transfer.

    The transforms of a data set with ``transform``, ``target_transform`` or ``transforms`` (also
    of the data sets it wraps) are timed one by one on a shallow copy; ``read`` is the rest of
    ``train_data[i]``.

    Returns:
        One row a stage: stage, kind, batch_seconds, example_seconds, share, waiting (the share of its
        time that no CPU worked on it: storage, network, sleep).
    """
    clock = Clock()
    with preserved():
        seed_everything(seed)
        fetch = _fetcher(workload, batch_size, clock)
        fetch()
        clock.spent.clear()
        for _ in range(batches):
            examples = clock.time("read", "read", fetch)
            if not data.sliceable(workload):
                examples = clock.time("collate", "collate", _collate(workload), examples)
            clock.time("transfer", "transfer", _moved, examples, device)
    inside = sum(spent for (kind, _), spent in clock.spent.items() if kind == "transform")
    clock.spent["read", "read"] = clock.spent["read", "read"] - inside
    order = sorted(clock.spent, key=lambda key: ("read", "transform", "collate", "transfer").index(key[0]))
    table = pd.DataFrame([{"stage": stage, "kind": kind} for kind, stage in order])
    wall, cpu = np.array([clock.spent[key] for key in order]).clip(0).T / batches
    table["batch_seconds"], table["example_seconds"], table["share"] = wall, wall / batch_size, wall / wall.sum()
    table["waiting"] = (1 - cpu / np.maximum(wall, 1e-9)).clip(0, 1)
    return table


def fields(workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0) -> pd.DataFrame:
    """The tensors of a batch, and whether one training step looks at them (playbook: F2).

    A field is used where an operator, forward or backward, reads its memory; being moved, or
    asked for its shape, is no use.

    Returns:
        One row a tensor: field, bytes (of a batch), share, used, seconds (to collate and
        transfer it; NaN with a collate_fn of the user's own).
    """
    touched: set[int] = set()
    rows = []
    with preserved():
        step = stepper(dataclasses.replace(workload, compile=False), device=device, seed=seed)
        examples = _fetcher(workload, batch_size, Clock())()
        batch = _moved(examples if data.sliceable(workload) else _collate(workload)(examples), device)
        with watched(lambda places: None, touched):
            step(batch)
        for path, leaf in tree_leaves_with_path(dict(batch) if isinstance(batch, Mapping) else batch):
            if isinstance(leaf, Tensor) and leaf.numel():
                name = keystr(path).replace("['", ".").replace("']", "").lstrip(".")
                rows.append((name, leaf.nbytes, address(leaf) in touched, _cost(workload, examples, path, device)))
    table = pd.DataFrame(rows, columns=["field", "bytes", "used", "seconds"])
    table.insert(2, "share", table["bytes"] / max(table["bytes"].sum(), 1))
    return table


def _cost(workload: Workload, examples: Any, path: tuple[Any, ...], device: str) -> float:
    if "collate_fn" in workload.loader:
        return float("nan")

    def part(example: Any) -> Any:
        return functools.reduce(lambda inside, key: key.get(inside), path, example)

    began = time.perf_counter()
    sliced = data.sliceable(workload)
    _moved(part(examples).clone() if sliced else default_collate([part(example) for example in examples]), device)
    return time.perf_counter() - began


def _moved(batch: Any, device: str) -> Any:
    moved = data.to_device(batch, device)
    devices.synchronize(device)
    return moved


def _collate(workload: Workload) -> Callable[[Any], Any]:
    return workload.loader.get("collate_fn") or default_collate


def _fetcher(workload: Workload, batch_size: int, clock: Clock) -> Callable[[], Any]:
    """A function giving a batch's examples, uncollated (sliced data: the batch), its transforms on ``clock``."""
    source = timed_copy(workload.train_data, clock)
    if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
        stream: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(source))
        return lambda: list(itertools.islice(stream, batch_size))
    length = size(source) or 1
    try:
        source[0]
    except Exception:  # a composition that will not have its parts wrapped: their time counts as reading
        source = workload.train_data

    def fetch() -> Any:
        picks = torch.randint(length, (batch_size,)).tolist()
        if data.sliceable(workload):
            return source[picks]
        return source.__getitems__(picks) if hasattr(source, "__getitems__") else [source[i] for i in picks]

    return fetch


def timed_copy(source: Any, clock: Clock) -> Any:
    """A shallow copy of a data set or composed transform whose transforms book their time; itself where it has none."""
    own = getattr(source, "__dict__", {})
    held = [name for name in (*TRANSFORMS, *WRAPPED) if own.get(name) is not None]
    if not held:
        return source
    twin = copy.copy(source)
    for name in held:
        value, timed = own[name], functools.partial(_timed, clock=clock, whole=name in WRAPPED)
        twin.__dict__[name] = type(value)(map(timed, value)) if isinstance(value, (list, tuple)) else timed(value)
    return twin


def _timed(value: Any, *, clock: Clock, whole: bool) -> Any:
    """``value`` with its parts timed; if it has none and is no data set (``whole``), itself timed."""
    twin = timed_copy(value, clock)
    return Timed(value, clock) if twin is value and callable(value) and not whole else twin
