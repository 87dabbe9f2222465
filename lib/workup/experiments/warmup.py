"""How much warmup (playbook: D1-D6): peaks far above the unstable rate, ramps an order of magnitude apart."""

import dataclasses

import numpy as np
import pandas as pd

from workup.experiments import instability
from workup.experiments.learning_rate import again, at, final_loss, initial_loss
from workup.experiments.pairs import over_seeds
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import warmup as judge
from workup.judge.difference import Difference
from workup.trace import Trace, Trial

#: The longest ramp tried, in steps; never over a tenth of max_train_steps (playbook: D4).
BUDGET: dict[str, int | None] = {"smoke": 40, "standard": 300, "thorough": None}
#: Peaks tried, as shares of base_factor x unstable_lr (playbook: D2 asks for the whole of it).
PEAKS = (0.1, 10**-0.5, 1.0)
#: Steps after the ramp, as a multiple of the longest ramp (playbook: D3).
POST_WARMUP = 2


def plan(session: Session) -> list[Trial]:
    """Every ramp with every peak, then constant; last the prescribed rate and lr* without a ramp, to compare with.

    All take equally many steps (the longest ramp and twice as many after it), so that their
    final losses can be compared.
    """
    own = session.workload
    lr = session.resolve_parameter("lr", setting="peak_lr")
    best = session.resolve_parameter("best_lr", finding="best_lr", fallback=lr)
    unstable = session.resolve_parameter("unstable_lr", finding="unstable_lr", fallback=best)
    factor = session.resolve_parameter("base_factor", fallback=10.0)
    size = session.resolve_parameter("batch_size", setting="batch_size")
    tenth = max(1, own.max_train_steps // 10)
    cap = session.resolve_parameter("longest_warmup", fallback=BUDGET[session.budget] or tenth)
    longest = min(int(cap), tenth)
    base = Trial(lr=float(f"{lr:.6g}"), steps=longest * (1 + POST_WARMUP), batch_size=int(size), seed=session.seed)
    lengths = [0, *(10**k for k in range(1, 7) if 10**k < longest), longest]
    peaks = [unstable * factor * share for share in PEAKS]
    ramps = [at(base, peak, warmup_steps=length) for peak in peaks for length in lengths]
    return list(dict.fromkeys([*ramps, at(base, best), base]))


def schedules(trials: list[Trial]) -> dict[str, np.ndarray]:
    """The rates of the trials with the highest peak, by name: learning rate per step, shape [steps]."""
    peak = max(trial.lr for trial in trials)
    return {f"{t.warmup_steps} steps of warmup": t.learning_rates() for t in trials if t.lr == peak}


def refine(session: Session, traces: list[Trace]) -> list[Trace]:
    """Two lengths between the shortest that works and the next shorter one (playbook: D4); none on smoke."""
    found = best(session, traces)
    if session.budget == "smoke" or not found.is_conclusive or not found.interval or not found.evidence["peak_lr"]:
        return traces
    low, high = max(found.interval[0], 1.0), found.interval[1]
    lengths = {round(low * (high / low) ** share) for share in (1 / 3, 2 / 3)} - {round(low), round(high)}
    base = traces[-1].trial
    trials = [at(base, found.evidence["peak_lr"], warmup_steps=length) for length in sorted(lengths)]
    return [*session.run(trials, label="refined around the shortest that works"), *traces]


def unramped(traces: list[Trace]) -> Trace:
    """The run without a ramp that ends lowest, which one with a ramp must beat."""
    plain = [trace for trace in traces if not trace.trial.warmup_steps]
    return min(plain, key=lambda trace: (not trace.done, np.nan_to_num(final_loss(trace), nan=np.inf)))


def ramped(session: Session, traces: list[Trace]) -> Trial | None:
    """The trial with the ramp and peak that pay, by one run each; None where none does."""
    found = best(session, traces)
    if not found.value or not found.evidence["peak_lr"]:
        return None
    return at(traces[-1].trial, found.evidence["peak_lr"], warmup_steps=int(found.value))


def beside(session: Session, traces: list[Trace]) -> Difference | None:
    """How the ramp that pays ends beside the best rate without one, over seeds; None where none pays."""
    trial = ramped(session, traces)
    return over_seeds(session, trial, unramped(traces).trial) if trial else None


def rate_again(session: Session, traces: list[Trace], paid: Difference | None) -> Finding | None:
    """The rate to train the whole run with once that ramp is in place (playbook: D5); None where it does not pay."""
    trial = ramped(session, traces)
    return again(session, trial) if trial and paid and paid.matters else None


def table(traces: list[Trace]) -> pd.DataFrame:
    """A row per trial: warmup_steps, lr (the peak), seed, status, stability, final, initial, loss (the curve)."""
    rows = []
    for trace in traces:
        trial = trace.trial
        rows.append(
            {
                "warmup_steps": trial.warmup_steps,
                "lr": trial.lr,
                "seed": trial.seed,
                "status": trace.status,
                "stability": instability.verdict(trace).value,
                "final": final_loss(trace),
                "initial": initial_loss(trace),
                "reason": trace.reason,
                "loss": trace.steps.loss.to_numpy(),
            }
        )
    return pd.DataFrame(rows)


def best(session: Session, traces: list[Trace]) -> Finding:
    """The verdict on the peak that trains to the lowest loss, of those a ramp opens."""
    rows, plain = table(traces), unramped(traces)
    baseline = final_loss(plain)
    known = {
        "baseline": baseline if baseline == baseline else None,
        "baseline_lr": plain.trial.lr,
        "curve": plain.steps.loss,
        "unstable_lr": session.sources["unstable_lr"]["value"],
        "max_train_steps": session.workload.max_train_steps,
    }
    rows = rows[rows.lr.isin(rows.lr[rows.warmup_steps > 0])]
    each = [judge.judge(group, **known) for _, group in rows.groupby("lr")]
    useful = [found for found in each if found.value and found.evidence["peak_lr"]]
    return min(useful, key=lambda found: found.evidence["final"]) if useful else judge.judge(rows, **known)


def _edge_known(session: Session, found: Finding) -> bool:
    """Whether a rate is known to be unstable, or all up to ten times the rate are known not to be (playbook: D1)."""
    edge = session.study.findings(before=session.notebook).get("unstable_lr")
    known = edge is not None and (edge.is_conclusive or edge.is_none)
    return known or session.knobs.get("unstable_lr") is not None or "opens_with" in found.evidence


def conclude(
    session: Session, traces: list[Trace], paid: Difference | None = None, peak: Finding | None = None
) -> tuple[Finding, ...]:
    """warmup_steps, with the peak_lr to train the whole run with beside it, and the schedule's new length.

    Args:
        paid: from :func:`beside`. peak: from :func:`rate_again`.
    """
    found = best(session, traces)
    if found.value == 0 and found.evidence.get("needed") is False and not _edge_known(session, found):
        top = max(trace.trial.lr for trace in traces)
        found = dataclasses.replace(
            found,
            value=None,
            summary=f"Whether warmup is needed cannot be told: no rate is known to be unstable, and none up to "
            f"{top:.3g} is.",
            confidence="low",
            settle="Run 04_learning_rate and 05_instability first, give unstable_lr, or raise base_factor.",
        )
    found = judge.confirm(found, paid, peak)
    total = session.workload.max_train_steps + int(found.value or 0)
    caveats = found.caveats
    longest = max(trace.trial.warmup_steps for trace in traces)
    if longest < session.workload.max_train_steps // 10:
        caveats = (*caveats, f"Ramps up to {longest} steps were tried, short of a tenth of max_train_steps (D4).")
    evidence = {**found.evidence, "prepended_total_steps": total, "baseline_lr": unramped(traces).trial.lr}
    base = traces[-1].trial
    where = {"lr": base.lr, "batch_size": base.batch_size}
    return session.conclude(dataclasses.replace(found, evidence=evidence, caveats=caveats), at=where)
