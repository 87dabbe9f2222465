"""Which batch size (playbook: B1 to B12): probe memory, sweep throughput, try the recommended size again."""

import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from workup.experiments.session import Session, more_rounds
from workup.finding import Finding, plain
from workup.judge import batch_size as judge
from workup.judge import critical_size
from workup.measure import devices, noise_scale, throughput
from workup.measure.memory import MARGIN, Attempt, Limit, memory_limit
from workup.measure.probe import Prober, search
from workup.progress import progress
from workup.trace import Trace, Trial
from workup.workload import size

#: slowest: no size whose step takes longer [s]; stretch [s]; rounds: least, most, and most where those do not tell;
#: below: doublings below today's size; width: relative width of the throughput intervals at which rounds end.
BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"slowest": 0.3, "stretch": 0.03, "rounds": (2, 2, 5), "below": 2, "width": 0.2},
    "standard": {"slowest": 2.0, "stretch": 0.25, "rounds": (3, 5, 13), "below": 4, "width": 0.1},
    "thorough": {"slowest": 20, "stretch": 1.0, "rounds": (5, 12, 24), "below": 6, "width": 0.05},
}
#: Steps of a training, points on it at which the gradient's noise is measured, least and most draws at each.
NOISE = {"smoke": (30, 3, 4, 8), "standard": (200, 8, 4, 24), "thorough": (1000, 10, 8, 64)}
#: Rounds past the most may take the time of so many stretches.
MORE = 80
#: No size beyond this, where neither data nor memory ends the search before.
CAP = 65536
#: Steps of the last check, in a fresh process.
VERIFY_STEPS = 20


def roof(session: Session) -> tuple[int, str]:
    """The size never exceeded, and what sets it: the data set, or the cap."""
    cap = int(session.resolve_parameter("max_batch_size", fallback=CAP))
    examples = size(session.workload.train_data)
    return (examples, "the data set") if examples is not None and examples <= cap else (cap, "the cap")


def limit(session: Session) -> Limit:
    """The memory one training process may use: the knob ``memory_limit_gb``, else what the machine has."""
    gigabytes = session.resolve_parameter("memory_limit_gb", fallback=None)
    return memory_limit(session.device, asked_bytes=gigabytes and gigabytes * 1e9)


def once(measure: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """``measure(session, …)``, whose table a study keeps as long as all that it depends on is as it was.

    Free memory is another every time: what fitted easily still does, what did not fit is tried again.
    """

    @functools.wraps(measure)
    def kept(session: Session, *given: Any) -> pd.DataFrame:
        workload, held, asked = session.workload, limit(session), session.knobs.get("memory_limit_gb")
        about = {
            "workload": (session.fingerprint, workload.lr, workload.batch_size, workload.max_train_steps),
            "settings": (session.seed, roof(session), asked, session.resolve_parameter("exact", fallback=False), given),
            "budget": (BUDGET[session.budget], NOISE[session.budget]),
            "machine": (platform.node(), devices.name(session.device), devices.versions()),
        }

        def holds(table: pd.DataFrame) -> bool:
            table = table.reindex(columns=["peak_bytes", "status"])
            free = table["peak_bytes"].max() > (1 - MARGIN) * held.bytes or table["status"].eq("out_of_memory").any()
            return asked is not None or not free

        name = f"{session.notebook}-{measure.__name__}"
        return session.study.table(name, about, lambda: measure(session, *given), holds=holds)

    return kept


@once
def probe(session: Session) -> pd.DataFrame:
    """Attempts in a child process until the largest size that trains is known (playbook: B2): a row each."""
    most, held = roof(session)[0], limit(session)
    slowest = BUDGET[session.budget]["slowest"]
    tried: list[Attempt] = []
    first = min(session.workload.batch_size, most)
    within, tries = (0.0, 20) if session.resolve_parameter("exact", fallback=False) else (0.05, 6)
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
    """Throughput at powers of two up to the largest size that ran: rounds until they tell (playbook: B2, B3).

    Where the data set ends the sizes before throughput stops growing, larger ones are timed on repeated examples.

    Returns:
        A row per stretch, from ``measure.throughput.table``.
    """
    traces: list[Trace] = []
    guess = _first_guess(session, attempts)
    for round_ in range(BUDGET[session.budget]["rounds"][-1] if guess else 0):
        traces += _round(session, guess, round_)
        while larger := _larger(session, attempts, throughput.table(traces)):
            traces += _round(session, larger, round_)
        guess = _again(session, attempts, throughput.table(traces), done=round_ + 1)
        if not guess:
            break
    return throughput.table(traces)


def _first_guess(session: Session, attempts: pd.DataFrame) -> dict[int, float]:
    """The sizes to time, with the seconds that a step takes as far as the attempts tell."""
    known = attempts[attempts["status"] == "fits"].groupby("batch_size")["step_seconds"].min()
    if known.empty:
        return {}
    largest, present = int(known.index.max()), session.workload.batch_size
    lowest = min(present, largest) // 2 ** BUDGET[session.budget]["below"]
    sizes = throughput.powers_of_two(max(1, lowest), largest, also=[present])
    return {n: float(known[known.index >= n].iloc[0]) for n in sizes}


def _round(session: Session, guess: Mapping[int, float], round_: int) -> list[Trace]:
    """A stretch at every size of ``guess``; those past the data set on repeated examples."""
    seconds, workload = BUDGET[session.budget]["stretch"], session.workload
    trials = throughput.stretches(guess, lr=workload.lr / 1000, seed=session.seed + round_, seconds=seconds)
    count = size(workload.train_data) or math.inf
    within, past = [[t for t in trials if (t.batch_size > count) is flag] for flag in (False, True)]
    traces = session.run(within, label=f"throughput, round {round_ + 1}") if within else []
    if past:
        repeated = throughput.wrapped(workload, max(trial.batch_size for trial in past))
        wider = dataclasses.replace(session, workload=repeated)
        traces += wider.run(past, label=f"throughput, round {round_ + 1}, examples repeated")
    return traces


def _larger(session: Session, attempts: pd.DataFrame, rows: pd.DataFrame) -> dict[int, float]:
    """The next size past the data set, with a guess at its step [s]; none where growth, memory or time ends it.

    Memory is a line through what the attempts took, twice as steep: past them it is not tried, and is convex.
    """
    peaks = attempts[attempts["status"] == "fits"].set_index("batch_size")["peak_bytes"].sort_index()
    most, source = roof(session)
    seen = judge.speeds(rows).set_index("batch_size").dropna(subset="examples_per_second")
    if source != "the data set" or not throughput.repeatable(session.workload) or most not in peaks or seen.empty:
        return {}
    last = int(seen.index[-1])
    larger, rates = 2 ** last.bit_length(), seen["examples_per_second"]
    new = larger not in set(rows["batch_size"])  # it may have been tried, and failed
    smaller = rates[rates.index <= last / 2]
    grows = smaller.empty or rates[last] > (1 + judge.GAIN / 2) * smaller.iloc[-1]
    slope = np.ptp(peaks) / np.ptp(peaks.index) if len(peaks) > 1 else peaks[most] / most
    fits = peaks.max() + 2 * slope * (larger - most) < (1 - MARGIN) * limit(session).bytes
    step = float(seen["step_seconds"].iloc[-1]) * larger / last
    wanted = new and grows and fits and step < BUDGET[session.budget]["stretch"] and larger <= CAP
    return {larger: step} if wanted else {}


def _again(session: Session, attempts: pd.DataFrame, rows: pd.DataFrame, *, done: int) -> dict[int, float]:
    """The sizes of the next round, with the seconds that a step takes; none where the rounds done tell.

    Rounds past the budget's most take the sizes in doubt alone, and no more than their time.
    """
    budget, present = BUDGET[session.budget], session.workload.batch_size
    least, most, _ = budget["rounds"]
    seen = judge.speeds(rows)
    seconds = dict(zip(seen["batch_size"], seen["step_seconds"].fillna(BUDGET["standard"]["slowest"]), strict=True))
    saturated = judge.saturation(rows, **_reach(session, attempts))
    low, high = saturated.interval or (0, 0)
    doubt = set() if saturated.is_conclusive or low == high else {n for n in seconds if low <= n <= 2 * high}
    doubt |= set() if judge.input_bound(rows, batch_size=present).is_conclusive else {present} & set(seconds)
    narrow = ((seen["high"] / seen["low"] - 1) < budget["width"]).all()
    if done < most:
        return {} if done >= least and narrow and not doubt else seconds
    extra = rows[rows["seed"] >= session.seed + most]
    spent = ((extra["steps"] + throughput.WARM_UP) * extra["step_seconds"]).sum()
    spent += sum(max(budget["stretch"], 2 * throughput.WARM_UP * seconds[n]) for n in doubt)  # what the next takes
    return {n: seconds[n] for n in sorted(doubt)} if spent < MORE * budget["stretch"] else {}


def _feasible(session: Session, attempts: pd.DataFrame) -> Finding:
    (most, source), held = roof(session), limit(session)
    return judge.max_feasible(attempts, most=most, most_source=source, limit_bytes=held.bytes, limit_source=held.source)


def _reach(session: Session, attempts: pd.DataFrame) -> dict[str, Any]:
    """The largest size that can train and what ends it, for :func:`judge.batch_size.saturation`."""
    about = _feasible(session, attempts).evidence
    by = about.get("limited_by", "time")
    return {} if by == "time" else {"most": about["largest_tried"], "limited_by": by}


def shown(attempts: pd.DataFrame) -> pd.DataFrame:
    """The attempts for a reader: sizes, how they ended, peak in GiB, time per step."""
    view = attempts[["batch_size", "status", "step_seconds", "reason"]].copy()
    view.insert(2, "peak_GiB", attempts["peak_bytes"] / 2**30)
    return view.round(4)


def speeds(stretches: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Throughput by size, and a row without a figure for each size that did not fit."""
    bad = attempts.loc[attempts["status"].isin(["out_of_memory", "launch_limit"]), ["batch_size"]]
    return pd.concat([judge.speeds(stretches), bad], ignore_index=True).sort_values("batch_size", ignore_index=True)


@once
def verify(session: Session, batch_size: int) -> pd.DataFrame:
    """The size tried again in a fresh process, with evaluation; then the evaluation size on its own (F3): one row."""
    data = size(session.workload.eval_data) if session.workload.eval_data is not None else 0
    with Prober(session.reference, device=session.device, limit=limit(session)) as prober:
        held = dataclasses.asdict(prober.attempt(batch_size, steps=VERIFY_STEPS))
        wanted = min(4 * batch_size, CAP if data is None else data)
        while held["status"] == "fits" and wanted > batch_size and not prober.attempt(wanted, training=False).fits:
            wanted //= 2
    return pd.DataFrame([held | {"evaluation_batch_size": max(wanted, min(batch_size, wanted or batch_size)) or None}])


def batch_norms(session: Session) -> list[str]:
    """Names of the model's batch-norm layers (playbook: B12)."""
    model = session.workload.build_model()
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@once
def noise(session: Session) -> pd.DataFrame:
    """Gradient norms at two sizes along a short training at today's settings (playbook: B8).

    More draws are taken at the points of the training where the first ones leave the noise unclear.
    """
    steps, points, *draws = NOISE[session.budget]
    steps = min(steps, session.workload.max_train_steps)
    at = sorted({round(k * (steps - 1) / (points - 1)) for k in range(points)})
    trial = Trial(lr=session.workload.lr, steps=steps, batch_size=session.workload.batch_size, seed=session.seed)
    how: dict[str, Any] = {"at": at, "draws": tuple(draws), "enough": critical_size.clear, "device": session.device}
    with progress(1, "gradient noise", unit="trainings") as bar:
        rows = noise_scale.measure(session.workload, trial, **how)
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
    count = min(NOISE[session.budget][0], workload.max_train_steps)
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
    return measured if measured.is_conclusive else critical_size.critical(noise)


def costs(session: Session, found: Finding, speeds: pd.DataFrame) -> pd.DataFrame:
    """Steps, examples and seconds to the goal of today's run by size (B8 to B10); ``found`` from :func:`critical`."""
    critical, workload = found.value or (found.interval or (0.0,))[0], session.workload
    usable = speeds[speeds["batch_size"] <= roof(session)[0]]
    return critical_size.costs(usable, critical, present=workload.batch_size, steps=workload.max_train_steps)


def conclude(
    session: Session, attempts: pd.DataFrame, stretches: pd.DataFrame, critical: Finding
) -> tuple[Finding, ...]:
    """recommended (it has run again in a fresh process), max_feasible, saturation, critical, input_bound."""
    held, present = limit(session), session.workload.batch_size
    thorough = session.command("02")
    saturated = judge.saturation(stretches, **_reach(session, attempts), settle=thorough)
    speeds = judge.speeds(stretches[stretches["batch_size"] <= roof(session)[0]])
    about: dict[str, Any] = {"name": "recommended_batch_size", "rule": "playbook: B5"}
    why, settle = "No size ran again in a fresh process.", "More memory, or a smaller model."
    recommended = Finding(**about, value=None, summary=why, settle=settle)
    how: dict[str, Any] = {"limit_bytes": held.bytes, "present": present, "norms": batch_norms(session)}
    for choice, why in judge.choose(speeds, saturated, critical, present=present):
        verified = plain(dict(verify(session, choice).iloc[0]))  # numpy's numbers no more
        if verified["status"] == "fits" and verified["peak_bytes"] <= (1 - MARGIN) * held.bytes:
            recommended = judge.recommend(choice, why=why, table=speeds, verified=verified, **how)
            break
    worst = critical_size.regrets(judge.usable(speeds, saturated, present=present), critical)
    critical = critical_size.judged(critical, worst, recommended.value, settle=thorough)
    how = {"queued": session.device != "cpu", "settle": session.command("03", more=False)}
    bound = judge.input_bound(stretches, batch_size=recommended.value or present, **how)
    rounds, planned = stretches.groupby("batch_size").size(), BUDGET[session.budget]["rounds"][1]
    saturated = judge.unless_above(saturated, recommended.value)
    doubted = (saturated.interval or (saturated.value,))[0]
    saturated = more_rounds(saturated, rounds.get(doubted, 0) - planned)
    bound = more_rounds(bound, rounds.get(recommended.value or present, 0) - planned)
    return session.conclude(recommended, _feasible(session, attempts), saturated, critical, bound)
