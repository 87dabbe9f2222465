"""Which batch size (playbook: B1 to B12): probe memory, sweep throughput, try the recommended size again."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from torch import nn

from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import batch_size as judge
from workup.judge import critical_size
from workup.measure import noise_scale, throughput
from workup.measure.memory import MARGIN, Attempt, Limit, memory_limit
from workup.measure.probe import Prober, search
from workup.progress import progress
from workup.trace import Trace, Trial
from workup.workload import size

#: slowest: no size whose step takes longer [s]; stretch [s]; rounds: least and most; below: doublings below
#: today's size; noise: steps of a training, points on it, draws at each; width: relative width of the throughput
#: intervals at which rounds end.
BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"slowest": 0.3, "stretch": 0.03, "rounds": (2, 2), "below": 2, "noise": (30, 3, 4), "width": 0.2},
    "standard": {"slowest": 2.0, "stretch": 0.25, "rounds": (3, 5), "below": 4, "noise": (200, 8, 6), "width": 0.1},
    "thorough": {"slowest": 20, "stretch": 1.0, "rounds": (5, 12), "below": 6, "noise": (1000, 10, 16), "width": 0.05},
}
#: No size beyond this, where neither data nor memory ends the search before.
CAP = 65536
#: Steps of the last check, in a fresh process.
VERIFY_STEPS = 20


def roof(session: Session) -> tuple[int, str]:
    """The size never exceeded, and what sets it: the data set, or the cap."""
    cap = int(session.settle("max_batch_size", fallback=CAP))
    examples = size(session.workload.train_data)
    return (examples, "the data set") if examples is not None and examples <= cap else (cap, "the cap")


def limit(session: Session) -> Limit:
    """The memory one training process may use: the knob ``memory_limit_gb``, else what the machine has."""
    gigabytes = session.settle("memory_limit_gb", fallback=None)
    return memory_limit(session.device, asked_bytes=gigabytes and gigabytes * 1e9)


def probe(session: Session) -> pd.DataFrame:
    """Attempts in a child process until the largest size that trains is known (playbook: B2): a row each."""
    most, held = roof(session)[0], limit(session)
    slowest = BUDGET[session.budget]["slowest"]
    tried: list[Attempt] = []
    first = min(session.workload.batch_size, most)
    within, tries = (0.0, 20) if session.settle("exact", fallback=False) else (0.05, 6)
    reach: dict[str, Any] = {"first": first, "most": most, "within": within, "tries": tries}
    with (
        progress(tries, "memory probe", unit="attempts") as bar,
        Prober(session.reference, device=session.device, limit=held, patience=120 + 60 * slowest) as prober,
    ):
        for one in search(prober.attempt, limit_bytes=held.bytes, slowest_seconds=slowest, **reach):
            tried.append(one)
            bar.advance(note=f"{one.batch_size}: {one.status}")
        bar.total = len(tried)
    return table(tried)


def table(attempts: Iterable[Attempt]) -> pd.DataFrame:
    """A row per attempt, in the order made."""
    return pd.DataFrame([dataclasses.asdict(one) for one in attempts])


def sweep(session: Session, attempts: pd.DataFrame) -> pd.DataFrame:
    """Throughput at powers of two up to the largest size that ran: rounds until the intervals are narrow (B2, B3).

    Returns:
        A row per stretch, from ``measure.throughput.table``.
    """
    budget, workload = BUDGET[session.budget], session.workload
    fits = attempts[attempts["status"] == "fits"]
    if not len(fits):
        return throughput.table([])
    largest = int(fits["batch_size"].max())
    lowest = min(workload.batch_size, largest) // 2 ** budget["below"]
    sizes = throughput.powers_of_two(max(1, lowest), largest, also=[workload.batch_size])
    known = fits.groupby("batch_size")["step_seconds"].min()
    guess = {n: float(known[known.index >= n].iloc[0]) for n in sizes}
    traces: list[Trace] = []
    for round_ in range(budget["rounds"][1]):
        trials = throughput.stretches(
            guess, lr=workload.lr / 1000, seed=session.seed + round_, seconds=budget["stretch"]
        )
        traces += session.run(trials, label=f"throughput, round {round_ + 1}")
        rows = throughput.table(traces)
        seen = judge.speeds(rows)
        guess |= dict(zip(seen["batch_size"], seen["step_seconds"].fillna(BUDGET["standard"]["slowest"]), strict=True))
        if round_ + 1 >= budget["rounds"][0] and ((seen["high"] / seen["low"] - 1) < budget["width"]).all():
            break
    return rows


def shown(attempts: pd.DataFrame) -> pd.DataFrame:
    """The attempts for a reader: sizes, how they ended, peak in GiB, time per step."""
    view = attempts[["batch_size", "status", "step_seconds", "reason"]].copy()
    view.insert(2, "peak_GiB", attempts["peak_bytes"] / 2**30)
    return view.round(4)


def speeds(stretches: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Throughput by size, and a row without a figure for each size that did not fit."""
    bad = attempts.loc[attempts["status"].isin(["out_of_memory", "launch_limit"]), ["batch_size"]]
    return pd.concat([judge.speeds(stretches), bad], ignore_index=True).sort_values("batch_size", ignore_index=True)


def verify(session: Session, batch_size: int) -> dict[str, Any]:
    """The size tried again in a fresh process, with evaluation; then the evaluation size on its own (F3)."""
    data = size(session.workload.eval_data) if session.workload.eval_data is not None else 0
    with Prober(session.reference, device=session.device, limit=limit(session)) as prober:
        held = dataclasses.asdict(prober.attempt(batch_size, steps=VERIFY_STEPS))
        wanted = min(4 * batch_size, CAP if data is None else data)
        while held["status"] == "fits" and wanted > batch_size and not prober.attempt(wanted, training=False).fits:
            wanted //= 2
    return held | {"evaluation_batch_size": max(wanted, min(batch_size, wanted or batch_size)) or None}


def batch_norms(session: Session) -> list[str]:
    """Names of the model's batch-norm layers (playbook: B12)."""
    model = session.workload.build_model()
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def noise(session: Session) -> pd.DataFrame:
    """Gradient norms at two sizes along a short training at today's settings (playbook: B8)."""
    steps, points, draws = BUDGET[session.budget]["noise"]
    steps = min(steps, session.workload.max_train_steps)
    at = sorted({round(k * (steps - 1) / (points - 1)) for k in range(points)})
    trial = Trial(lr=session.workload.lr, steps=steps, batch_size=session.workload.batch_size, seed=session.seed)
    with progress(1, "gradient noise", unit="trainings") as bar:
        rows = noise_scale.measure(session.workload, trial, at=at, draws=draws, device=session.device)
        bar.advance()
    return rows


def to_goal(session: Session, sizes: Sequence[int] | None = None) -> pd.DataFrame:
    """Steps to one evaluation loss at several sizes, the learning rate retuned at each (playbook: B8, B11).

    The goal is most of the fall of the loss that today's settings reach in the steps of the budget's
    noise run; a trial may take half as many again as perfect scaling asks for.

    Args:
        sizes: by default a quarter of today's, today's and four times it on ``thorough``, else none.

    Returns:
        A row per trial: batch_size, lr, steps (NaN where the goal was not reached).
    """
    workload, present = session.workload, session.workload.batch_size
    if sizes is None:
        wanted = (present // 4, present, 4 * present) if session.budget == "thorough" else ()
        sizes = [n for n in wanted if 1 <= n <= roof(session)[0]]
    none = pd.DataFrame(columns=["batch_size", "lr", "steps"])
    if not sizes or workload.eval_data is None:
        return none
    count = min(BUDGET[session.budget]["noise"][0], workload.max_train_steps)
    today = Trial(
        lr=workload.lr,
        steps=count,
        batch_size=present,
        seed=session.seed,
        eval_every=max(1, count // 200),
        eval_examples=512,
    )
    losses = _smooth(session.run([today], label="goal")[0])
    goal = float(losses.iloc[0] - critical_size.FALL * (losses.iloc[0] - losses.iloc[-1]))
    most = 1.5 * (losses.index[losses <= goal].min() + 1)
    if not math.isfinite(most):  # today's settings diverge
        return none
    trials = []
    for size_ in sizes:
        scale = size_ / present
        longer = dataclasses.replace(today, batch_size=size_, steps=math.ceil(most * max(1 / scale, 1)))
        rates = [float(f"{workload.lr * scale**0.5 * factor:.3g}") for factor in (1, 2, 4, 8, 16, 32)]
        trials += [dataclasses.replace(longer, lr=lr) for lr in rates]
    rows = []
    for trace in session.run(trials, label="steps to the goal"):
        losses = _smooth(trace)
        first = losses.index[losses <= goal].min()  # NaN where there is none
        rows.append({"batch_size": trace.trial.batch_size, "lr": trace.trial.lr, "steps": first + 1})
    return pd.DataFrame(rows)


def _smooth(trace: Trace) -> pd.Series:
    """Running median over three evaluations, indexed by step."""
    return trace.steps.set_index("step")["eval_loss"].dropna().rolling(3, min_periods=1).median()


def critical(noise: pd.DataFrame, reached: pd.DataFrame) -> Finding:
    """The critical batch size: by experiment where there was one that can tell, else predicted from the noise."""
    measured = critical_size.measured_critical(reached)
    return measured if measured.told else critical_size.critical(noise)


def costs(session: Session, found: Finding, speeds: pd.DataFrame) -> pd.DataFrame:
    """Steps, examples and seconds to the goal of today's run by size (B8 to B10); ``found`` from :func:`critical`."""
    size, workload = found.value or (found.interval or (0.0,))[0], session.workload
    return critical_size.costs(speeds, size, present=workload.batch_size, steps=workload.max_train_steps)


def conclude(
    session: Session, attempts: pd.DataFrame, stretches: pd.DataFrame, critical: Finding
) -> tuple[Finding, ...]:
    """recommended (it has run again in a fresh process), max_feasible, saturation, critical, input_bound."""
    (most, source), held, workload = roof(session), limit(session), session.workload
    feasible = judge.max_feasible(
        attempts, most=most, most_source=source, limit_bytes=held.bytes, limit_source=held.source
    )
    speeds, saturated = judge.speeds(stretches), judge.saturation(stretches)
    today = {"present": workload.batch_size, "steps": workload.max_train_steps}
    about: dict[str, Any] = {"name": "recommended_batch_size", "rule": "playbook: B5"}
    why, settle = "No size ran again in a fresh process.", "More memory, or a smaller model."
    recommended = Finding(**about, value=None, summary=why, settle=settle)
    how: dict[str, Any] = {"limit_bytes": held.bytes, "present": workload.batch_size, "norms": batch_norms(session)}
    for choice, why in judge.choose(speeds, saturated, critical, **today):
        verified = verify(session, choice)
        if verified["status"] == "fits" and verified["peak_bytes"] <= (1 - MARGIN) * held.bytes:
            recommended = judge.recommend(choice, why=why, table=speeds, verified=verified, **how)
            break
    bound = judge.input_bound(stretches, batch_size=recommended.value or workload.batch_size)
    return session.conclude(recommended, feasible, saturated, critical, bound)
