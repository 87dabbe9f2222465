"""Which batch size (playbook: B1 to B12): from tables of attempts, of throughput and of gradient noise."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding
from workup.judge import pipeline

#: A size is saturated when no larger one is faster by more than this part (playbook: B5; the figure is ours).
GAIN = 0.1
#: The smallest size within this part of the shortest predicted training time is recommended (playbook: B8).
SLACK = 0.05
#: Rates between two stretches of one size differ by at least this part, however few of them were seen to.
LEAST_SPREAD = 0.01
#: Measured critical sizes lay between this part of the predicted one and all of it (tests/benchmarks/noise_scale.py).
ROUGH = 0.1
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
    logs = {int(n): np.log(rates.to_numpy(float)) for n, rates in fine.groupby("batch_size")["examples_per_second"]}
    if not logs:
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
    return list(logs), np.array(drawn)


def saturation(stretches: pd.DataFrame) -> Finding:
    """``saturation_batch_size``: the smallest size that no larger one outruns by more than 10% (playbook: B4, B5).

    The interval holds 95% of what resampled rounds call; wider than two doublings is "cannot tell".
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
    if high > 4 * low:
        why = f"Noise hides where throughput stops growing, somewhere from {low} to {high}."
        settle = "More rounds (budget thorough), or a quieter machine."
        return Finding(**about, value=None, confidence="low", summary=why, settle=settle)
    if value == sizes[-1]:
        why = f"Throughput still grows at {value}, the largest size measured (× {middle[-1] / middle[-2]:.2f} there)."
        return Finding(**about, value=None, summary=why, settle="Larger sizes, where memory, data and time allow them.")
    where = f"at {value}" if low == high else f"between {low} and {high}"
    flat = "It hardly grows from the first size on: the device is busy at once, or something else limits it (B4)."
    return Finding(
        **about,
        value=value,
        confidence="high" if low == high else "medium",
        caveats=(flat,) if value == sizes[0] else (),
        summary=f"Throughput stops growing {where}: larger batches gain less than {GAIN:.0%}.",
    )


def input_bound(stretches: pd.DataFrame, *, batch_size: int) -> Finding:
    """``input_bound`` from the loop's own waits for data, in place of loader and step apart (playbook: B4, F1)."""
    here = stretches[stretches["batch_size"] == batch_size].dropna(subset="examples_per_second")
    if here.empty:
        why = f"No stretch at {batch_size} finished."
        return Finding(name="input_bound", value=None, rule="playbook: B4", summary=why, settle="Run the sweep again.")
    wait, whole = here["data_seconds"], here["step_seconds"]
    parts = {"loader": wait, "step": whole - wait, "together": whole}
    rows = [pd.DataFrame({"round": here["seed"], "what": what, "step_seconds": part}) for what, part in parts.items()]
    found = pipeline.input_bound(pd.concat(rows), batch_size=batch_size)
    caveat = "Measured from the loop alone; 03_input_pipeline measures loader and step apart."
    return dataclasses.replace(found, confidence="low", caveats=(caveat,))


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
    rows = sorted(attempts.to_dict("records"), key=lambda row: row["batch_size"])
    bad = next((row for row in rows if row["status"] != "fits"), None)
    best = next((row for row in reversed(rows) if row["status"] == "fits"), None)
    within = f"{limit_bytes / 2**30:.2f} GiB ({limit_source})"
    if best is None:
        return Finding(
            **about,
            value=None,
            evidence={"attempts": len(rows), "limit_bytes": limit_bytes, "reason": bad["reason"] if bad else ""},
            summary=f"Not even {rows[0]['batch_size']} examples fit in {within}.",
            settle="A smaller model, a lower precision, or more memory.",
        )
    why = {"out_of_memory": "memory", "launch_limit": "a limit of the kernel launch", "too_slow": "time"}
    largest, peak = int(best["batch_size"]), int(best["peak_bytes"])
    by = why[bad["status"]] if bad else most_source if largest == most else "time"
    end = {
        "memory": f"{bad['batch_size'] if bad else 0} does not fit in {within}",
        "time": "a step at larger sizes takes longer than this budget waits for",
    }.get(by, f"{by} allows no more")
    evidence = {"largest_tried": largest, "limited_by": by, "attempts": len(rows)}
    return Finding(
        **about,
        value=2 ** int(math.log2(largest)),
        interval=(largest, bad["batch_size"] - 1) if bad and by == "memory" else None,
        confidence="medium" if by == "time" else "high",
        evidence=evidence | {"peak_bytes": peak, "limit_bytes": limit_bytes},
        summary=f"{largest} examples a step ran, with {peak / 2**30:.2f} GiB at the peak; {end}.",
        caveats=("What lies above was not tried, so this is a lower bound.",) if by == "time" else (),
    )


def scales(noise: pd.DataFrame) -> tuple[pd.Series, np.ndarray]:
    """The simple noise scale tr(Σ)/|G|² at each step measured, and resampled, shape [steps, RESAMPLES].

    From mean squared gradient norms at sizes b < B of a population of N, drawn without
    replacement (McCandlish et al. 2018, appendix A, with the finite-population factor)::

        E|g_b|² = |G|² + c(b) tr(Σ),   c(b) = (N − b) / (b (N − 1)),   1/b where N is unknown

    Both sides are averaged over the draws before they are divided; a gradient lost in its noise gives inf.

    Args:
        noise: from ``measure.noise_scale.measure``.
    """
    rng, found, drawn = np.random.default_rng(0), {}, []
    for step, here in noise.groupby("step"):
        norms = here[["small_norm2", "large_norm2"]].to_numpy()
        b, big, n = (float(here[name].iloc[0]) for name in ("small", "large", "population"))
        cb, cbig = ((n - x) / (n - 1) / x if n > 1 else 1 / x for x in (b, big))
        picks = rng.integers(len(norms), size=(RESAMPLES, len(norms)))
        small, large = np.vstack([norms.mean(axis=0), norms[picks].mean(axis=1)]).T
        trace = np.maximum((small - large) / (cb - cbig), 0)
        gradient = large - cbig * trace
        scale = np.where(gradient > 0, trace / np.where(gradient > 0, gradient, 1), np.inf)
        found[step] = float(scale[0])
        drawn.append(scale[1:])
    return pd.Series(found), np.array(drawn)


def critical(noise: pd.DataFrame) -> Finding:
    """``critical_batch_size``: steps(B) = S_min (1 + B_crit / B), so at B_crit twice the fewest steps (playbook: B8).

    A step at size b gets as far as 1 / (1 + scale / b) steps without noise. Summed over a training of
    T steps at b that is its S_min, and B_crit = b (T / S_min − 1): the scales' harmonic mean, so that
    the many late steps that noise makes slow do not count as many steps that a goal needs.
    """
    about: dict[str, Any] = {"name": "critical_batch_size", "unit": "examples"}
    about["rule"] = "playbook: B8; McCandlish et al. 2018"
    if not len(noise):
        why = "The data holds fewer than two batches, so the gradient's noise cannot be measured."
        return Finding(**about, value=None, summary=why, settle="A smaller batch size or more data.")
    by_step, drawn = scales(noise)
    b = float(noise["small"].iloc[0])
    with np.errstate(divide="ignore"):  # all lost in noise: infinite
        value = b * (1 / np.mean(1 / (1 + by_step.to_numpy() / b)) - 1)
        low, high = np.quantile(b * (1 / np.mean(1 / (1 + drawn / b), axis=0) - 1), [0.025, 0.975], method="nearest")
    about |= {"interval": (ROUGH * float(low), float(high)), "confidence": "low"}
    about["evidence"] = {
        "noise_scale_by_step": {str(step): scale for step, scale in by_step.items()},
        "noise_scale_interval": (float(low), float(high)),
    }
    if not math.isfinite(value) or high > 16 * low:
        why = f"The gradient is nearly lost in its noise: its noise scale is above {low:.0f}, not known better."
        return Finding(**about, value=None, summary=why, settle="More draws (budget thorough), or earlier in training.")
    return Finding(
        **about,
        value=round(value),
        summary=f"At {value:.0f} examples, or fewer, training takes twice the fewest steps: larger batches save at "
        "most half.",
        caveats=(
            f"The noise scale of a short run is an upper estimate: measured, the critical size was between {ROUGH:g} "
            "and 1 times as large, since curvature and the optimizer limit the steps too. The budget thorough "
            "measures the steps themselves.",
        ),
    )


def measured_critical(reached: pd.DataFrame) -> Finding:
    """``critical_batch_size`` by experiment: steps = S_min (1 + B_crit / B), fitted to the steps a goal took (B8).

    Args:
        reached: columns batch_size, lr, steps (to the goal; NaN where it was not reached). At each
            size the best learning rate counts: each size is retuned (playbook: B11).

    Returns:
        The finding; its interval is what fits without one of the sizes give.
    """
    about: dict[str, Any] = {"name": "critical_batch_size", "unit": "examples", "rule": "playbook: B8, B9"}
    best = reached.groupby("batch_size")["steps"].min().dropna()
    if len(best) < 3:
        why = f"Only {len(best)} sizes reached the goal, at any learning rate tried."
        return Finding(**about, value=None, summary=why, settle="More steps, or a nearer goal.")
    about["evidence"] = {"steps": {str(size): float(steps) for size, steps in best.items()}}
    fewest, value = _law(best)
    if not 0 < value < math.inf:
        what = "perfectly" if value else "not at all"
        why = f"Steps fall {what} with the batch up to {best.index[-1]}: the critical size lies outside what was tried."
        return Finding(**about, value=None, summary=why, settle="Other sizes.")
    without = [_law(best.drop(size))[1] for size in best.index]
    why = f"By experiment, training takes twice the fewest steps ({fewest:.0f}) at batches of {value:.0f}."
    interval = (min(value, *without), max(value, *without))
    return Finding(**about, value=round(value), interval=interval, confidence="medium", summary=why)


def _law(steps: pd.Series) -> tuple[float, float]:
    """S_min and B_crit of steps by size, relative errors counting; B_crit is 0 or inf where steps do not bend."""
    sizes, taken = steps.index.to_numpy(float), steps.to_numpy(float)
    design = np.stack([np.ones_like(sizes), 1 / sizes], axis=1) / taken[:, None]
    (fewest, examples), *_ = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)
    return float(fewest), math.inf if fewest <= 0 else max(0.0, float(examples / fewest))


def costs(table: pd.DataFrame, critical_size: float, *, present: int, steps: int) -> pd.DataFrame:
    """What reaching the goal of today's run takes at each size (playbook: B8, B9, B10).

    Args:
        table: from :func:`speeds`. critical_size: in examples.
        present, steps: today's batch size and number of steps.

    Returns:
        batch_size, steps = S_min (1 + B_crit / B), examples (steps × B), seconds (one device, so
        also the resource use in device-seconds).
    """
    fine = table.dropna(subset="examples_per_second")[["batch_size", "step_seconds"]]
    needed = steps * (1 + critical_size / fine["batch_size"]) / (1 + critical_size / present)
    spent = {"steps": needed, "examples": needed * fine["batch_size"], "seconds": needed * fine["step_seconds"]}
    return fine[["batch_size"]].assign(**spent).reset_index(drop=True)


def choose(
    table: pd.DataFrame, saturated: Finding, found: Finding, *, present: int, steps: int
) -> list[tuple[int, str]]:
    """Sizes to recommend with the reason, the best first, then ever smaller ones in case it does not hold.

    None beyond saturation (playbook: B5). Where the critical size ``found`` is told, the smallest
    whose predicted training time is within 5% of the shortest (B8); else the largest that is left.
    """
    roof = saturated.value or (saturated.interval or (math.inf,))[0]
    ran = table.dropna(subset="examples_per_second")
    # Powers of two, and the size in use today: it may beat those below it.
    sizes = [int(n) for n in ran["batch_size"] if n <= roof and (int(n).bit_count() == 1 or n == present)]
    why = "the smallest size at full throughput" if saturated.told else "throughput still grows up to there"
    if found.told and sizes:
        spent = costs(ran[ran["batch_size"].isin(sizes)], found.value, present=present, steps=steps)
        best = int((spent["seconds"] <= (1 + SLACK) * spent["seconds"].min()).argmax())
        if found.confidence == "low":  # too rough an estimate to shrink the size in use
            best = max(best, sum(size <= present for size in sizes) - 1)
        if best < len(sizes) - 1:
            why = f"larger ones hardly shorten training, with a critical size of {found.value}"
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
