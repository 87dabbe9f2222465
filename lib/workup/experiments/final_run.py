"""Does the prescription train better than the present settings (playbook: D5, F4)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.experiments import instability
from workup.experiments.session import Session
from workup.finding import Finding, Prescription
from workup.judge import checkpoints
from workup.trace import Trace, Trial

BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 120, "seeds": 3},
    "standard": {"steps": 1000, "seeds": 3},
    "thorough": {"steps": None, "seeds": 5},
}
EVALUATIONS = 50


def plan(session: Session, prescription: Prescription) -> Mapping[str, list[Trial]]:
    """Equal steps and seeds for "present" and "prescribed", each with the workload's own schedule."""
    budget, own = BUDGET[session.budget], session.workload
    steps = min(int(session.settle("steps", fallback=budget["steps"] or own.max_train_steps)), own.max_train_steps)
    seeds = int(session.settle("seeds", fallback=budget["seeds"]))
    shared = {
        "steps": steps,
        "shape": "workload",
        "eval_every": max(1, steps // EVALUATIONS) if own.eval_data is not None else 0,
        "eval_examples": 1024,
    }
    present = {"lr": own.lr, "batch_size": own.batch_size}
    prescribed = {
        "lr": prescription.peak_lr,
        "batch_size": prescription.batch_size,
        "warmup_steps": min(prescription.warmup_steps, steps),
        "clip_norm": prescription.clip_norm,
    }
    return {
        name: [Trial(**shared, **settings, seed=session.seed + i) for i in range(seeds)]  # type: ignore[arg-type]
        for name, settings in (("present", present), ("prescribed", prescribed))
    }


def settings(session: Session, prescription: Prescription) -> pd.DataFrame:
    """Present and prescribed settings side by side, and which notebook each comes from."""
    own = session.workload
    present = {"batch_size": own.batch_size, "peak_lr": own.lr, "warmup_steps": 0, "clip_norm": None}
    rows = [
        {"setting": key, "present": value, "prescribed": getattr(prescription, key), "from": prescription.sources[key]}
        for key, value in present.items()
    ]
    return pd.DataFrame(rows, dtype=object).set_index("setting")


def schedules(session: Session, trials: Mapping[str, list[Trial]]) -> dict[str, np.ndarray]:
    """Learning rate per step of both sides, shape [steps]."""
    return {name: runs[0].learning_rates(session.workload.schedule) for name, runs in trials.items()}


def table(groups: Mapping[str, list[Trace]]) -> pd.DataFrame:
    """A row per run: settings, seed, status, stability, best (lowest evaluation loss), best_step, examples, seconds.

    Without evaluation data, best is the lowest mean of 50 training losses.
    """
    rows = []
    for name, traces in groups.items():
        for trace in traces:
            curve = trace.steps.eval_loss
            if not trace.trial.eval_every:
                curve = trace.steps.loss.rolling(min(50, trace.trial.steps)).mean()
            finite = curve.where(np.isfinite(curve))
            some = finite.notna().any()
            rows.append(
                {
                    "settings": name,
                    "seed": trace.trial.seed,
                    "status": trace.status,
                    "stability": instability.verdict(trace).value,
                    "best": float(finite.min()) if some else float("nan"),
                    "best_step": int(finite.argmin()) if some else -1,
                    "examples": int(trace.steps.examples.sum()),
                    "seconds": float(trace.steps.seconds.sum()),
                }
            )
    return pd.DataFrame(rows)


def conclude(session: Session, groups: Mapping[str, list[Trace]]) -> tuple[Finding, ...]:
    """improvement: prescribed against present, paired by seed."""
    trial = groups["prescribed"][0].trial
    what = "evaluation loss" if trial.eval_every else "training loss"
    share = trial.steps / session.workload.max_train_steps
    return session.conclude(checkpoints.judge(table(groups), what=what, share=share))
