"""How many steps a larger batch saves: the critical batch size, predicted and by experiment (playbook: B8 to B10)."""

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import NO_MATTER, Finding

#: Measured critical sizes lay within this factor of the predicted ones (tests/benchmarks/noise_scale.py).
ROUGH = 5
#: Steps count until so much of the loss's fall is done: what follows creeps along the floor, where noise is all.
FALL = 0.9
#: A size that takes at most so much longer than the best one, wherever the critical size lies, is good enough.
LONGER = 0.3
#: More draws are taken until a step's noise scale is known within this factor.
CLEAR = 2
#: Bootstrap resamples.
RESAMPLES = 400


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


def clear(noise: pd.DataFrame) -> bool:
    """Whether the draws of one step tell its noise scale within a factor of ``CLEAR``."""
    low, high = np.quantile(scales(noise)[1], [0.025, 0.975], method="nearest")
    return bool(high < CLEAR * low)


def critical(noise: pd.DataFrame) -> Finding:
    """``critical_batch_size``: steps(B) = S_min (1 + B_crit / B), so at B_crit twice the fewest steps (playbook: B8).

    A step at size b gets as far as 1 / (1 + scale / b) steps without noise. Summed over a training of
    T steps at b that is its S_min, and B_crit = b (T / S_min − 1): the scales' harmonic mean, so that
    the many late steps that noise makes slow do not count as many steps that a goal needs. The goal is
    ``FALL`` of the loss's fall, as in the experiment.
    """
    about: dict[str, Any] = {"name": "critical_batch_size", "unit": "examples"}
    about["rule"] = "playbook: B8; McCandlish et al. 2018"
    if not len(noise):
        why = "The data holds fewer than two batches, so the gradient's noise cannot be measured."
        return Finding(**about, value=None, summary=why, settle="A smaller batch size or more data.")
    losses = noise.groupby("step")["loss"].mean()
    left = (losses - losses.min()) / (losses.iloc[0] - losses.min())  # NaN where nothing falls: all steps count
    by_step, drawn = scales(noise[~noise["step"].isin(left.index[left <= 1 - FALL])])
    b = float(noise["small"].iloc[0])
    with np.errstate(divide="ignore"):  # all lost in noise: infinite
        value = b * (1 / np.mean(1 / (1 + by_step.to_numpy() / b)) - 1)
        low, high = np.quantile(b * (1 / np.mean(1 / (1 + drawn / b), axis=0) - 1), [0.025, 0.975], method="nearest")
    about |= {"interval": (float(low) / ROUGH, ROUGH * float(high)), "confidence": "low"}
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
        summary=f"At about {value:.0f} examples training takes twice the fewest steps: larger ones save at most half.",
        caveats=(
            f"A prediction from the plain gradient, within a factor of {ROUGH} of what small workloads took: curvature "
            "and the optimizer limit the steps too. The budget thorough measures the steps themselves.",
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


def regrets(table: pd.DataFrame, found: Finding) -> pd.Series:
    """How much longer than at the best size training takes, where the critical size is the worst one for it (B8).

    The time to a goal is step_seconds (1 + B_crit / B) but for a factor that all sizes share.

    Args:
        table: from ``judge.batch_size.speeds``.
        found: the critical size; all of its interval counts, its value where it has none.

    Returns:
        A share of the shortest time by batch size; empty where nothing is known of the critical size.
    """
    fine = table.dropna(subset="examples_per_second").set_index("batch_size")["step_seconds"]
    low, high = found.interval or (found.value, found.value)
    if not len(fine) or low is None:
        return pd.Series(dtype=float)
    sizes = fine.index.to_numpy(float)
    # A curve through all sizes, relative errors counting: one size's luck would be taken for what it can do.
    basis = np.stack([np.ones_like(sizes), np.sqrt(sizes), sizes], axis=1) / fine.to_numpy()[:, None]
    step = basis @ np.linalg.lstsq(basis, np.ones_like(sizes))[0] * fine.to_numpy()
    # Divided by B_crit too, so that one without end is a number.
    shares = 1 / np.geomspace(max(low, 1e-3), min(max(high, 1e-3), 1e12), 50)
    seconds = step[:, None] * (shares + 1 / sizes[:, None])
    return pd.Series((seconds / seconds.min(axis=0)).max(axis=1) - 1, index=fine.index)


def judged(found: Finding, worst: pd.Series, size: int, *, settle: str) -> Finding:
    """The critical size beside what it decides: where a better answer would save little time, it does not matter.

    Args:
        found: the critical size. worst: from :func:`regrets`. size: the batch size recommended.
        settle: what would tell better.
    """
    longer = float(worst.get(size, math.nan))
    if found.interval is None or (found.is_conclusive and found.confidence != "low"):
        return found
    if not longer <= LONGER:
        why = (
            f" Batches of {size} could take {longer:.0%} longer to train than the best size." if longer > LONGER else ""
        )
        return dataclasses.replace(found, summary=found.summary + why, settle=settle)
    low, high = found.interval or (0, math.inf)
    about = f"about {found.value}, " if found.is_conclusive else ""
    where = f"anywhere from {low:.0f} to {high:.0f}" if high < math.inf else f"anywhere above {low:.0f}"
    why = (
        f"It does not matter here: wherever it lies ({about}{where}), batches of {size} take "
        f"at most {longer:.0%} longer to train than the best size would."
    )
    evidence = {**found.evidence, "estimate": found.value, "longer_at_most": longer}
    return dataclasses.replace(
        found, value=NO_MATTER, unit="", confidence="medium", summary=why, evidence=evidence, settle=""
    )


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
