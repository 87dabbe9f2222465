"""Which clipping threshold do the gradient norms suggest, and is there anything to clip? (playbook: E)"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge.difference import Difference, compare
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


def touched(grad_norm: Any, doubled: Any, percentiles: tuple[float, ...]) -> dict[str, dict[str, float]]:
    """What each percentile of the norms would clip: the threshold, and the share of steps at the rate and at twice it.

    >>> touched([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0], (50,))
    {'50': {'threshold': 2.5, 'share': 0.5, 'share_at_double': 0.75}}
    """
    limits = {p: threshold(grad_norm, percentile=p) for p in percentiles}
    return {
        f"{p:g}": {
            "threshold": limit,
            "share": clipped_fraction(grad_norm, limit),
            "share_at_double": clipped_fraction(doubled, limit),
        }
        for p, limit in limits.items()
        if limit is not None
    }


def choose(
    trials: pd.DataFrame,
    proposed: Finding,
    *,
    touched: Mapping[str, Any] | None = None,
    paid: Difference | None = None,
    peak: Finding | None = None,
) -> tuple[Finding, Finding]:
    """``clip_norm`` and ``clipped_fraction`` from trials at the prescribed rate and above (playbook: E3, E4, E5).

    Args:
        trials: a row a trial: ``lr, clip_norm`` (NaN unclipped), ``clipped_fraction, stability, final, initial``
            (loss before training), at the prescribed rate and at a higher one, usually twice it.
        proposed: what :func:`judge` said of the norms at the prescribed rate.
        touched: what each percentile would clip, from :func:`touched`.
        paid: the higher rate clipped beside the best rate unclipped, over seeds, where that was compared.
        peak: ``peak_lr`` of the whole run with the threshold in place, where that was found.

    Returns:
        A threshold only where it does something: the loosest that makes an unstable one of the two rates stable,
        or one that lowers the final loss at the prescribed rate. Else "none".
    """
    rates = {"this": float(trials["lr"].min()), "double": float(trials["lr"].max())}
    at = {which: trials[trials["lr"] == lr] for which, lr in rates.items()}
    broken = {w: not rows.loc[rows["clip_norm"].isna(), "stability"].eq("stable").all() for w, rows in at.items()}
    held = {w: rows[rows["clip_norm"].notna() & (rows["stability"] == "stable")] for w, rows in at.items()}
    held = {w: rows.sort_values("clip_norm", ascending=False) for w, rows in held.items()}
    facts = {**proposed.evidence, "proposed": proposed.value, "high_lr": rates["double"], "peak_lr": None}
    facts |= {"touched": dict(touched or {})}
    this, double = f"lr {rates['this']:.3g}", f"{rates['double']:.3g}"
    cured = next((w for w in at if broken[w]), None)
    row, because = None, "nothing to clip at this rate or above"
    if cured is None:
        gain = _lower(at["this"])
        row = held["this"].iloc[0] if gain is not None and gain.matters and len(held["this"]) else None
        text = f"No clipping is needed: {this} and {double} train stably without{_touching(touched)}."
        if row is not None and gain is not None:
            text = f"Clipping at {row['clip_norm']:.3g} ends {gain.words('the same rate unclipped')}."
            because = f"ends {gain.words('the same rate unclipped')}"
    elif held[cured].empty:
        text = f"No threshold tried makes lr {rates[cured]:.3g} stable: clipping is not the remedy here. A longer "
        text += "warmup may be, or another model (C8)."
        because = "no threshold tried makes a higher rate stable"
    else:
        row = held[cured].iloc[0]
        breaks = "this rate breaks" if cured == "this" else f"{double}, above it, breaks"
        because = f"{breaks} without it and trains with it"
        text = f"Clipping at {row['clip_norm']:.3g} makes lr {rates[cured]:.3g} stable, which breaks without."
        if paid is not None:
            text += f" It ends {paid.words('the best calm rate unclipped')}."
            facts |= {"share": paid.share, "share_interval": paid.interval, "seeds": paid.seeds}
        if peak is not None and peak.is_conclusive:
            facts |= {"peak_lr": peak.value, "peak_interval": peak.interval, "peak_confidence": peak.confidence}
            text += f" {peak.summary}"
            because = "opens a higher rate, which trains lower"
    limit = None if row is None else float(row["clip_norm"])
    known = [t["share"] for t in (touched or {}).values() if limit and abs(t["threshold"] / limit - 1) < 0.01]
    share = 0.0 if row is None else known[0] if known else float(row["clipped_fraction"])
    caveats = (*proposed.caveats, *((AGGRESSIVE,) if share > 0.5 else ()))
    common: dict[str, Any] = {"rule": RULE, "confidence": "medium", "caveats": caveats}
    clip = Finding(name="clip_norm", value=limit or "none", summary=text, evidence=facts, because=because, **common)
    clips = f"{share:.0%} of updates are clipped at {limit:.3g}." if limit else "Nothing is clipped."
    return clip, Finding(name="clipped_fraction", value=share, summary=clips, evidence={"clip_norm": limit}, **common)


def _lower(rows: pd.DataFrame) -> Difference | None:
    """How much lower the loosest clipped trial of one rate ends than the unclipped one."""
    free, clipped = rows[rows["clip_norm"].isna()], rows[rows["clip_norm"].notna()].sort_values("clip_norm")
    if free.empty or clipped.empty or "initial" not in rows:
        return None
    return compare(clipped["final"].iloc[-1], free["final"].iloc[0], float(free["initial"].iloc[0]))


def _touching(touched: Mapping[str, Any] | None) -> str:
    each = [f"{p}th percentile {t['share']:.0%} and {t['share_at_double']:.0%}" for p, t in (touched or {}).items()]
    return f". A threshold would clip these shares of the steps at the two: {', '.join(each)}" if each else ""


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
