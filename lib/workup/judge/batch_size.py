"""Which batch size (playbook: B1 to B12): from tables of attempts, of throughput and of gradient noise."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import NO_MATTER, Finding
from workup.judge import pipeline
from workup.judge.critical_size import regrets

#: A size is saturated when no larger one is faster by more than this part (playbook: B5; the figure is ours).
GAIN = 0.1
#: The smallest size within this part of the shortest predicted training time is recommended (playbook: B8).
SLACK = 0.05
#: Rates between two stretches of one size differ by at least this part, however few of them were seen to.
LEAST_SPREAD = 0.01
#: Bootstrap resamples.
RESAMPLES = 1000

RETUNE = (
    "Another batch size calls for retuning the learning rate, momentum and regularisation (playbook: B11). "
    "It is no knob for validation performance (B1)."
)
REPEAT = "Holds for this model, optimizer, precision and machine: probe again after a change of any (playbook: B7)."


def speeds(stretches: pd.DataFrame) -> pd.DataFrame:
    """Throughput by size: medians over the rounds with 95% bootstrap intervals.

    Args:
        stretches: a row per stretch, from ``measure.throughput.table``.

    Returns:
        A row per size: batch_size, examples_per_second, low, high, step_seconds, data_share
        (waiting for data, part of a step), gain (throughput over the size before), rounds.
    """
    sizes, drawn = _resampled(stretches)
    groups = stretches.assign(data_share=stretches["data_seconds"] / stretches["step_seconds"]).groupby("batch_size")
    table = groups[["examples_per_second", "data_share"]].median()
    ends = np.quantile(drawn, [0.025, 0.975], axis=1) if sizes else np.empty((2, 0))
    table[["low", "high"]] = pd.DataFrame(ends.T, index=sizes).reindex(table.index)
    table["step_seconds"] = table.index / table["examples_per_second"]
    table["gain"] = table["examples_per_second"] / table["examples_per_second"].shift()
    table["rounds"] = groups["examples_per_second"].count()
    order = ["batch_size", "examples_per_second", "low", "high", "step_seconds", "data_share", "gain", "rounds"]
    return table.reset_index()[order]


def _resampled(stretches: pd.DataFrame) -> tuple[list[int], np.ndarray]:
    """Sizes and, for each, resampled median throughputs, shape [sizes, RESAMPLES].

    With a few rounds a size's own spread says little, so the relative residuals of all sizes
    are pooled, widened for the degrees of freedom that their medians took.
    """
    fine = stretches.dropna(subset="examples_per_second")
    sizes = sorted({int(size) for size in fine["batch_size"]})
    logs = {n: np.log(fine.loc[fine["batch_size"] == n, "examples_per_second"].to_numpy(float)) for n in sizes}
    if not sizes:
        return [], np.empty((0, RESAMPLES))
    rounds = max(map(len, logs.values()))
    residuals = np.concatenate([rates - np.median(rates) for rates in logs.values()])
    residuals *= math.sqrt(rounds / max(rounds - 1, 1))
    rng = np.random.default_rng(0)
    drawn = []
    for rates in logs.values():
        shape = (RESAMPLES, len(rates))
        noise = rng.choice(residuals, shape) + rng.normal(0, LEAST_SPREAD, shape)
        drawn.append(np.exp(np.median(rates) + np.median(noise, axis=1)))
    return sizes, np.array(drawn)


def saturation(stretches: pd.DataFrame, *, most: float = math.inf, limited_by: str = "", settle: str = "") -> Finding:
    """``saturation_batch_size``: the smallest size that no larger one outruns by more than 10% (playbook: B4, B5).

    The interval holds 95% of what resampled rounds call. Wider than two doublings is "cannot tell", unless all of it
    lies where no size can be used: then it does not matter.

    Args:
        stretches: a row per stretch, from ``measure.throughput.table``.
        most: the largest size that can train, ``math.inf`` where only time ended the search; larger ones were measured
            with examples repeated, and only tell where growth stops.
        limited_by: what sets ``most`` ("the data set", "memory"). settle: what to do where the rounds do not tell.
    """
    sizes, drawn = _resampled(stretches)
    about: dict[str, Any] = {"name": "saturation_batch_size", "rule": "playbook: B4, B5", "unit": "examples"}
    if len(sizes) < 2:
        why = "Throughput was measured at fewer than two sizes."
        return Finding(**about, value=None, summary=why, settle="A larger cap on the batch size.")
    called = (drawn >= (1 - GAIN) * drawn.max(axis=0)).argmax(axis=0)
    low, high = (sizes[int(k)] for k in np.quantile(called, [0.025, 0.975], method="nearest"))
    value = sizes[int(np.bincount(called).argmax())]
    middle = np.median(drawn, axis=1)
    gains = {f"{a} to {b}": float(y / x) for a, b, x, y in zip(sizes, sizes[1:], middle, middle[1:], strict=False)}
    about |= {"interval": (low, high), "evidence": {"gains": gains}}
    if most < math.inf and low > most / 2 and (value == sizes[-1] or high > 4 * low):
        why = f"It does not matter here: throughput grows up to {low}, and {limited_by} allows no batch above {most}."
        return Finding(**about | {"unit": "", "interval": None}, value=NO_MATTER, confidence="high", summary=why)
    if high > 4 * low:
        why = f"Noise hides where throughput stops growing, somewhere from {low} to {high}."
        settle = settle or "More rounds, or a quieter machine."
        return Finding(**about, value=None, confidence="low", summary=why, settle=settle)
    if value == sizes[-1]:
        why = f"Throughput still grows at {value}, the largest size measured (× {middle[-1] / middle[-2]:.2f} there)."
        return Finding(**about, value=None, summary=why, settle=settle or "Larger sizes, where time allows them.")
    where = f"at {value}" if low == high else f"between {low} and {high}"
    repeated = f" The data set holds {most}; beyond it examples are repeated to see this." if high > most else ""
    flat = "It hardly grows from the first size on: the device is busy at once, or something else limits it (B4)."
    return Finding(
        **about,
        value=value,
        confidence="high" if low == high else "medium",
        caveats=(flat,) if value == sizes[0] else (),
        summary=f"Throughput stops growing {where}: larger batches gain less than {GAIN:.0%}.{repeated}",
    )


def unless_above(saturated: Finding, size: int | None) -> Finding:
    """Saturation that cannot be told, beside the size recommended: it does not matter where all of it lies above."""
    low = (saturated.interval or (0,))[0]
    if saturated.is_conclusive or size is None or not size < low:
        return saturated
    why = f"It does not matter here: wherever throughput stops growing, from {low} on, {size} is recommended."
    return dataclasses.replace(saturated, value=NO_MATTER, unit="", confidence="medium", summary=why, settle="")


def input_bound(stretches: pd.DataFrame, *, batch_size: int, queued: bool = False, settle: str = "") -> Finding:
    """``input_bound`` from the loop's own waits for data, in place of loader and step apart (playbook: B4, F1).

    Args:
        queued: whether the device works through a queue, so that it may be busy while the loop waits.
        settle: what tells where this does not.
    """
    here = stretches[stretches["batch_size"] == batch_size].dropna(subset="examples_per_second")
    if here.empty:
        why, settle = f"No stretch at {batch_size} finished.", settle or "The sweep once more."
        return Finding(name="input_bound", value=None, rule="playbook: B4", summary=why, settle=settle)
    wait, whole = here["data_seconds"], here["step_seconds"]
    parts = {"loader": wait, "step": whole - wait, "together": whole}
    rows = [pd.DataFrame({"round": here["seed"], "what": what, "step_seconds": part}) for what, part in parts.items()]
    found = pipeline.input_bound(pd.concat(rows), batch_size=batch_size, settle=settle)
    alone = "Measured from the loop alone; 03_input_pipeline measures loader and step apart."
    if not (queued and found.value is True):
        return dataclasses.replace(found, caveats=(alone,))
    busy = "The device may have been busy with what was queued while the loop waited."
    return dataclasses.replace(found, confidence="low", caveats=(alone, busy), settle=settle)


def max_feasible(
    attempts: pd.DataFrame, *, most: int, most_source: str, limit_bytes: int, limit_source: str
) -> Finding:
    """``max_feasible_batch_size``: the largest power of two not above the largest size that ran (playbook: B2).

    Args:
        attempts: columns of ``measure.memory.Attempt``, training attempts only.
        most, most_source: the size never exceeded, and whether the data set or a cap sets it.
        limit_bytes, limit_source: the memory limit and where it comes from.
    """
    about: dict[str, Any] = {"name": "max_feasible_batch_size", "rule": "playbook: B2", "unit": "examples"}
    rows = attempts.sort_values("batch_size")
    best, bad = rows[rows["status"] == "fits"].tail(1), rows[rows["status"] != "fits"].head(1)
    evidence: dict[str, Any] = {"attempts": len(rows), "limit_bytes": limit_bytes}
    within = f"{limit_bytes / 2**30:.2f} GiB ({limit_source})"
    if best.empty:
        why = f"Not even {bad['batch_size'].item()} examples fit in {within}."
        evidence["reason"] = bad["reason"].item()
        settle = "A smaller model, a lower precision, or more memory."
        return Finding(**about, value=None, evidence=evidence, summary=why, settle=settle)
    names = {"out_of_memory": "memory", "launch_limit": "a limit of the kernel launch", "too_slow": "time"}
    largest, peak = int(best["batch_size"].item()), int(best["peak_bytes"].item())
    above = 0 if bad.empty else int(bad["batch_size"].item())
    by = names[bad["status"].item()] if above else most_source if largest == most else "time"
    end = {
        "memory": f"{above} does not fit in {within}",
        "time": "a step at larger sizes takes longer than this budget waits for",
    }.get(by, f"{by} allows no more")
    return Finding(
        **about,
        value=2 ** int(math.log2(largest)),
        interval=(largest, above - 1) if by == "memory" else None,
        confidence="medium" if by == "time" else "high",
        evidence=evidence | {"largest_tried": largest, "limited_by": by, "peak_bytes": peak},
        summary=f"{largest} examples a step ran, with {peak / 2**30:.2f} GiB at the peak; {end}.",
        caveats=("What lies above was not tried, so this is a lower bound.",) if by == "time" else (),
    )


def usable(table: pd.DataFrame, saturated: Finding, *, present: int) -> pd.DataFrame:
    """The rows of sizes that may be recommended: not beyond saturation (B5), powers of two and the size in use."""
    roof = saturated.value if isinstance(saturated.value, int) else (saturated.interval or (math.inf,))[0]
    sizes = table["batch_size"].astype(int)
    fine = table["examples_per_second"].notna() & (sizes <= roof) & (sizes.map(int.bit_count).eq(1) | sizes.eq(present))
    return table[fine]


def choose(table: pd.DataFrame, saturated: Finding, found: Finding, *, present: int) -> list[tuple[int, str]]:
    """Sizes to recommend with the reason, the best first, then ever smaller ones in case it does not hold.

    Where something is known of the critical size ``found``, the smallest whose
    time to train is within 5% of what can be had: at each size the critical size of the interval counts at which
    the other sizes beat it by most (B8). Else the largest that is left.

    Args:
        table: from :func:`speeds`, of the sizes that can be used.
    """
    ran = usable(table, saturated, present=present)
    sizes = [int(n) for n in ran["batch_size"]]
    top = bool(sizes) and sizes[-1] == saturated.value
    why = "the smallest size at full throughput" if top else "throughput still grows up to there"
    if len(worst := regrets(ran, found)):
        best = int((worst <= (1 + SLACK) * (1 + worst.min()) - 1).argmax())
        if found.confidence == "low":  # too rough an estimate to shrink the size in use
            best = max(best, sum(size <= present for size in sizes) - 1)
        if best < len(sizes) - 1:
            why = "larger ones hardly shorten training"
        sizes = sizes[: best + 1]
    return [(size, why) for size in reversed(sizes)]


def recommend(
    size: int,
    *,
    why: str,
    table: pd.DataFrame,
    verified: Mapping[str, Any],
    limit_bytes: int,
    present: int,
    norms: Sequence[str] = (),
) -> Finding:
    """``recommended_batch_size`` with its peak, its margin and what it asks of the user (playbook: B5, B11, B12).

    Args:
        size, why: from :func:`choose`. table: from :func:`speeds`.
        verified: the attempt in a fresh process. present: the size in use today.
        norms: names of the model's batch-norm layers.
    """
    rates = table.set_index("batch_size")["examples_per_second"]
    rate = float(rates.get(size, math.nan))
    gain = rate / float(rates.get(present, math.nan))
    than = f", {gain:.2g} × the examples per second of your {present}" if present != size and gain == gain else ""
    caveats = [RETUNE, REPEAT]
    if rate == rate:
        step = pipeline.ms(4 * size / rate)
        caveats.append(f"Accumulating 4 such batches takes {step} an update and gains no throughput (playbook: B6).")
    if norms:
        shown = ", ".join(norms[:3]) + (f" and {len(norms) - 3} more" if len(norms) > 3 else "")
        caveats.append(f"Batch norm ({shown}): its statistics may want another size than the gradient's (B12, G2).")
    return Finding(
        name="recommended_batch_size",
        value=size,
        unit="examples",
        rule="playbook: B5, B8, B11",
        because=why,
        summary=f"Train with batches of {size}: {why}{than}.",
        caveats=tuple(caveats),
        evidence={
            "present": present,
            "gain": gain,
            "examples_per_second": rate,
            "peak_bytes": verified["peak_bytes"],
            "margin": 1 - verified["peak_bytes"] / limit_bytes,
            "verified_steps": verified["steps"],
            "evaluation_batch_size": verified.get("evaluation_batch_size"),
        },
    )
