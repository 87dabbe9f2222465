"""Which settings end better, by each run's best checkpoint chosen afterwards (playbook: F4)."""

import math

import numpy as np
import pandas as pd

from workup.finding import Finding

RULE = "playbook: F4, D5"
#: A comparison over less than this share of the run is one of starts.
LONG = 0.25
#: Student's t, two-sided 95%, by degrees of freedom; past the table the normal's 1.96.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of a few values, shape [n >= 2], by Student's t.

    Example:
        >>> [round(v, 3) for v in mean_interval(np.array([1.0, 2.0, 3.0]))]
        [-0.484, 4.484]
    """
    n = len(values)
    half = (_T95[n - 2] if n - 2 < len(_T95) else 1.96) * float(np.std(values, ddof=1)) / math.sqrt(n)
    centre = float(np.mean(values))
    return centre - half, centre + half


def judge(runs: pd.DataFrame, *, what: str = "evaluation loss", share: float = 1.0) -> Finding:
    """How much lower the prescribed settings' best evaluation loss is than the present ones'.

    Args:
        runs: columns ``settings`` ("present" or "prescribed"), ``seed``, ``best`` (lowest
            evaluation loss of the run; NaN where it has none), and optionally ``stability``
            and ``examples`` (seen by the run).
        what: ``best`` is the lowest of.
        share: of the whole run's steps, as many as were trained.

    Returns:
        ``improvement``: present minus prescribed, paired by seed, with its 95% interval;
        cannot tell where the interval holds 0 or there are fewer than two pairs.
    """
    wide = runs.pivot_table(index="seed", columns="settings", values="best", dropna=False)
    for group in ("present", "prescribed"):
        if group not in wide:
            wide[group] = np.nan
    pairs = wide.replace([np.inf, -np.inf], np.nan)
    caveats = _caveats(runs, share)
    failed = {group: int(pairs[group].isna().sum()) for group in ("present", "prescribed")}
    pairs = pairs.dropna()
    evidence = {
        "present": wide["present"].tolist(),
        "prescribed": wide["prescribed"].tolist(),
        "seeds": [int(seed) for seed in wide.index],
        "failed_runs": failed,
    }
    if failed["prescribed"] == len(wide):
        summary = f"No run with the prescribed settings gave a finite {what}: keep the present ones."
        return _cannot(summary, "Look at the prescribed runs' traces.", evidence)
    if failed["present"] == len(wide):
        return Finding(
            name="improvement",
            value=float("inf"),
            rule=RULE,
            summary="The present settings never train; the prescribed ones do.",
            confidence="high",
            evidence=evidence,
        )
    if len(pairs) < 2:
        return _cannot("Fewer than two pairs of runs to compare.", "Run at least two seeds of each.", evidence)
    gains = (pairs["present"] - pairs["prescribed"]).to_numpy()
    low, high = mean_interval(gains)
    gain = float(gains.mean())
    numbers = f"{pairs['prescribed'].mean():.4g} against {pairs['present'].mean():.4g}"
    if low <= 0 <= high:
        summary = f"No difference that {len(pairs)} seeds can show: best {what} {numbers} as it is now."
        settle = "Run more seeds, or the full number of steps." if share < 1 else "Run more seeds."
        return _cannot(summary, settle, {**evidence, "interval": (low, high)}, caveats)
    better = "lower" if gain > 0 else "HIGHER"
    return Finding(
        name="improvement",
        value=gain,
        unit=what,
        interval=(low, high),
        rule=RULE,
        summary=f"The prescribed settings reach a {better} best {what}: {numbers} as it is now.",
        confidence="low" if share < LONG else "high" if len(pairs) >= 5 else "medium",
        evidence=evidence,
        caveats=caveats,
    )


def _caveats(runs: pd.DataFrame, share: float) -> tuple[str, ...]:
    """What the best checkpoints alone do not say: short or unstable runs, and runs that saw more data."""
    said = []
    if share < 1:
        said.append(f"Trained for {share:.0%} of the run's steps: the difference may shrink or turn over the rest.")
    prescribed = runs[runs["settings"] == "prescribed"]
    if "examples" in runs and len(prescribed) < len(runs):
        ratio = prescribed["examples"].mean() / runs[runs["settings"] == "present"]["examples"].mean()
        if not 0.9 < ratio < 1.1:
            said.append(f"Steps are equal: the prescribed runs saw {ratio:.2g} times as many examples.")
    if "stability" in runs and (bad := int(prescribed["stability"].isin(["early", "mid", "diverged"]).sum())):
        said.append(f"{bad} of {len(prescribed)} prescribed runs became unstable: take a lower peak_lr.")
    return tuple(said)


def _cannot(summary: str, settle: str, evidence: dict, caveats: tuple[str, ...] = ()) -> Finding:
    return Finding(
        name="improvement",
        value=None,
        rule=RULE,
        summary=summary,
        confidence="low",
        evidence=evidence,
        settle=settle,
        caveats=caveats,
    )
