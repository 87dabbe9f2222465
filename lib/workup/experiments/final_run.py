"""Does the prescription train better than the present settings (playbook: D5, F4)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.experiments import instability
from workup.experiments.learning_rate import initial_loss
from workup.experiments.session import Session
from workup.finding import Finding, Prescription
from workup.judge import checkpoints
from workup.judge.difference import WORTH
from workup.trace import Trace, Trial

#: Steps at most (None: all of the run's), seeds to begin with and at most.
BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 120, "seeds": (3, 3)},
    "standard": {"steps": 3000, "seeds": (3, 5)},
    "thorough": {"steps": None, "seeds": (5, 8)},
}
EVALUATIONS = 50


def plan(session: Session, prescription: Prescription, *, more: int = 0) -> Mapping[str, list[Trial]]:
    """Equal steps and seeds for "present" and "prescribed", each with the workload's own schedule.

    Args:
        more: seeds beyond those of the budget.
    """
    budget, own = BUDGET[session.budget], session.workload
    steps = min(
        int(session.resolve_parameter("steps", fallback=budget["steps"] or own.max_train_steps)), own.max_train_steps
    )
    seeds = int(session.resolve_parameter("seeds", fallback=budget["seeds"][0])) + more
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


def more_seeds(
    session: Session, prescription: Prescription, groups: Mapping[str, list[Trace]]
) -> Mapping[str, list[Trace]]:
    """``groups`` with further seeds, one at a time, until they tell a difference or the budget's limit is reached."""
    most = 0 if session.knobs.get("seeds") else BUDGET[session.budget]["seeds"][1]
    while not judge(session, groups).is_conclusive and len(groups["present"]) < most:
        more = len(groups["present"]) + 1 - BUDGET[session.budget]["seeds"][0]
        trials = plan(session, prescription, more=more)
        groups = {name: session.run(runs, label=f"{name}, one more seed") for name, runs in trials.items()}
    return groups


def settings(prescription: Prescription) -> pd.DataFrame:
    """Present and prescribed settings side by side, and why."""
    rows = [
        {"setting": line.name, "present": line.today, "prescribed": line.value, "why": line.why}
        for line in prescription.settings
    ]
    return pd.DataFrame(rows, dtype=object).set_index("setting")


def schedules(session: Session, trials: Mapping[str, list[Trial]]) -> dict[str, np.ndarray]:
    """Learning rate per step of both sides, shape [steps]."""
    return {name: runs[0].learning_rates(session.workload.schedule) for name, runs in trials.items()}


def table(groups: Mapping[str, list[Trace]]) -> pd.DataFrame:
    """A row per run: settings, seed, status, stability, initial, best, best_step, last, examples, to_goal.

    ``best`` is the lowest evaluation loss (without evaluation data, the lowest mean of 50 training losses), at the
    0-based step ``best_step``, ``last`` the one the run ended with, and
    ``to_goal`` the seconds, at the run's median pace, until it first came to within 1% of the descent of the best of
    the present settings' run of that seed; NaN where it never did.
    """
    curves = {(name, trace.trial.seed): _curve(trace) for name, traces in groups.items() for trace in traces}
    rows = []
    for name, traces in groups.items():
        for trace in traces:
            curve, present = curves[name, trace.trial.seed], curves["present", trace.trial.seed]
            start, some = initial_loss(trace), curve.notna().any()
            goal = present.min() + WORTH * max(start - present.min(), 0.0)
            there = np.flatnonzero(curve <= goal)
            pace = float(trace.steps.seconds.median())
            rows.append(
                {
                    "settings": name,
                    "seed": trace.trial.seed,
                    "status": trace.status,
                    "stability": instability.verdict(trace).value,
                    "initial": start,
                    "best": float(curve.min()) if some else float("nan"),
                    "best_step": int(curve.argmin()) if some else -1,
                    "last": float(curve.dropna().iloc[-1]) if some else float("nan"),
                    "examples": int(trace.steps.examples.sum()),
                    "to_goal": float((there[0] + 1) * pace) if len(there) else float("nan"),
                }
            )
    return pd.DataFrame(rows)


def _curve(trace: Trace) -> pd.Series:
    """What a run is compared by, a value a step, NaN where there is none."""
    curve = trace.steps.eval_loss
    if not trace.trial.eval_every:
        curve = trace.steps.loss.rolling(min(50, trace.trial.steps)).mean()
    return curve.where(np.isfinite(curve))


def judge(session: Session, groups: Mapping[str, list[Trace]]) -> Finding:
    """improvement: prescribed against present, paired by seed."""
    trial = groups["prescribed"][0].trial
    if trial == groups["present"][0].trial:
        why = "The settings found are the ones you have, so there is nothing to compare."
        return Finding(name="improvement", value=0.0, rule=checkpoints.RULE, summary=why, evidence={"matters": False})
    what = "evaluation loss" if trial.eval_every else "training loss"
    return checkpoints.judge(table(groups), what=what, share=trial.steps / session.workload.max_train_steps)


def conclude(session: Session, prescription: Prescription, groups: Mapping[str, list[Trace]]) -> tuple[Finding, ...]:
    """improvement, which holds for this prescription alone."""
    return session.conclude(judge(session, groups), at=prescription.tried)
