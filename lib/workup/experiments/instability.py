"""Is training unstable, when, and what helps (playbook: C2, C4, C5, C7, C8)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.experiments.learning_rate import at, final_loss, initial_loss
from workup.experiments.pairs import over_seeds
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import fixes, stability
from workup.judge.difference import Difference, compare
from workup.judge.sweep import KEPT, stuck
from workup.measure import architecture
from workup.measure.optimizers import sgd_momentum
from workup.trace import Trace, Trial

BUDGET: dict[str, Any] = {
    "smoke": {"steps": 120, "eval_examples": 64, "adam": (1e-3,)},
    "standard": {"steps": 500, "eval_examples": 128, "adam": (3e-4, 1e-3, 3e-3)},
    "thorough": {"steps": 500, "eval_examples": 512, "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)},
}
#: The rate prescribed so far, for comparison, the test rate, and the double-check (playbook: C5, C7).
MULTIPLES = (1, 2, 5, 10)
#: Halvings at most, where that rate is itself not calm.
HALVINGS = 3
#: Verdicts that name no instability.
NOT_SHAKY = ("stable", "cannot_tell")


def plan(session: Session) -> list[Trial]:
    """One run at each multiple of the prescribed rate, evaluated after every step; equal weights and batches."""
    budget = BUDGET[session.budget]
    lr = session.resolve_parameter("lr", setting="peak_lr")
    size = session.resolve_parameter("batch_size", setting="batch_size")
    steps = min(int(session.resolve_parameter("steps", fallback=budget["steps"])), session.workload.max_train_steps)
    base = Trial(
        lr=float(f"{lr:.6g}"),
        steps=steps,
        batch_size=int(size),
        seed=session.seed,
        eval_every=1 if session.workload.eval_data is not None else 0,
        eval_examples=int(budget["eval_examples"]),
    )
    return [at(base, lr * multiple) for multiple in MULTIPLES]


def calmer(session: Session, traces: list[Trace]) -> list[Trace]:
    """``traces``, and before them runs at a half, a quarter, … of the rate until one is calm (C8); none if it is."""
    for _ in range(HALVINGS):
        if table(traces).stability[0] in NOT_SHAKY:
            break
        lower = at(traces[0].trial, traces[0].trial.lr / 2)
        traces = session.run([lower], label=f"a calmer rate, {lower.lr:.3g}") + traces
    return traces


def doubled(traces: list[Trace]) -> Trace:
    """The run at twice the prescribed rate, third from the top (playbook: C5)."""
    return traces[MULTIPLES.index(2) - len(MULTIPLES)]


def verdict(trace: Trace) -> Finding:
    """The stability of one trace, from its per-step evaluation where it has one; of one that failed, none."""
    steps = trace.steps
    evaluated = steps.eval_loss if steps.eval_loss.notna().any() else None
    found = stability.judge(steps.loss, grad_norm=steps.grad_norm, eval_loss=evaluated, lr=steps.lr, step=steps.step)
    if trace.status not in ("failed", "out_of_memory"):
        return found
    why, then = f"The trial did not run to its end ({trace.reason}).", "Mend what failed, and run it again."
    return dataclasses.replace(found, value="cannot_tell", summary=why, confidence="low", settle=then)


def table(traces: list[Trace], calm: Trace | None = None) -> pd.DataFrame:
    """A row per trace: times (its multiple of the lowest rate), lr, stability, events, initial, final, status.

    Stability is also ``stuck``: no rise that lasts, but a plateau that the calm rate leaves, or less than half of
    what it learns (playbook: C6).

    Args:
        calm: the run to compare with; the first trace where not given.
    """
    calm = calm or traces[0]
    rows = []
    for trace in traces:
        found = verdict(trace)
        rows.append(
            {
                "times": _times(trace.trial, calm),
                "lr": trace.trial.lr,
                "stability": found.value or "cannot_tell",
                "events": len(found.evidence.get("events", ())),
                "initial": initial_loss(trace),
                "final": final_loss(trace),
                "status": trace.status,
            }
        )
    ends, descent = pd.DataFrame(rows), initial_loss(calm) - final_loss(calm)
    stays = pd.Series([stuck(trace.steps.loss, calm.steps.loss, descent) for trace in traces])
    calmed = ends.stability.isin(["stable", "early_recovered", "mid_recovered"])
    ends.loc[calmed & (stays | (ends.final > ends.initial - KEPT * descent)), "stability"] = "stuck"
    return ends


def shaky(traces: list[Trace]) -> list[Trace]:
    """Those above the lowest rate that are not stable."""
    verdicts = table(traces).stability
    return [trace for trace, value in zip(traces[1:], verdicts[1:], strict=True) if value not in NOT_SHAKY]


def best_calm(traces: list[Trace]) -> Trace:
    """The stable run that ends lowest, which a remedy at a higher rate must beat; the lowest rate where none is."""
    verdicts = table(traces).stability
    calm = [trace for trace, value in zip(traces, verdicts, strict=True) if value == "stable"]
    return min(calm or traces[:1], key=lambda trace: np.nan_to_num(final_loss(trace), nan=np.inf))


def another_optimizer(session: Session, traces: list[Trace]) -> list[Trace]:
    """Adam at rates usual for it, where something is unstable and the workload's own optimizer is SGD; else none."""
    if not shaky(traces) or sgd_momentum(session.workload) is None:
        return []
    trials = [at(traces[0].trial, lr, optimizer="adam") for lr in BUDGET[session.budget]["adam"]]
    return session.run(trials, label="Adam's own rate")


def audit(session: Session) -> architecture.Audit:
    """The model's residual branches and norms, and the changes to them that need none of its code."""
    return architecture.audit(session.workload, device=session.device, seed=session.seed)


def plan_fixes(
    session: Session, traces: list[Trace], adam: list[Trace], model: architecture.Audit
) -> dict[tuple[str, float], Trial]:
    """The playbook's remedies, by name and multiple of the rate, at the lowest and the highest that is not stable.

    Paired: equal seeds, batches and steps. Adam's multiples are of its own best rate; ``lower lr`` is the best calm
    rate as it is. Where all is stable, the run at twice the rate alone.
    """
    hot, calm, low = shaky(traces), traces[0], best_calm(traces)
    if not hot:
        return {("nothing", _times(doubled(traces).trial, calm)): doubled(traces).trial}
    ramp = max(1, low.trial.steps // 10)
    norms = low.steps.grad_norm[np.isfinite(low.steps.grad_norm)]
    clip = float(f"{np.percentile(norms, 90):.4g}") if len(norms) and norms.max() > 0 else None
    remedies: dict[str, dict[str, Any]] = {"nothing": {}, "warmup": {"warmup_steps": ramp}}
    if clip:
        remedies |= {"clipping": {"clip_norm": clip}, "warmup+clipping": {"warmup_steps": ramp, "clip_norm": clip}}
    remedies |= {"pre-norm": {"change": model.pre_norm}} if model.pre_norm else {}
    remedies |= {"zero-init": {"change": model.zero_init}} if model.zero_init else {}
    own = min(adam, key=lambda trace: (not trace.done, np.nan_to_num(final_loss(trace), nan=np.inf)), default=None)
    planned: dict[tuple[str, float], Trial] = {}
    for base in dict.fromkeys([hot[0].trial, hot[-1].trial]):
        times = _times(base, calm)
        planned |= {(fix, times): dataclasses.replace(base, **how) for fix, how in remedies.items()}
        if own is not None:
            planned["adam", times] = at(own.trial, own.trial.lr * times)
    return {**planned, ("lower lr", _times(low.trial, calm)): low.trial}


def _times(trial: Trial, calm: Trace) -> float:
    return float(f"{trial.lr / calm.trial.lr:.3g}")


def fix_table(tried: Mapping[tuple[str, float], Trial], traces: list[Trace]) -> pd.DataFrame:
    """A row per remedy: fix, times (the rate), lr, stability, initial, final, lower, status.

    ``lower``: how much lower than the best calm rate, the last row, it ends, as a share of the descent.
    """
    rows = table(traces, calm=traces[-1]).assign(fix=[fix for fix, _ in tried], times=[times for _, times in tried])
    least, start = rows.final.iloc[-1], rows.initial.iloc[-1]
    rows["lower"] = [compare(final, least, start).share for final in rows.final]
    return rows[["fix", "times", "lr", "stability", "initial", "final", "lower", "status"]]


def beside(session: Session, tried: Mapping[tuple[str, float], Trial], fixed: pd.DataFrame) -> Difference | None:
    """How the remedy that helps ends beside the best calm rate, over seeds; None where none is worth the runs."""
    fix = fixes.judge(fixed).value
    chosen = [trial for (name, _), trial in tried.items() if name == fix]
    low = [trial for (name, _), trial in tried.items() if name == "lower lr"]
    return over_seeds(session, chosen[0], low[0]) if chosen and low and fix != "lower lr" else None


def at_lowest(tried: Mapping[tuple[str, float], Trial], traces: list[Trace]) -> dict[str, Trace]:
    """The traces at the lowest rate that was not stable, and at the best calm one, by remedy: for a figure."""
    low = min(times for fix, times in tried if fix == "nothing")
    named = dict(zip(tried, traces, strict=True))
    return {fix: trace for (fix, times), trace in named.items() if times == low or fix == "lower lr"}


def conclude(
    session: Session,
    traces: list[Trace],
    fixed: pd.DataFrame,
    model: architecture.Audit,
    cause: Finding,
    paid: Difference | None = None,
) -> tuple[Finding, ...]:
    """stability (at twice the rate), unstable_lr (the lowest multiple not stable), its cause and recommended_fix."""
    rows, run = table(traces), doubled(traces)
    lr = traces[-len(MULTIPLES)].trial.lr
    rows["times"] = rows.lr / lr
    test, steps = verdict(run), run.steps
    rarely = stability.judge(steps.loss, eval_loss=steps.eval_loss.where((steps.step + 1) % 50 == 0))
    itself = str(rows.stability.iloc[-len(MULTIPLES)])
    warned = () if itself in NOT_SHAKY else (f"At {lr:.3g} itself training is not calm: {itself.replace('_', ' ')}.",)
    test = dataclasses.replace(
        test,
        rule="playbook: C2, C5, C7",
        summary=f"At twice the rate, {run.trial.lr:.3g}: {test.summary}",
        caveats=(*warned, *test.caveats),
        evidence={
            **test.evidence,
            "lr": run.trial.lr,
            "multiples": {f"{row.times:.2g}x": row.stability for row in rows.itertuples()},
            "shown_by_evaluation_every_50": rarely.evidence.get("eval_shows", []),
        },
    )
    advice = model.advice
    fix = fixes.judge(fixed, advice=advice, beside=paid)
    fix = dataclasses.replace(fix, evidence={**fix.evidence, "audit": advice or "nothing stands out"})
    where = {"lr": lr, "batch_size": run.trial.batch_size}
    return session.conclude(test, _unstable(rows), cause, fix, at=where)


def _unstable(rows: pd.DataFrame) -> Finding:
    about: dict[str, Any] = {"name": "unstable_lr", "rule": "playbook: C7, D1"}
    hot, unclear = rows[~rows.stability.isin(NOT_SHAKY)], rows[rows.stability == "cannot_tell"]
    if hot.empty and len(unclear):
        why = f"Whether training is stable at {unclear.lr.min():.3g} cannot be told: too few steps, or it failed."
        settle = "Train longer, or mend what failed."
        return Finding(**about, value=None, summary=why, confidence="low", settle=settle)
    if hot.empty:
        why = f"No instability up to {rows.lr.max():.3g}, {rows.times.max():.0f} times the rate."
        settle = "Sweep higher rates, if a higher one would be of use."
        return Finding(**about, value=None, summary=why, confidence="high", settle=settle)
    first = hot.iloc[0]
    under = rows[(rows.stability == "stable") & (rows.lr < first.lr)]
    calm = float(under.lr.max()) if len(under) else None
    how = first.stability.replace("_", " ")
    return Finding(
        **about,
        value=float(first.lr),
        summary=f"Training becomes unstable ({how}) at {first.lr:.3g}, {first.times:.2g} times the rate.",
        interval=(calm, float(first.lr)) if calm is not None else None,
        evidence={"stable_up_to": calm, "stability": first.stability},
        caveats=("One run at each multiple; the edge lies somewhere below the one that failed.",),
    )
