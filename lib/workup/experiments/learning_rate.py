"""Which learning rate (playbook: C1, C3, C6): plan a sweep, widen it, refine it, judge it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import WorkloadError
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import learning_rate as judge
from workup.judge import search
from workup.trace import Trace, Trial
from workup.workload import Workload

#: steps per trial, and of the range test before them; factor between coarse and between refined rates as a power of
#: ten; how far below the middle the sweep begins, likewise; seeds refined with.
BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"steps": 60, "range": 0, "coarse": 1.0, "fine": 0.5, "reach": 1.0, "seeds": 1},
    "standard": {"steps": 300, "range": 100, "coarse": 0.75, "fine": 0.25, "reach": 1.0, "seeds": 2},
    "thorough": {"steps": 1000, "range": 200, "coarse": 0.5, "fine": 0.125, "reach": 1.0, "seeds": 3},
}
#: Rounds of widening, and of refining, at most.
ROUNDS = 8
#: The range test rises to so many times the workload's own rate, from as far below it.
RISE = 1e3


def _first(session: Session) -> Trial:
    """A trial at the rate where the user stands."""
    wanted = session.resolve_parameter("steps", fallback=BUDGET[session.budget]["steps"])
    size = session.resolve_parameter("batch_size", setting="batch_size")
    steps = min(int(wanted), session.workload.max_train_steps)
    return Trial(
        lr=session.resolve_parameter("lr", fallback=session.workload.lr),
        steps=steps,
        batch_size=int(size),
        seed=session.seed,
        eval_every=max(1, steps // 10) if session.workload.eval_data is not None else 0,
        eval_examples=256,
    )


def range_test(session: Session) -> list[Trial]:
    """One short run through six decades of rates, to begin the sweep by; none on ``smoke`` or where ``lr`` is given."""
    first, steps = _first(session), BUDGET[session.budget]["range"]
    if session.knobs.get("lr") is not None or not steps:
        return []
    return [at(first, first.lr * RISE, steps=min(steps, first.steps), shape="rising", eval_every=0)]


def plan(session: Session, ranged: Sequence[Trace] = ()) -> list[Trial]:
    """The coarse sweep: a rate to begin with, one below it, one above, all fine steps from where the user stands.

    Args:
        ranged: the trace of :func:`range_test`, which says where to begin and where training breaks; without it
            the sweep begins where the user stands.
    """
    budget, first = BUDGET[session.budget], _first(session)
    seen = search.centre(ranged[0].steps.lr, ranged[0].steps.loss) if ranged else None
    middle, top = seen or (first.lr, first.lr * 10 ** budget["coarse"])
    wanted = np.array([middle / 10 ** budget["reach"], middle, top])
    fine = np.rint(np.log10(wanted / first.lr) / budget["fine"])
    return [at(first, first.lr * 10 ** (budget["fine"] * k)) for k in np.unique(fine)]


def at(trial: Trial, lr: float, **changes: object) -> Trial:
    """``trial`` at another rate, rounded to 6 digits so that equal rates are the same trial."""
    return dataclasses.replace(trial, lr=float(f"{lr:.6g}"), **changes)  # type: ignore[arg-type]


def widen(session: Session, traces: list[Trace]) -> list[Trace]:
    """More rates at the ends until the best has a worse one below and an infeasible one above."""
    factor = 10 ** BUDGET[session.budget]["coarse"]
    for _ in range(ROUNDS):
        if judge.summary(table(traces)).empty:
            name, failed = session.workload.name, traces[0].reason
            raise WorkloadError(f"workload {name!r}: none of {len(traces)} trials could be trained: {failed}")
        more = [at(traces[0].trial, lr) for lr in search.wider(table(traces), factor)]
        if not more:
            break
        traces = traces + session.run(more, label=f"widened to {more[-1].lr:.2g}")
    return traces


def refine(session: Session, traces: list[Trace]) -> list[Trace]:
    """Finer rates beside the best and below the edge, then other seeds for the two that could be the best.

    ``thorough`` trains every finer rate within half a decade of the best and above the edge, with every seed.
    """
    budget, trial = BUDGET[session.budget], traces[0].trial
    fine = 10 ** budget["fine"]
    for _ in range(ROUNDS):
        rates = search.finer(table(traces), fine)
        if not rates:
            break
        traces = traces + session.run([at(trial, lr) for lr in rates], label="refined around the best")
    rates = search.contenders(table(traces))
    if session.budget == "thorough" and rates:
        seen = judge.summary(table(traces))
        k = np.arange(-round(budget["coarse"] / budget["fine"]), round(budget["coarse"] / budget["fine"]) + 1)
        edge = seen.lr[seen.feasible].max()
        rates = sorted({*(seen.lr[seen.best_here].iloc[0] * fine**k), *(edge * fine ** k[k >= 0])})
    known = {trace.trial for trace in traces}
    trials = [at(trial, lr, seed=session.seed + seed) for lr in rates for seed in range(budget["seeds"])]
    new = [t for t in dict.fromkeys(trials) if t not in known]
    return traces + (session.run(new, label="other seeds") if new else [])


def table(traces: list[Trace], *, after: int = 0) -> pd.DataFrame:
    """A row per trial, sorted by rate: lr, seed, status, final, best, initial, loss (the curve, shape [steps]).

    ``final`` is the mean training loss of the last tenth of the steps, ``best`` the lowest
    mean over a window that long.

    Args:
        after: the curve begins after so many steps, as those of a warmup.
    """
    rows = []
    for trace in traces:
        means = _smooth(trace)
        rows.append(
            {
                "lr": trace.trial.lr,
                "seed": trace.trial.seed,
                "status": trace.status,
                "final": final_loss(trace),
                "best": float(means.min()),
                "initial": initial_loss(trace),
                "loss": trace.steps.loss.to_numpy()[after:],
            }
        )
    return pd.DataFrame(rows).sort_values(["lr", "seed"], ignore_index=True)


def _smooth(trace: Trace) -> pd.Series:
    return trace.steps.loss.rolling(max(1, trace.trial.steps // 10)).mean()


def initial_loss(trace: Trace) -> float:
    """Training loss before the first update; NaN where not even that was reached."""
    return float(trace.steps.loss.iloc[0]) if len(trace.steps) else float("nan")


def final_loss(trace: Trace) -> float:
    """Mean training loss over the last tenth of the trial's steps; NaN where it ended before."""
    means = _smooth(trace)
    return float(means.iloc[-1]) if len(means) == trace.trial.steps else float("nan")


def around_best(traces: list[Trace], best: Finding) -> list[Trace]:
    """The traces at lr* and at the next three rates above it, one a rate (playbook: C3)."""
    first = {trace.trial.lr: trace for trace in reversed(traces)}
    rates = sorted(first)
    start = rates.index(best.value) if best.is_conclusive else 0
    return [first[lr] for lr in rates[start : start + 4]]


def decays(workload: Workload) -> bool:
    """Whether the workload's schedule ends at less than half of its peak."""
    rates = Trial(lr=1.0, steps=100, batch_size=1, shape="workload").learning_rates(workload.schedule)
    return bool(rates[-1] < rates.max() / 2)


def again(session: Session, trial: Trial) -> Finding:
    """``peak_lr`` once more, with the warmup and clipping of ``trial`` in place: a coarse sweep, carried (D4, D5)."""
    factor = 10**0.5
    rates = [at(trial, trial.lr * factor**k) for k in (-2, -1, 0)]
    traces = widen(session, session.run(rates, label="the rate once more"))
    trials = table(traces, after=trial.warmup_steps)
    total = max(session.workload.max_train_steps, trial.steps - trial.warmup_steps)
    return judge.whole_run(judge.judge(trials), judge.carry(trials, total, decaying=decays(session.workload)))[1]


def conclude(session: Session, traces: list[Trace]) -> tuple[Finding, ...]:
    """best_lr (of the sweep's steps), peak_lr (of the whole run), lr_at_edge and unstable_lr."""
    trials, first = table(traces), traces[0].trial
    of = session.workload.max_train_steps
    best, peak = judge.whole_run(judge.judge(trials), judge.carry(trials, of, decaying=decays(session.workload)))
    best = dataclasses.replace(
        best,
        evidence={**best.evidence, "horizon_steps": first.steps},
        caveats=(
            *best.caveats,
            f"Measured over {first.steps:,} of {of:,} steps. {peak.summary} {peak.settle}".strip(),
            f"Holds for batch size {first.batch_size} and the present optimizer (playbook: B11).",
        ),
    )
    return session.conclude(best, peak, judge.edge(trials), judge.unstable(trials), at={"batch_size": first.batch_size})
