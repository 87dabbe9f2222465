"""Which clipping threshold do the gradient norms suggest, and is there anything to clip? (playbook: E)"""

from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge import fixes
from workup.judge.given import curve, number

#: An outlier is a norm this many times the typical one, and this many spreads above it, on a log scale.
TIMES, SPREADS = 3.0, 6.0
AGGRESSIVE = "More than half of the updates are clipped: that is a lower learning rate, so lower it (E5)."
RULE = "playbook: E1, E2, E3, E5, E6"


def judge(grad_norm: Any, *, percentile: float = 90) -> Finding:
    """A threshold from the percentile of unclipped gradient norms.

    Args:
        grad_norm: L2 norm of the whole gradient before clipping, one a step, shape [n].
            Non-finite norms are counted, and left out of every statistic.
        percentile: of the finite norms, strictly between 0 and 100 (playbook: E3).

    Returns:
        Finding ``clip_norm`` in the gradient's unit. Evidence: ``clipped_fraction`` (the share
        of the finite norms that it would have clipped), ``outliers``,
        ``outliers_early`` (in the first tenth), ``helps`` (whether there is an outlier for it
        to cut), ``nonfinite``, ``median``, ``largest``.

    Raises:
        ParameterError: a negative norm, a percentile out of range, or no row of numbers.

    Example:
        >>> judge([1.0] * 90 + [20.0] * 10, percentile=80).evidence["outliers"]
        10
    """
    percentile = number(percentile, "clipping.judge: percentile")
    if not 0 < percentile < 100:
        raise ParameterError(f"clipping.judge(percentile={percentile!r}): must lie between 0 and 100.")
    norms = curve(grad_norm, "grad_norm")
    finite = np.isfinite(norms)
    good = norms[finite]
    if np.any(good < 0):
        raise ParameterError(f"clipping.judge: {int(np.sum(good < 0))} gradient norms are negative: a norm is not.")
    nonfinite = int((~finite).sum())
    value = float(np.percentile(good, percentile)) if len(good) else 0.0
    if not value > 0:
        return Finding(
            name="clip_norm",
            value=None,
            rule=RULE,
            summary=f"Of {len(norms)} gradient norms {int((good > 0).sum())} are finite and above 0: too few for the "
            f"{percentile:g}th percentile to be a threshold.",
            confidence="low",
            evidence={"nonfinite": nonfinite, "steps": len(norms), "outliers": 0, "helps": False},
            settle="Record the gradient norm of a run that trains, at a lower learning rate.",
        )
    share = clipped_fraction(norms, value)
    outlying = outliers(norms)
    early = int(outlying[: max(1, len(norms) // 10)].sum())
    count = int(outlying.sum())
    summary = f"Clip at {value:.3g}, the {percentile:g}th percentile of the norms: {share:.0%} of steps are clipped."
    summary += f" It cuts {count} outlying norms, {early} of them in the first tenth."
    if not count:
        summary = f"Leave clipping off: no norm is an outlier. At {value:.3g}, their {percentile:g}th percentile, it "
        summary += f"would touch {share:.0%} of steps and do next to nothing."
    caveats = []
    if share > 0.5:
        caveats.append(AGGRESSIVE)
    if nonfinite:
        caveats.append(f"{nonfinite} norms are not finite; clipping cannot mend those steps, skipping them can.")
    if len(good) < 100:
        caveats.append(f"{len(good)} norms make a rough percentile.")
    return Finding(
        name="clip_norm",
        value=value,
        rule=RULE,
        summary=summary,
        confidence="low" if len(good) < 20 else "medium" if len(good) < 100 or share > 0.5 else "high",
        evidence={
            "percentile": percentile,
            "clipped_fraction": share,
            "outliers": count,
            "outliers_early": early,
            "outliers_mid": count - early,
            "helps": count > 0,
            "nonfinite": nonfinite,
            "steps": len(norms),
            "median": float(np.median(good)),
            "largest": float(good.max()),
        },
        caveats=tuple(caveats),
    )


def threshold(grad_norm: Any, *, percentile: float = 90) -> float | None:
    """The percentile of the finite norms alone; None where there is none above 0 (playbook: E3)."""
    return judge(grad_norm, percentile=percentile).value


def choose(trials: pd.DataFrame, proposed: Finding) -> tuple[Finding, Finding]:
    """``clip_norm`` and ``clipped_fraction`` from trials at lr* and at an unstable rate (playbook: E3, E4, E5).

    Args:
        trials: a row a trial: ``lr, clip_norm`` (NaN unclipped), ``clipped_fraction, stability, final``
            and, where known, ``initial`` (loss before training).
        proposed: what :func:`judge` said of the norms at lr*.

    Returns:
        The loosest threshold that trains the higher rate stably; "none" where that rate is stable without one,
        none tried makes it so, or it is not worth having (``evidence["threshold"]``).
    """
    high = trials[trials["lr"] == trials["lr"].max()]
    open_ = high[high["clip_norm"].isna()]
    held = high[high["clip_norm"].notna() & (high["stability"] == "stable")].sort_values("clip_norm")
    calm = trials[(trials["lr"] < trials["lr"].max()) & trials["clip_norm"].isna()]
    facts = {**proposed.evidence, "proposed": proposed.value, "high_lr": float(trials["lr"].max())}
    value: Any = "none"
    limit, share = None, 0.0
    if len(open_) and (open_["stability"] == "stable").all():
        text = f"Clipping is not needed: lr {facts['high_lr']:.3g} trains stably without."
    elif held.empty:
        text = f"No threshold tried makes lr {facts['high_lr']:.3g} stable: clipping is not the remedy here. A longer "
        text += "warmup may be, or another model (C8)."
    else:
        row = held.iloc[-1]
        limit, share = float(row["clip_norm"]), float(row["clipped_fraction"])
        start = float(row.get("initial", np.nan))
        low = calm["final"].min() if len(calm) else np.nan
        pays = fixes.pays(row["final"], low, start) if np.isfinite(start) else bool(row["final"] < low)
        # Past lr*, clipping is worth having only where it trains lower, or lr*'s own norms have outliers.
        wanted = share <= 0.5 and (pays or bool(proposed.evidence.get("helps")))
        facts |= {"final": float(row["final"]), "peak_lr": facts["high_lr"] if pays else None, "threshold": limit}
        value = limit if wanted else "none"
        text = f"Clipping at {limit:.3g} makes lr {facts['high_lr']:.3g} stable, with {share:.0%} of steps clipped."
        text += "" if wanted else " That rate ends no lower than the best one, so leave clipping off."
    caveats = (AGGRESSIVE,) if share > 0.5 else ()
    common: dict[str, Any] = {"rule": RULE, "caveats": (*proposed.caveats, *caveats), "confidence": "medium"}
    clip = Finding(name="clip_norm", value=value, summary=text, evidence=facts, **common)
    told = f"{share:.0%} of updates are clipped at {limit:.3g}." if limit else "No threshold is to be had."
    return clip, Finding(name="clipped_fraction", value=share, summary=told, evidence={"clip_norm": limit}, **common)


def clipped_fraction(grad_norm: Any, threshold: float) -> float:
    """Share of the finite norms that is above ``threshold``.

    >>> clipped_fraction([1.0, 2.0, float("nan"), 4.0, 1.0], 2.0)
    0.25
    """
    norms = curve(grad_norm, "grad_norm")
    norms = norms[np.isfinite(norms)]
    threshold = number(threshold, "clipping.clipped_fraction: threshold")
    return float(np.mean(norms > threshold)) if len(norms) else 0.0


def outliers(grad_norm: Any, *, window: int = 101) -> np.ndarray:
    """Which norms stand clear of their neighbours' on a log scale, shape [n]; non-finite ones are none."""
    norms = curve(grad_norm, "grad_norm")
    logs = pd.Series(np.log(np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)))
    off = logs - logs.rolling(window, center=True, min_periods=1).median()
    spread = 1.4826 * float(off.abs().median())
    return (off > max(np.log(TIMES), SPREADS * (spread if np.isfinite(spread) else 0.0))).to_numpy()
