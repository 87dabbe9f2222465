"""Which batch size (playbook: B1 to B12): from tables of attempts, of throughput and of gradient noise."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding

#: A size is saturated when no larger one is faster by more than this part (playbook: B5; the figure is ours).
GAIN = 0.1
#: Waiting for data is a bottleneck from this part of a step's time on.
WAIT = 0.1
#: The smallest size within this part of the shortest predicted training time is recommended (playbook: B8).
SLACK = 0.05
#: Rates between two stretches of one size differ by at least this part, however few of them were seen to.
LEAST_SPREAD = 0.01

RETUNE = (
    "Another batch size calls for retuning the learning rate, momentum and regularisation (playbook: B11). "
    "It is no knob for validation performance (B1)."
)
ACCUMULATE = "Gradient accumulation to a larger batch costs as much per example and gains no throughput (playbook: B6)."
REPEAT = "Holds for this model, optimizer, precision and machine: probe again after a change of any (playbook: B7)."


def speeds(stretches: pd.DataFrame, *, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Throughput by size: medians over the rounds with 95% bootstrap intervals.

    Args:
        stretches: a row per stretch, from ``measure.throughput.table``.

    Returns:
        A row per size: batch_size, examples_per_second, low, high, step_seconds, data_share
        (waiting for data, part of a step), gain (throughput over the size before), rounds.
    """
    sizes, drawn = _resampled(stretches, resamples, seed)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1) if sizes else ([], [])
    shares = stretches.assign(data_share=stretches["data_seconds"] / stretches["step_seconds"])
    groups = shares.groupby("batch_size")
    table = groups[["examples_per_second", "data_share"]].median().reset_index()
    for name, ends in (("low", low), ("high", high)):
        table[name] = table["batch_size"].map(dict(zip(sizes, ends, strict=True)))
    table["step_seconds"] = table["batch_size"] / table["examples_per_second"]
    table["gain"] = table["examples_per_second"] / table["examples_per_second"].shift()
    table["rounds"] = groups["examples_per_second"].count().to_numpy()
    return table[["batch_size", "examples_per_second", "low", "high", "step_seconds", "data_share", "gain", "rounds"]]


def _resampled(stretches: pd.DataFrame, resamples: int, seed: int) -> tuple[list[int], np.ndarray]:
    """Sizes and, for each, resampled median throughputs, shape [sizes, resamples].

    With a few rounds a size's own spread says little, so the relative residuals of all sizes
    are pooled, widened for the degrees of freedom that their medians took.
    """
    fine = stretches.dropna(subset="examples_per_second")
    sizes = sorted({int(size) for size in fine["batch_size"]})
    logs = {n: np.log(fine.loc[fine["batch_size"] == n, "examples_per_second"].to_numpy(float)) for n in sizes}
    if not sizes:
        return [], np.empty((0, resamples))
    rounds = max(len(rates) for rates in logs.values())
    residuals = np.concatenate([rates - np.median(rates) for rates in logs.values()])
    residuals *= math.sqrt(rounds / max(rounds - 1, 1))
    rng = np.random.default_rng(seed)
    drawn = []
    for rates in logs.values():
        noise = rng.choice(residuals, (resamples, len(rates))) + rng.normal(0, LEAST_SPREAD, (resamples, len(rates)))
        drawn.append(np.exp(np.median(rates) + np.median(noise, axis=1)))
    return sizes, np.array(drawn)


def saturation(stretches: pd.DataFrame, *, resamples: int = 1000, seed: int = 0) -> Finding:
    """``saturation_batch_size``: the smallest size that no larger one outruns by more than 10% (playbook: B4, B5).

    The interval holds 95% of what resampled rounds call; wider than two doublings is "cannot tell".
    """
    sizes, drawn = _resampled(stretches, resamples, seed)
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
    largest = int(best["batch_size"])
    by = why[bad["status"]] if bad else most_source if largest == most else "time"
    end = {
        "memory": f"{bad['batch_size'] if bad else 0} does not fit in {within}",
        "time": "a step at larger sizes takes longer than this budget waits for",
    }.get(by, f"{by} allows no more")
    return Finding(
        **about,
        value=2 ** int(math.log2(largest)),
        interval=(largest, bad["batch_size"] - 1) if bad and by == "memory" else None,
        confidence="medium" if by == "time" else "high",
        evidence={
            "largest_tried": largest,
            "limited_by": by,
            "attempts": len(rows),
            "peak_bytes": int(best["peak_bytes"]),
            "limit_bytes": limit_bytes,
        },
        summary=f"{largest} examples a step ran, with {best['peak_bytes'] / 2**30:.2f} GiB at the peak; {end}.",
        caveats=("What lies above was not tried, so this is a lower bound.",) if by == "time" else (),
    )


def input_bound(stretches: pd.DataFrame, *, batch_size: int) -> Finding:
    """``input_bound``, its weak form: waiting for data as a part of the step (playbook: B4, F1)."""
    here = stretches[stretches["batch_size"] == batch_size].dropna(subset="examples_per_second")
    shares = (here["data_seconds"] / here["step_seconds"]).to_numpy()
    about: dict[str, Any] = {"name": "input_bound", "rule": "playbook: B4, F1", "confidence": "low"}
    if not len(shares):
        why = f"No stretch at {batch_size} finished."
        return Finding(**about, value=None, summary=why, settle="Run the sweep again.")
    low, high, middle = float(shares.min()), float(shares.max()), float(np.median(shares))
    says = f"At batch size {batch_size}, {middle:.0%} of a step is waiting for data"
    about["evidence"] = {"data_share": middle, "low": low, "high": high, "batch_size": batch_size}
    if low < WAIT < high:
        both = f"{says}, at times more than {WAIT:.0%} and at times less."
        return Finding(**about, value=None, summary=both, settle="03_input_pipeline measures loader and step apart.")
    return Finding(
        **about,
        value=middle >= WAIT,
        summary=f"{says}: {'look at the input pipeline first' if middle >= WAIT else 'it is not input-bound'}.",
        caveats=("Measured from the loop alone; 03_input_pipeline measures loader and step apart.",),
    )


def scales(noise: pd.DataFrame, *, resamples: int = 400, seed: int = 0) -> pd.DataFrame:
    """The simple noise scale tr(Σ)/|G|² at each step measured, shape [steps] with 95% intervals.

    From mean squared gradient norms at sizes b < B of a population of N, drawn without
    replacement (McCandlish et al. 2018, appendix A, with the finite-population factor)::

        E|g_b|² = |G|² + c(b) tr(Σ),   c(b) = (N − b) / (b (N − 1)),   1/b where N is unknown

    Args:
        noise: from ``measure.noise_scale.measure``.

    Returns:
        step, noise_scale, low, high (inf where the gradient is lost in its noise), and in
        ``attrs["resampled"]`` the resampled scales, shape [steps, resamples].
    """
    rng, rows, drawn = np.random.default_rng(seed), [], []
    for step, here in noise.groupby("step"):
        small, large = here["small_norm2"].to_numpy(), here["large_norm2"].to_numpy()
        b, big, n = (float(here[name].iloc[0]) for name in ("small", "large", "population"))
        cb, cbig = ((n - x) / (n - 1) / x if n > 1 else 1 / x for x in (b, big))
        picks = rng.integers(len(small), size=(resamples, len(small)))
        resampled = _scale(small[picks].mean(1), large[picks].mean(1), cb, cbig)
        drawn.append(resampled)
        point = float(_scale(small.mean(keepdims=True), large.mean(keepdims=True), cb, cbig)[0])
        rows.append([step, point, *np.quantile(resampled, [0.025, 0.975], method="nearest")])
    table = pd.DataFrame(rows, columns=["step", "noise_scale", "low", "high"])
    table.attrs["resampled"] = np.array(drawn)
    return table


def _scale(small: np.ndarray, large: np.ndarray, cb: float, cbig: float) -> np.ndarray:
    trace = np.maximum((small - large) / (cb - cbig), 0)
    gradient = large - cbig * trace
    return np.where(gradient > 0, trace / np.where(gradient > 0, gradient, 1), np.inf)


def critical(noise: pd.DataFrame, *, resamples: int = 400, seed: int = 0) -> Finding:
    """``critical_batch_size``: steps(B) = S_min (1 + B_crit / B), so at B_crit twice the fewest steps (playbook: B8).

    Each step of a training costs 1 + scale / B of a noiseless one, so over a training B_crit is
    the mean of the noise scale over its steps, which are measured at even distances.
    """
    about: dict[str, Any] = {"name": "critical_batch_size", "unit": "examples"}
    about["rule"] = "playbook: B8; McCandlish et al. 2018"
    if not len(noise):
        why = "The data holds fewer than two batches, so the gradient's noise cannot be measured."
        return Finding(**about, value=None, summary=why, settle="A smaller batch size or more data.")
    table = scales(noise, resamples=resamples, seed=seed)
    value = float(table["noise_scale"].mean())
    low, high = np.quantile(table.attrs["resampled"].mean(axis=0), [0.025, 0.975], method="nearest")
    by_step = {str(int(step)): float(scale) for step, scale in zip(table["step"], table["noise_scale"], strict=True)}
    about |= {"interval": (float(low), float(high)), "evidence": {"noise_scale_by_step": by_step}, "confidence": "low"}
    if not math.isfinite(value) or high > 16 * low:
        why = f"The gradient is nearly lost in its noise: the critical batch size is above {low:.0f}, not known better."
        return Finding(**about, value=None, summary=why, settle="More draws (budget thorough), or earlier in training.")
    return Finding(
        **about,
        value=round(value),
        summary=f"At {value:.0f} examples training takes twice the fewest steps: larger batches save at most half.",
        caveats=(
            "A prediction from the plain gradient, to within a factor of a few: it was 5 times too high on two small "
            "workloads. The budget thorough measures the steps themselves.",
            "The noise grows as training goes on, and so does the size that pays: this is the mean of a short run.",
        ),
    )


def measured_critical(reached: pd.DataFrame) -> Finding:
    """``critical_batch_size`` by experiment: steps = S_min (1 + B_crit / B), fitted to the steps a goal took (B8).

    Args:
        reached: columns batch_size, lr, steps (to the goal; NaN where it was not reached). At each
            size the best learning rate counts: each size is retuned (playbook: B11).
    """
    about: dict[str, Any] = {"name": "critical_batch_size", "unit": "examples", "rule": "playbook: B8, B9"}
    best = reached.groupby("batch_size")["steps"].min().dropna()
    if len(best) < 3:
        why = f"Only {len(best)} sizes reached the goal, at any learning rate tried."
        return Finding(**about, value=None, summary=why, settle="More steps, or a nearer goal.")
    sizes, steps = best.index.to_numpy(float), best.to_numpy(float)
    design = np.stack([np.ones_like(sizes), 1 / sizes], axis=1) / steps[:, None]  # weights: relative errors count
    (fewest, examples), *_ = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)
    about["evidence"] = {"steps": {str(int(n)): float(k) for n, k in zip(sizes, steps, strict=True)}}
    if fewest <= 0 or examples <= 0:
        what = "perfectly" if fewest <= 0 else "not at all"
        why = f"Steps fall {what} with the batch up to {sizes[-1]:.0f}: the critical size lies outside what was tried."
        return Finding(**about, value=None, summary=why, settle="Other sizes.")
    value = examples / fewest
    why = f"By experiment, training takes twice the fewest steps ({fewest:.0f}) at batches of {value:.0f}."
    return Finding(**about, value=round(value), confidence="medium", summary=why)


def costs(table: pd.DataFrame, critical_size: float, *, present: int, steps: int) -> pd.DataFrame:
    """What reaching the goal of today's run takes at each size (playbook: B8, B9, B10).

    Args:
        table: from :func:`speeds`. critical_size: in examples.
        present, steps: today's batch size and number of steps.

    Returns:
        batch_size, steps = S_min (1 + B_crit / B), examples (steps × B), seconds (one device, so
        also the resource use in device-seconds).
    """
    fine = table.dropna(subset="examples_per_second")
    sizes = fine["batch_size"].to_numpy(float)
    needed = steps * (1 + critical_size / sizes) / (1 + critical_size / present)
    return pd.DataFrame(
        {
            "batch_size": fine["batch_size"].to_numpy(),
            "steps": needed,
            "examples": needed * sizes,
            "seconds": needed * fine["step_seconds"].to_numpy(),
        }
    )


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
    ran = ran[ran["batch_size"].isin(sizes)]
    why = "the smallest size at full throughput" if saturated.told else "throughput still grows up to there"
    if found.told and sizes:
        seconds = costs(ran, found.value, present=present, steps=steps)["seconds"].to_numpy()
        best = int((seconds <= (1 + SLACK) * seconds.min()).argmax())
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
    caveats = [RETUNE, ACCUMULATE, REPEAT]
    if norms:
        shown = ", ".join(norms[:3]) + (f" and {len(norms) - 3} more" if len(norms) > 3 else "")
        caveats.insert(1, f"Batch norm ({shown}): its statistics may want another size than the gradient's (B12, G2).")
    gain = float(rates.get(size, math.nan) / rates.get(present, math.nan))
    than = f", {gain:.2g} × the examples per second of your {present}" if present != size and gain == gain else ""
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
            "examples_per_second": float(rates.get(size, math.nan)),
            "peak_bytes": verified["peak_bytes"],
            "margin": 1 - verified["peak_bytes"] / limit_bytes,
            "verified_steps": verified["steps"],
            "evaluation_batch_size": verified.get("evaluation_batch_size"),
        },
    )
