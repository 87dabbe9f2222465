"""What the log of a run that was never made for it tells (playbook: C2, E3, F1, F3), with nothing run again."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge import clipping, history, stability
from workup.logs import Log, read
from workup.trace import COLUMNS, Trace, Trial

if TYPE_CHECKING:
    from workup.experiments.session import Session

#: From this share of norms at the largest one on, they were logged after clipping.
CAPPED = 0.05
BUDGET = {"smoke": {"steps": 60}, "standard": {"steps": 300}, "thorough": {"steps": 1000}}


def assigned(pairs: Iterable[str]) -> dict[str, str]:
    """``["loss=train/loss"]`` as our names to the file's.

    Raises:
        ParameterError: one has no "=".
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ParameterError(f"column {wrong[0]!r}: write it as OURS=THEIRS, for example loss=train/loss.")
    split = (pair.partition("=") for pair in pairs)
    return {ours.strip(): theirs.strip() for ours, _, theirs in split}


def load(session: "Session") -> Log:
    """The log that the notebook was given; without one, that of a short trial of the workload as it stands."""
    from workup.notebooks import project_root

    given = session.resolve_parameter("log", fallback=None)
    if given is not None:
        pairs = (session.resolve_parameter("columns", fallback=None) or "").split(",")
        return read(project_root() / given, columns=assigned(list(filter(None, pairs))))
    own, steps = session.workload, BUDGET[session.budget]["steps"]
    every = steps // 10 if own.eval_data is not None else 0
    trial = Trial(lr=own.lr, steps=steps, batch_size=own.batch_size, eval_every=every, eval_examples=256)
    session.run([trial], label="a run to read")
    return read(session.study.folder / "traces" / f"{trial.id(session.fingerprint)}.parquet")


def trace(log: Log, verdict: Finding, *, column: str = "loss") -> Trace:
    """What was logged with a column, as a trace for the figures; of its trial only the peak rate is known, if that."""
    table = log.table().reindex(columns=list(COLUMNS))
    table = table[table["step"].isin(log.series.get(column, pd.Series()).index)]
    peak = table["lr"].max()
    trial = Trial(lr=float(peak) if peak > 0 else 1.0, steps=max(len(table), 1), batch_size=1)
    return Trace(trial=trial, steps=table, status="diverged" if verdict.value == "diverged" else "finished")


def conclude(session: "Session", findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Record the findings, under names of their own: they speak of another run than the study's."""
    return session.conclude(*(dataclasses.replace(f, name=f"logged_{f.name}") for f in findings))


def judge(log: Log) -> tuple[Finding, ...]:
    """``stability``, and of what was logged ``clip_norm`` (from its norms), ``throughput``, ``input_bound``,
    ``evaluation_interval`` and ``lr_schedule``.
    """
    loss, of = log.series["loss"], log.series.get
    lr, norm, seen = of("lr"), of("grad_norm"), of("eval_loss")
    evals = None
    if seen is not None:  # an evaluation stands at the last loss logged before it
        at = (np.searchsorted(loss.index, seen.index, side="right") - 1).clip(0)
        evals = pd.Series(seen.to_numpy(), at).groupby(level=0).last().reindex(range(len(loss)))
    rates = None if lr is None else lr.reindex(loss.index, method="ffill").bfill()
    norms = None if norm is None else norm.reindex(loss.index)
    found = [stability.judge(loss, grad_norm=norms, eval_loss=evals, lr=rates, step=loss.index)]
    found += [_threshold(norm)] if norm is not None else []
    found += history.pace(**{name: of(name) for name in ("seconds", "data_seconds", "examples", "throughput", "time")})
    found += [history.evaluation(seen)] if seen is not None else []
    found += [history.schedule(lr)] if lr is not None else []
    return tuple(found)


def _threshold(norms: pd.Series) -> Finding:
    """The threshold, unless the norms stop at one value as they do where they were logged after clipping (E1)."""
    finding = clipping.judge(norms)
    if finding.is_conclusive and not finding.evidence["helps"]:
        finding = dataclasses.replace(finding, value="none")
    at_top = float(np.mean(norms > 0.999 * norms[np.isfinite(norms)].max()))
    if at_top < CAPPED or finding.evidence.get("median") == finding.evidence.get("largest"):
        return finding
    summary = f"{at_top:.0%} of the norms stop at {finding.evidence['largest']:.3g}: they were logged after clipping."
    settle = "Log the norm before clipping: clip_grad_norm_ returns it."
    return dataclasses.replace(finding, value=None, summary=summary, settle=settle, confidence="low", caveats=())


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Those that ask for something to be done: an instability or a loss that was not finite, training that waits for
    data, evaluations at fault."""
    wrong = {
        "stability": lambda f: f.value not in ("stable", "cannot_tell") or f.evidence.get("nonfinite"),
        "clip_norm": lambda f: f.evidence["nonfinite"] > 0,
        "input_bound": lambda f: f.value,
        "evaluation_interval": lambda f: f.is_conclusive and (f.evidence["irregular"] or f.evidence["period"]),
    }
    return [finding for finding in findings if finding.name in wrong and wrong[finding.name](finding)]
