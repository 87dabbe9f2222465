"""Which settings end better, by each run's best checkpoint chosen afterwards (playbook: F4)."""

from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding
from workup.judge.difference import WORTH, Difference, compare, mean_interval

RULE = "playbook: F4, D5"
#: A comparison over less than this share of the run is one of starts.
LONG = 0.25
#: The same loss in less than this share of the time is worth a change of settings.
SOONER = 0.9


def judge(runs: pd.DataFrame, *, what: str = "evaluation loss", share: float = 1.0) -> Finding:
    """How much lower the prescribed settings' best evaluation loss is than the present ones'.

    Args:
        runs: columns ``settings`` ("present" or "prescribed"), ``seed``, ``best`` (lowest
            evaluation loss of the run; NaN where it has none), and optionally ``initial`` (loss before
            training), ``best_step`` and ``last`` (where it was best, and the loss it ended with), ``stability``,
            ``examples`` (seen by the run) and ``to_goal`` (seconds until it came near the present settings' best).
        what: ``best`` is the lowest of.
        share: of the whole run's steps, as many as were trained.

    Returns:
        ``improvement``: present minus prescribed, paired by seed, with its 95% interval, and ``matters``
        in its evidence: whether it is over 1% of the descent. That there is none is an answer where the interval
        is surely within that; where it is wider and holds 0, or there are fewer than two pairs, it cannot be told.
        ``time`` and ``time_interval`` are the share of the time in which the prescribed settings get as low as the
        present ones at their best, and ``faster`` says whether that is surely less than all of it.
    """
    wide = runs.pivot_table(index="seed", columns="settings", values="best", dropna=False)
    for group in ("present", "prescribed"):
        if group not in wide:
            wide[group] = np.nan
    pairs = wide.replace([np.inf, -np.inf], np.nan)
    caveats = _caveats(runs, share)
    failed = {group: int(pairs[group].isna().sum()) for group in ("present", "prescribed")}
    pairs = pairs.dropna()
    evidence: dict[str, Any] = {
        "present": wide["present"].tolist(),
        "prescribed": wide["prescribed"].tolist(),
        "seeds": [int(seed) for seed in wide.index],
        "failed_runs": failed,
    }
    if failed["prescribed"] == len(wide):
        summary = f"No run with the prescribed settings gave a finite {what}: keep the present ones."
        return _inconclusive(summary, "Look at the prescribed runs' traces.", evidence)
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
        return _inconclusive("Fewer than two pairs of runs to compare.", "Run at least two seeds of each.", evidence)
    gains = pairs["present"] - pairs["prescribed"]
    start = float(runs["initial"].mean()) if "initial" in runs else float("nan")
    seen = compare(pairs["prescribed"], pairs["present"], start)
    low, high = mean_interval(gains.to_numpy())
    numbers = f"{pairs['prescribed'].mean():.4g} against {pairs['present'].mean():.4g}"
    evidence |= _time(runs)
    evidence |= {"share_of_descent": seen.share, "share_interval": seen.interval, "matters": abs(seen.share) >= WORTH}
    if low <= 0 <= high and not seen.is_conclusive:
        summary = f"No difference that {len(pairs)} seeds can show: best {what} {numbers} as it is now."
        settle = "Run more seeds, or the full number of steps." if share < 1 else "Run more seeds."
        return _inconclusive(summary, settle, {**evidence, "interval": (low, high)}, caveats)
    return Finding(
        name="improvement",
        value=float(gains.mean()),
        unit=what,
        interval=(low, high),
        rule=RULE,
        summary=_sentence(seen, what, numbers) + _sooner(evidence),
        confidence="low" if share < LONG else "high" if len(pairs) >= 5 and share == 1 else "medium",
        evidence=evidence,
        caveats=caveats,
    )


def _time(runs: pd.DataFrame) -> dict[str, Any]:
    """The share of the present settings' time to their best that the prescribed ones take to get as low."""
    if "to_goal" not in runs:
        return {}
    wide = runs.pivot_table(index="seed", columns="settings", values="to_goal", dropna=False)
    logs = np.log((wide["prescribed"] / wide["present"]).to_numpy(float))
    if len(logs) < 2 or not np.isfinite(logs).all():
        return {"faster": False}
    low, high = np.exp(mean_interval(logs))
    share = float(np.exp(logs.mean()))
    return {"time": share, "time_interval": (float(low), float(high)), "faster": bool(high < 1 and share < SOONER)}


def _sooner(evidence: dict[str, Any]) -> str:
    if not evidence.get("faster"):
        return ""
    low, high = evidence["time_interval"]
    return f" It gets as low as today's in {evidence['time']:.0%} of the time ({low:.0%} to {high:.0%})."


def _sentence(seen: Difference, what: str, numbers: str) -> str:
    over = f"{numbers} as it is now, mean of {seen.seeds} seeds"
    if np.isfinite(seen.share) and abs(seen.share) < WORTH:
        return f"No difference that matters at the end: best {what} {over}."
    better = "lower" if seen.share > 0 else "HIGHER"
    share = f", {abs(seen.share):.2g} of the descent" if np.isfinite(seen.share) else ""
    return f"The prescribed settings reach a {better} best {what}: {over}{share}."


def _caveats(runs: pd.DataFrame, share: float) -> tuple[str, ...]:
    """What the best checkpoints alone do not say: short or unstable runs, and runs that saw more data."""
    said = []
    if share < 1:
        said.append(
            f"Trained for {share:.0%} of the run's steps, with a rate meant for all of them: the difference may "
            "shrink, grow or turn over the rest."
        )
    prescribed = runs[runs["settings"] == "prescribed"]
    if "examples" in runs and len(prescribed) < len(runs):
        ratio = prescribed["examples"].mean() / runs[runs["settings"] == "present"]["examples"].mean()
        if not 0.9 < ratio < 1.1:
            said.append(f"Steps are equal: the prescribed runs saw {ratio:.2g} times as many examples.")
    said += _overfit(prescribed)
    if "stability" in runs and (bad := int(prescribed["stability"].isin(["early", "mid", "diverged"]).sum())):
        said.append(f"{bad} of {len(prescribed)} prescribed runs became unstable: take a lower peak_lr.")
    return tuple(said)


def _overfit(runs: pd.DataFrame) -> list[str]:
    if "last" not in runs:
        return []
    worse = runs["last"] - runs["best"]
    over = worse > WORTH * (runs["initial"] - runs["best"]).clip(lower=0)
    if not over.any():
        return []
    best = f"best near step {runs['best_step'][over].median():,.0f}, worse by {worse[over].mean():.2g} at the end"
    return [f"{over.sum()} of {len(runs)} prescribed runs overfit: {best}. Keep the best checkpoint, or stop there."]


def _inconclusive(summary: str, settle: str, evidence: dict, caveats: tuple[str, ...] = ()) -> Finding:
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
