"""A Trial is one short run's settings; a Trace is what that run recorded."""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError, WorkloadError

#: How a trial can end. All but ``interrupted`` and ``failed`` are results and are not run again.
STATUSES = ("finished", "diverged", "out_of_memory", "interrupted", "failed")

#: One row per step; loss and grad_norm as seen (inf and NaN stay), before the step's update.
#: eval_loss is taken after the step's update and is NaN at steps without an evaluation.
COLUMNS = {
    "step": "int64",
    "lr": "float64",
    "loss": "float64",
    "grad_norm": "float64",
    "clipped": "bool",
    "eval_loss": "float64",
    "seconds": "float64",
    "data_seconds": "float64",
    "examples": "int64",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The settings of one run.

    Args:
        lr: peak learning rate.
        steps: steps in all, warmup included.
        batch_size: examples per step.
        warmup_steps: linear ramp to ``lr``: step t < warmup_steps trains at
            lr * (t + 1) / warmup_steps (playbook: D3).
        shape: what follows the warmup: ``constant``, ``workload`` for the workload's own schedule
            stretched over the remaining steps (playbook: D5), or ``rising`` for a range test: from
            a millionth of ``lr`` to ``lr``, by the same factor each step.
        clip_norm: gradient-clipping threshold on the whole gradient's L2 norm, or None
            (playbook: E1).
        clip_percentile: in place of clip_norm, clip at this percentile of the last 100 norms (playbook: E6).
        clip_from: the first step that is clipped; ``warmup_steps`` leaves the warmup unclipped (playbook: E6).
        change: what is set in the fresh model, as ``workup.measure.change`` reads it (playbook: C8).
        optimizer: a name from ``workup.measure.optimizers``, or None for the workload's own.
        seed: fixes the initial weights and the order of the batches.
        eval_every: evaluate after every so many steps; 0 never.
        eval_examples: size of the fixed evaluation sample; None takes all of it.

    Raises:
        ParameterError: a value outside its range, by name.

    Example:
        >>> Trial(lr=0.1, steps=100, batch_size=64).learning_rates()[:2].tolist()
        [0.1, 0.1]
    """

    lr: float
    steps: int
    batch_size: int
    warmup_steps: int = 0
    shape: str = "constant"
    clip_norm: float | None = None
    clip_percentile: float | None = None
    clip_from: int = 0
    change: str = ""
    optimizer: str | None = None
    seed: int = 0
    eval_every: int = 0
    eval_examples: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise ParameterError(f"Trial({name}={getattr(self, name)!r}): {name} must be {what}.")

        def whole(value: Any, least: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        def positive(value: Any) -> bool:
            return isinstance(value, (int, float)) and math.isfinite(value) and value > 0

        need(positive(self.lr), "lr", "a positive, finite number")
        need(whole(self.steps, 1), "steps", "a whole number of at least 1")
        need(whole(self.batch_size, 1), "batch_size", "a whole number of at least 1")
        need(whole(self.warmup_steps, 0), "warmup_steps", "a whole number of at least 0")
        need(self.warmup_steps <= self.steps, "warmup_steps", f"at most steps ({self.steps})")
        need(self.shape in ("constant", "workload", "rising"), "shape", "'constant', 'workload' or 'rising'")
        need(self.clip_norm is None or positive(self.clip_norm), "clip_norm", "positive and finite, or None")
        share = self.clip_percentile
        need(share is None or (positive(share) and share < 100), "clip_percentile", "between 0 and 100, or None")
        need(share is None or self.clip_norm is None, "clip_percentile", "None where clip_norm is given")
        need(whole(self.clip_from, 0), "clip_from", "a whole number of at least 0")
        need(whole(self.eval_every, 0), "eval_every", "a whole number of at least 0")
        need(self.eval_examples is None or whole(self.eval_examples, 1), "eval_examples", "at least 1, or None")

    def learning_rates(self, schedule: Callable[[float], float] | None = None) -> np.ndarray:
        """The peak learning rate of every step, shape [steps].

        ``schedule(fraction)`` multiplies the part after the warmup when ``shape`` is
        ``workload``; fraction runs from 0 to just under 1 over that part.

        Raises:
            WorkloadError: the schedule fails, or gives no finite number of at least 0.
        """
        rates = np.full(self.steps, float(self.lr))
        ramp = self.warmup_steps
        rates[:ramp] *= np.arange(1, ramp + 1) / max(ramp, 1)
        if self.shape == "rising":
            rates[ramp:] *= np.logspace(-6, 0, self.steps - ramp)
        if self.shape == "workload" and schedule is not None:
            rest = self.steps - ramp
            rates[ramp:] *= [_multiplier(schedule, i / rest) for i in range(rest)]
        return rates

    def id(self, fingerprint: str) -> str:
        """16 hexadecimal digits over everything that changes the result, the workload included."""
        text = json.dumps([dataclasses.asdict(self), fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _multiplier(schedule: Callable[[float], float], fraction: float) -> float:
    try:
        value = float(schedule(fraction))
    except Exception as error:
        raise WorkloadError(f"schedule({fraction:g}) failed ({type(error).__name__}: {error}).") from error
    if not 0 <= value < math.inf:
        raise WorkloadError(f"schedule({fraction:g}) is {value:g}: a finite multiplier of at least 0 is needed.")
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What one trial recorded: a table of steps and how it ended.

    Args:
        trial: the settings.
        steps: the table, columns as in ``COLUMNS`` (and ``eval_<metric>`` for the workload's metrics).
        status: one of ``STATUSES``.
        reason: for a trial that did not finish, what happened and at which step.
        peak_bytes: peak device memory of the trial, None where the device does not tell.
        device, versions: where and with what it ran.
    """

    trial: Trial
    steps: pd.DataFrame
    status: str = "finished"
    reason: str = ""
    peak_bytes: int | None = None
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether this is a result, not to be run again."""
        return self.status != "interrupted"

    def to_bytes(self) -> bytes:
        """Parquet, the header as JSON in the file's own metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "steps"}
        header["trial"] = dataclasses.asdict(self.trial)
        header["versions"] = dict(self.versions)
        table = pa.Table.from_pandas(self.steps, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"workup": json.dumps(header).encode()})
        sink = io.BytesIO()
        pq.write_table(table, sink)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Trace":
        """The inverse of :meth:`to_bytes`; NaN and inf come back as they were."""
        import pyarrow.parquet as pq

        table = pq.ParquetFile(io.BytesIO(data)).read()
        header = json.loads(table.schema.metadata[b"workup"])
        header["trial"] = Trial(**header["trial"])
        return cls(steps=table.to_pandas(), **header)
