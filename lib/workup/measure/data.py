"""Batches: the same ones in the same order for the same seed, whatever else a trial sets."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from workup.errors import WorkloadError
from workup.workload import Workload, size

#: First batches whose drawing is watched for moving a global random stream: it does so from the start, or never.
LOOKED_AT = 4


def loader(workload: Workload, batch_size: int, *, seed: int) -> DataLoader:
    """The training loader: reshuffled every epoch from ``seed``, the last partial batch dropped.

    Raises:
        WorkloadError: ``batch_size`` exceeds the data set.
    """
    data, examples = workload.train_data, size(workload.train_data)
    if examples is not None and batch_size > examples:
        raise WorkloadError(f"batch size {batch_size} is larger than train_data of {workload.name!r} ({examples}).")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return DataLoader(data, batch_size=batch_size, drop_last=True, generator=generator, **workload.loader)
    # The loader draws its workers' seeds from one generator and the examples' order from another:
    # the order is then the same whatever the loader's options.
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    if sliceable(workload):
        batch_sampler = BatchSampler(sampler, batch_size, drop_last=True)
        return DataLoader(data, batch_size=None, sampler=batch_sampler, generator=generator, **workload.loader)
    return DataLoader(
        data, batch_size=batch_size, sampler=sampler, drop_last=True, generator=generator, **workload.loader
    )


def indices(workload: Workload, batch_size: int, *, seed: int, step: int) -> list[int] | None:
    """Which examples the training batch of that step holds; None for data that is only iterated over."""
    examples = workload.train_data
    if isinstance(examples, IterableDataset) or size(examples) is None or not hasattr(examples, "__getitem__"):
        return None
    source = loader(workload, batch_size, seed=seed)
    drawn: Any = source.sampler if source.batch_sampler is None else source.batch_sampler
    for _ in range(step // len(drawn)):
        list(drawn)
    return list(next(itertools.islice(drawn, step % len(drawn), None)))


def sliceable(workload: Workload, data: Any = None) -> bool:
    """Whether a batch is one indexing of tensors: the same batch as collating examples, far sooner."""
    data = workload.train_data if data is None else data
    return type(data) is TensorDataset and "collate_fn" not in workload.loader


def batches(workload: Workload, batch_size: int, *, seed: int, device: str) -> Iterator[Any]:
    """Training batches on ``device``, without end, epoch after epoch.

    Raises:
        WorkloadError: the data holds no full batch.
    """
    source = loader(workload, batch_size, seed=seed)
    while True:
        empty = True
        for batch in source:
            empty = False
            yield to_device(batch, device)
        if empty:
            raise WorkloadError(f"train_data of {workload.name!r} gave no full batch of {batch_size}.")


class BatchCache:
    """The batches of a sweep, drawn once: trials of one batch size and seed get the same tensors again.

    Drawn anew are batches whose drawing moves a global random stream, from which the trials draw too; those that a
    trial wrote into or that are not all tensors; and what does not fit into ``room`` bytes.
    """

    def __init__(self, workload: Workload, *, device: str, room: float) -> None:
        self.workload, self.device, self.room = workload, device, room
        self.kept: dict[tuple[int, int], tuple[list[tuple[Any, list[int]]], Iterator[Any]]] = {}
        self.given_up: set[tuple[int, int]] = set()

    def batches(self, batch_size: int, *, seed: int) -> Iterator[Any]:
        """As :func:`batches`."""
        key, step = (batch_size, seed), 0
        fresh = batches(self.workload, batch_size, seed=seed, device=self.device)
        drawn, source = self.kept.setdefault(key, ([], fresh))
        while key not in self.given_up:
            if step == len(drawn):
                before = _streams() if step < LOOKED_AT else None
                try:
                    batch = next(source)
                except BaseException:  # an iterator that failed is at its end: the next trial draws from its own
                    self._give_up(key)
                    raise
                if not self._fits(batch) or (before and before != _streams()):
                    self._give_up(key)
                    yield batch
                    yield from source
                    return
                drawn.append((batch, _versions(batch)))
            elif _versions(drawn[step][0]) != drawn[step][1]:
                self._give_up(key)
                break
            yield drawn[step][0]
            step += 1
        yield from itertools.islice(fresh, step, None)

    def _give_up(self, key: tuple[int, int]) -> None:
        self.given_up.add(key)
        self.kept.pop(key)

    def _fits(self, batch: Any) -> bool:
        leaves = tree_leaves(batch)
        self.room -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return self.room > 0 and all(isinstance(leaf, (Tensor, int, float, str)) for leaf in leaves)


def _versions(batch: Any) -> list[int]:
    """How often each tensor of a batch has been written into."""
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _streams() -> tuple[bytes, bytes, int, int]:
    """Where the global random streams stand."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), state[1].tobytes(), state[2], hash(random.getstate())


def evaluation_batches(
    workload: Workload, *, batch_size: int, examples: int | None = None, device: str
) -> Iterator[Any]:
    """The first ``examples`` of the evaluation data (None: all), in order; the last batch may be partial."""
    data = workload.eval_data
    if data is None:
        raise WorkloadError(f"workload {workload.name!r} has no eval_data, so it cannot be evaluated.")
    options = {key: workload.loader[key] for key in ("collate_fn",) if key in workload.loader}
    left = examples if examples is not None else (size(data) or 2**62)
    batch_size = min(batch_size, left)
    if sliceable(workload, data):
        sampler = BatchSampler(SequentialSampler(range(min(left, len(data)))), batch_size, drop_last=False)
        source = DataLoader(data, batch_size=None, sampler=sampler, generator=torch.Generator())
    else:
        if size(data) is not None and hasattr(data, "__getitem__"):
            data = torch.utils.data.Subset(data, range(min(left, len(data))))
        source = DataLoader(data, batch_size=batch_size, generator=torch.Generator(), **options)
    for batch in source:
        if left <= 0:
            return
        left -= batch_length(batch)
        yield to_device(batch, device)


def to_device(batch: Any, device: str) -> Any:
    """``batch`` with every tensor in it on ``device``; containers keep their type."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def batch_length(batch: Any) -> int:
    """Number of examples: the first dimension of the first tensor found, else the strings in a list, else 1."""
    length = _first_dimension(batch)
    if length is None:
        length = len(batch) if isinstance(batch, list) and all(isinstance(text, str) for text in batch) else 1
    return length


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    values = batch if isinstance(batch, (list, tuple)) else batch.values() if isinstance(batch, Mapping) else ()
    for value in values:
        if (length := _first_dimension(value)) is not None:
            return length
    return None
