"""Which batch size (playbook: B1 to B12): from tables of attempts, of throughput and of gradient noise."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding

#: A size is saturated when no larger one is faster by more than this part (playbook: B5; the figure is ours).
GAIN = 0.1
#: Waiting for data is a bottleneck from this part of a step's time on.
WAIT = 0.1
#: A recommended size leaves this part of the memory limit free.
MARGIN = 0.1
#: The smallest size within this part of the shortest predicted training time is recommended (playbook: B8).
SLACK = 0.05

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
    fine = stretches.dropna(subset="examples_per_second")
    sizes = np.sort(stretches["batch_size"].unique())
    drawn = dict(zip(*_resampled(fine, resamples, seed), strict=True))
    rows = []
    for size in sizes:
        here = fine[fine["batch_size"] == size]
        rate = float(here["examples_per_second"].median()) if len(here) else math.nan
        low, high = np.quantile(drawn[size], [0.025, 0.975]) if size in drawn else (math.nan, math.nan)
        share = float((here["data_seconds"] / here["step_seconds"]).median()) if len(here) else math.nan
        rows.append([int(size), rate, low, high, size / rate, share, len(here)])
    names = ["batch_size", "examples_per_second", "low", "high", "step_seconds", "data_share", "rounds"]
    table = pd.DataFrame(rows, columns=names)
    table.insert(6, "gain", table["examples_per_second"] / table["examples_per_second"].shift())
    return table


def _resampled(stretches: pd.DataFrame, resamples: int, seed: int) -> tuple[list[int], np.ndarray]:
    """Sizes and, for each, resampled median throughputs, shape [sizes, resamples].

    With a few rounds a size's own spread says little, so the relative residuals of all sizes
    are pooled, widened for the degrees of freedom that their medians took.
    """
    groups = [(int(size), np.log(g["examples_per_second"].to_numpy())) for size, g in stretches.groupby("batch_size")]
    if not groups:
        return [], np.empty((0, resamples))
    rounds = max(len(logs) for _, logs in groups)
    residuals = np.concatenate([logs - np.median(logs) for _, logs in groups]) * math.sqrt(rounds / max(rounds - 1, 1))
    rng = np.random.default_rng(seed)
    noise = [np.median(rng.choice(residuals, (resamples, len(logs))), axis=1) for _, logs in groups]
    return [size for size, _ in groups], np.exp([np.median(g[1]) + n for g, n in zip(groups, noise, strict=True)])


def saturation(stretches: pd.DataFrame, *, resamples: int = 1000, seed: int = 0) -> Finding:
    """``saturation_batch_size``: the smallest size that no larger one outruns by more than 10% (playbook: B4, B5).

    The interval holds 95% of what resampled rounds call; wider than two doublings is "cannot tell".
    """
    sizes, drawn = _resampled(stretches.dropna(subset="examples_per_second"), resamples, seed)
    about: dict[str, Any] = {"name": "saturation_batch_size", "rule": "playbook: B4, B5", "unit": "examples"}
    if len(sizes) < 2:
        why = "Throughput was measured at fewer than two sizes."
        return Finding(**about, value=None, summary=why, settle="A larger cap on the batch size.")
    called = (drawn >= (1 - GAIN) * drawn.max(axis=0)).argmax(axis=0)
    low, high = (sizes[int(k)] for k in np.quantile(called, [0.025, 0.975], method="nearest"))
    value = sizes[int(np.bincount(called).argmax())]
    gains = [
        float(after / before) for before, after in zip(np.median(drawn, 1)[:-1], np.median(drawn, 1)[1:], strict=True)
    ]
    evidence = {"sizes": sizes, "gains": gains, "share_of_resamples": float((np.array(sizes)[called] == value).mean())}
    if high > 4 * low:
        return Finding(
            **about,
            value=None,
            interval=(low, high),
            evidence=evidence,
            confidence="low",
            summary=f"Noise hides where throughput stops growing, somewhere from {low} to {high}.",
            settle="More rounds (budget thorough), or a quieter machine.",
        )
    if value == sizes[-1]:
        return Finding(
            **about,
            value=None,
            interval=(low, high),
            evidence=evidence,
            summary=f"Throughput still grows at {sizes[-1]}, the largest size measured (× {gains[-1]:.2f} there).",
            settle="Larger sizes, where memory, data and time allow them.",
        )
    where = f"at {value}" if low == high else f"between {low} and {high}"
    flat = "It hardly grows from the first doubling on: the device is busy at once, or something else limits it (B4)."
    return Finding(
        **about,
        value=value,
        interval=(low, high),
        evidence=evidence,
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
    fits, bad = attempts[attempts["status"] == "fits"], attempts[attempts["status"] != "fits"]
    gib = limit_bytes / 2**30
    if not len(fits):
        return Finding(
            **about,
            value=None,
            evidence={"attempts": len(attempts), "limit_bytes": limit_bytes, "reason": bad["reason"].iloc[-1]},
            summary=f"Not even {int(bad['batch_size'].min())} examples fit in {gib:.2f} GiB ({limit_source}).",
            settle="A smaller model, a lower precision, or more memory.",
        )
    best = fits.loc[fits["batch_size"].idxmax()]
    largest, first_bad = int(best["batch_size"]), int(bad["batch_size"].min()) if len(bad) else None
    why = {"out_of_memory": "memory", "launch_limit": "a limit of the kernel launch", "too_slow": "time"}
    by = why[bad.loc[bad["batch_size"].idxmin(), "status"]] if len(bad) else most_source if largest == most else "time"
    end = {
        "memory": f"{first_bad} does not fit in {gib:.2f} GiB ({limit_source})",
        "time": "a step at larger sizes takes longer than this budget waits for",
    }.get(by, f"{by} allows no more")
    return Finding(
        **about,
        value=2 ** int(math.log2(largest)),
        interval=(largest, first_bad - 1) if first_bad and by == "memory" else None,
        confidence="medium" if by == "time" else "high",
        evidence={
            "largest_tried": largest,
            "limited_by": by,
            "attempts": len(attempts),
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
        return Finding(
            **about, value=None, summary=f"No stretch at {batch_size} finished.", settle="Run the sweep again."
        )
    low, high, middle = float(shares.min()), float(shares.max()), float(np.median(shares))
    says = f"At batch size {batch_size}, {middle:.0%} of a step is waiting for data"
    evidence = {"data_share": middle, "low": low, "high": high, "batch_size": batch_size}
    if low < WAIT < high:
        both = f"{says}, at times more than {WAIT:.0%} and at times less."
        return Finding(**about, value=None, evidence=evidence, summary=both, settle="03_input_pipeline tells.")
    return Finding(
        **about,
        value=middle >= WAIT,
        evidence=evidence,
        summary=f"{says}: {'look at the input pipeline first' if middle >= WAIT else 'it is not input-bound'}.",
        caveats=("Measured from the loop alone; 03_input_pipeline measures loader and step apart.",),
    )


def candidates(table: pd.DataFrame, saturated: Finding) -> list[int]:
    """Powers of two that ran, none beyond saturation (playbook: B5): smallest first."""
    ran = table.dropna(subset="examples_per_second")["batch_size"]
    roof = saturated.value or (saturated.interval or (math.inf,))[0]
    return [int(size) for size in ran if size <= roof and int(size).bit_count() == 1]


def recommend(
    size: int,
    *,
    table: pd.DataFrame,
    verified: dict,
    limit_bytes: int,
    present: int,
    norms: Sequence[str] = (),
    why: str,
) -> Finding:
    """``recommended_batch_size`` with its peak, its margin and what it asks of the user (playbook: B5, B11, B12).

    Args:
        size: the size chosen; why: the reason, a clause.
        verified: the attempt in a fresh process, as a dictionary.
        present: the size in use today. norms: names of the model's batch-norm layers.
    """
    rates = table.set_index("batch_size")["examples_per_second"]
    peak = verified["peak_bytes"]
    caveats = [RETUNE, ACCUMULATE, REPEAT]
    if norms:
        shown = ", ".join(norms[:3]) + (f" and {len(norms) - 3} more" if len(norms) > 3 else "")
        caveats.insert(1, f"Batch norm ({shown}): its statistics may want another size than the gradient's (B12, G2).")
    gain = float(rates[size] / rates[present]) if present in rates else math.nan
    than = f", {gain:.2g} × the examples per second of your {present}" if present != size and gain == gain else ""
    return Finding(
        name="recommended_batch_size",
        value=size,
        unit="examples",
        rule="playbook: B5, B8, B11",
        confidence="medium",
        summary=f"Train with batches of {size}: {why}{than}.",
        caveats=tuple(caveats),
        evidence={
            "present": present,
            "gain": gain,
            "examples_per_second": float(rates[size]),
            "peak_bytes": peak,
            "margin": 1 - peak / limit_bytes,
            "verified_steps": verified["steps"],
            "evaluation_batch_size": verified.get("evaluation_batch_size"),
        },
    )
