"""Is training unstable, when, and what helps (playbook: C2, C4, C5, C7, C8)."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pandas as pd

from workup.experiments.learning_rate import at, final_loss
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import fixes, stability
from workup.trace import Trace, Trial

BUDGET = {
    "smoke": {"steps": 120, "eval_examples": 64},
    "standard": {"steps": 500, "eval_examples": 128},
    "thorough": {"steps": 500, "eval_examples": 512},
}
#: lr* itself for comparison, the test rate, and the double-check (playbook: C5, C7).
MULTIPLES = (1, 2, 5, 10)
#: Verdicts that name no instability.
NOT_SHAKY = ("stable", "cannot_tell")


def plan(session: Session) -> list[Trial]:
    """One run at each multiple of lr*, evaluated after every step; equal weights and batches."""
    budget = BUDGET[session.budget]
    lr = session.settle("lr", finding="best_lr", fallback=session.workload.lr)
    size = session.settle("batch_size", finding="recommended_batch_size", fallback=session.workload.batch_size)
    steps = min(int(session.settle("steps", fallback=budget["steps"])), session.workload.max_train_steps)
    base = Trial(
        lr=lr,
        steps=steps,
        batch_size=int(size),
        seed=session.seed,
        eval_every=1 if session.workload.eval_data is not None else 0,
        eval_examples=int(budget["eval_examples"]),
    )
    return [at(base, lr * multiple) for multiple in MULTIPLES]


def verdict(trace: Trace) -> Finding:
    """The stability of one trace, from its per-step evaluation where it has one."""
    steps = trace.steps
    evaluated = steps.eval_loss if steps.eval_loss.notna().any() else None
    return stability.judge(steps.loss, grad_norm=steps.grad_norm, eval_loss=evaluated, lr=steps.lr, step=steps.step)


def table(traces: list[Trace]) -> pd.DataFrame:
    """A row per trace: times_best (its multiple of the first trace's rate), lr, stability, events, initial, final."""
    rows = []
    for trace in traces:
        found = verdict(trace)
        rows.append(
            {
                "times_best": trace.trial.lr / traces[0].trial.lr,
                "lr": trace.trial.lr,
                "stability": found.value or "cannot_tell",
                "events": len(found.evidence.get("events", ())),
                "initial": trace.steps.loss.iloc[0],
                "final": final_loss(trace),
                "status": trace.status,
            }
        )
    return pd.DataFrame(rows)


def plan_fixes(session: Session, traces: list[Trace]) -> Mapping[str, Trial]:
    """The playbook's remedies as paired trials at the lowest multiple that is not stable; none where all are."""
    shaky = [trace for trace in traces[1:] if verdict(trace).value not in NOT_SHAKY]
    if not shaky:
        return {"nothing": traces[1].trial}
    base, calm = shaky[0].trial, traces[0]
    norms = calm.steps.grad_norm
    clip = float(f"{np.nanpercentile(norms[np.isfinite(norms)], 90):.4g}") if np.isfinite(norms).any() else None
    ramp = max(1, base.steps // 10)
    tried = {
        "nothing": base,
        "warmup": dataclasses.replace(base, warmup_steps=ramp),
        "clipping": dataclasses.replace(base, clip_norm=clip),
        "warmup+clipping": dataclasses.replace(base, warmup_steps=ramp, clip_norm=clip),
        "lower lr": calm.trial,
    }
    return tried if clip else {fix: trial for fix, trial in tried.items() if "clipping" not in fix}


def fix_table(tried: Mapping[str, Trial], traces: list[Trace]) -> pd.DataFrame:
    """A row per remedy: fix, lr, stability, initial, final, status."""
    rows = table(traces).assign(fix=list(tried))
    return rows[["fix", "lr", "stability", "initial", "final", "status"]]


def conclude(session: Session, traces: list[Trace], fixed: pd.DataFrame) -> tuple[Finding, ...]:
    """stability (at 2 x lr*), unstable_lr (the lowest multiple that is not stable) and recommended_fix."""
    rows = table(traces)
    test = verdict(traces[1])
    missed = stability.judge(traces[1].steps.eval_loss[::50]) if traces[1].trial.eval_every else None
    seen_rarely = "not evaluated" if missed is None else str(missed.value)
    checks = {f"{row.times_best:.0f}x": row.stability for row in rows.itertuples()}
    test = dataclasses.replace(
        test,
        rule="playbook: C2, C5, C7",
        summary=f"At 2 x {traces[0].trial.lr:.3g}: {test.summary}",
        evidence={**test.evidence, "lr": traces[1].trial.lr, "multiples": checks, "evaluated_every_50": seen_rarely},
    )
    shaky = rows[~rows.stability.isin(NOT_SHAKY) & (rows.times_best > 1.5)]
    return session.conclude(test, _unstable(rows, shaky), fixes.judge(fixed))


def _unstable(rows: pd.DataFrame, shaky: pd.DataFrame) -> Finding:
    calm = float(rows.lr[rows.stability == "stable"].max()) if (rows.stability == "stable").any() else None
    untold = rows[rows.stability == "cannot_tell"]
    if shaky.empty and len(untold):
        return Finding(
            name="unstable_lr",
            value=None,
            rule="playbook: C7, D1",
            summary=f"Whether training is stable at {untold.lr.min():.3g} cannot be told: too few steps.",
            confidence="low",
            settle="Train longer.",
        )
    if shaky.empty:
        return Finding(
            name="unstable_lr",
            value=None,
            rule="playbook: C7, D1",
            summary=f"No instability up to {rows.lr.max():.3g}, {rows.times_best.max():.0f} times lr*.",
            confidence="high",
            settle="Sweep higher rates, if a higher one would be of use.",
        )
    first = shaky.iloc[0]
    return Finding(
        name="unstable_lr",
        value=float(first.lr),
        rule="playbook: C7, D1",
        summary=f"Training becomes unstable ({first.stability}) at {first.lr:.3g}, {first.times_best:.0f} times lr*.",
        interval=(calm, float(first.lr)) if calm is not None and calm < first.lr else None,
        evidence={"stable_up_to": calm, "stability": first.stability},
        caveats=("One run at each multiple of lr*; the edge lies somewhere below the multiple that failed.",),
    )
