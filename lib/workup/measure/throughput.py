"""How fast each batch size trains: stretches of steps, sizes interleaved (playbook: B2, B3)."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset

from workup.measure import data
from workup.trace import Trace, Trial
from workup.workload import Workload, size

#: First steps of a stretch that are left out: allocation, thread pools, kernel selection, loader start.
WARM_UP = 3
#: Batches in an epoch of examples that are repeated: with one or two, the epochs' starts would be most of the time.
EPOCH = 4


def repeatable(workload: Workload) -> bool:
    """Whether its examples can be asked for again and again, by their index."""
    examples = workload.train_data
    return bool(size(examples)) and hasattr(examples, "__getitem__") and not isinstance(examples, IterableDataset)


def wrapped(workload: Workload, batch_size: int) -> Workload:
    """A ``repeatable`` workload with its examples repeated until batches of that size are full: to time, not to train.

    Tensors are repeated as tensors, since batches are sliced from them; other data is read again.
    """
    examples: Any = workload.train_data
    times = math.ceil(EPOCH * batch_size / len(examples))
    if data.sliceable(workload):
        tensors = [t.repeat(times, *[1] * (t.dim() - 1)) for t in examples.tensors]
        return dataclasses.replace(workload, train_data=TensorDataset(*tensors))
    return dataclasses.replace(workload, train_data=ConcatDataset([examples] * times))


def stretches(
    step_seconds: Mapping[int, float], *, lr: float, seed: int, seconds: float, least: int = 4, most: int = 200
) -> list[Trial]:
    """One round: a stretch of about ``seconds`` at every size, in an order drawn from ``seed``.

    Sizes measured one after another would each carry the machine's mood of that minute;
    rounds, each in another order, spread it over all of them.

    Args:
        step_seconds: batch size -> time of a step as known so far [s].
        lr: any rate that does not diverge: time does not depend on it.
        least, most: bounds on the steps of a stretch, warm-up aside.
    """
    order = np.random.default_rng(seed).permutation(sorted(step_seconds)).tolist()
    count = {size: min(max(math.ceil(seconds / max(step_seconds[size], 1e-6)), least), most) for size in order}
    return [Trial(lr=lr, steps=WARM_UP + count[size], batch_size=size, seed=seed) for size in order]


def table(traces: Iterable[Trace]) -> pd.DataFrame:
    """A row per stretch: batch_size, seed, steps, step_seconds, data_seconds (means), examples_per_second.

    Means, since a stretch's throughput is its examples over its time: a loader that delivers
    in bursts has a fine median and a poor mean. A stretch that did not finish has NaN.
    """
    rows = []
    for trace in traces:
        kept = trace.steps.iloc[WARM_UP:] if trace.status == "finished" else trace.steps.iloc[:0]
        seconds = float(kept["seconds"].sum()) if len(kept) else math.nan
        rows.append(
            {
                "batch_size": trace.trial.batch_size,
                "seed": trace.trial.seed,
                "steps": len(kept),
                "step_seconds": seconds / len(kept) if len(kept) else math.nan,
                "data_seconds": float(kept["data_seconds"].mean()) if len(kept) else math.nan,
                "examples_per_second": float(kept["examples"].sum()) / seconds if len(kept) else math.nan,
            }
        )
    names = ["batch_size", "seed", "steps", "step_seconds", "data_seconds", "examples_per_second"]
    return pd.DataFrame(rows, columns=names).sort_values(["batch_size", "seed"], ignore_index=True)


def powers_of_two(low: int, high: int, *, also: Sequence[int] = ()) -> list[int]:
    """Powers of two from ``low`` to ``high``, and those of ``also`` that lie between.

    >>> powers_of_two(3, 20, also=[12, 50])
    [4, 8, 12, 16]
    """
    powers = [2**k for k in range(high.bit_length()) if low <= 2**k <= high]
    return sorted({*powers, *(size for size in also if low <= size <= high)})
