"""Which remedy for an unstable rate (playbook: C8), from paired short trials."""

from typing import Any

import pandas as pd

from workup.finding import Finding
from workup.judge.difference import Difference, compare

#: The playbook's order of trying; the present setting at a lower rate comes last.
ORDER = ("warmup", "clipping", "warmup+clipping", "adam", "pre-norm", "zero-init", "lower lr")
RULE = "playbook: C8"
ONE_SEED = "One short trial a fix, at one seed."


def judge(trials: pd.DataFrame, *, advice: str = "", beside: Difference | None = None) -> Finding:
    """The first remedy, in the playbook's order, that trains stably where nothing did, and pays.

    An instability only matters where it forces a rate that is too small (playbook: C1), so a
    remedy must also end lower than the best calm rate does without it.

    Args:
        trials: columns ``fix`` (one of ``ORDER``, or "nothing" for the rate as it is),
            ``stability`` (its verdict), ``final`` (loss at the end, lower is better) and
            ``initial`` (loss before training); ``times``, the multiple of the rate at hand, where more than
            one unstable rate was tried: the lowest decides, and the highest is reported beside it.
        advice: what an audit of the model found, for where no remedy helps.
        beside: how the remedy that this says ends beside the best calm rate over several seeds; where it does
            not matter there, none is recommended.

    Returns:
        ``recommended_fix``: "none" where none is worth having; its evidence lists how each
        remedy ended, at each multiple.

    Example:
        >>> tried = pd.DataFrame({"fix": ["nothing", "warmup", "lower lr"],
        ...     "stability": ["diverged", "stable", "stable"], "final": [9.0, 0.4, 0.5], "initial": 2.3})
        >>> judge(tried).value
        'warmup'
    """
    if "times" not in trials:
        trials = trials.assign(times=1.0)
    multiples = trials.times[trials.fix == "nothing"]
    if multiples.empty:
        what = "No trial at the unstable rate was given."
        return _inconclusive(what, "Run the rate as it is, and each fix, with equal seeds and batches.", {})
    at = {times: _at(trials, times) for times in (multiples.min(), multiples.max())}
    rows, high = at[multiples.min()], at[multiples.max()]
    evidence: dict[str, Any] = {f"at {times:g} times the rate": _ends(table) for times, table in at.items()}
    if rows.stability["nothing"] == "stable":
        return _finding("none", "Training is stable as it is: no fix is needed.", evidence, confidence="high")
    if rows.stability["nothing"] == "cannot_tell":
        what = "Whether training is stable as it is cannot be told, so no fix can be judged."
        return _inconclusive(what, "Train longer.", evidence)
    tried = [fix for fix in ORDER if fix in rows.index]
    works = [fix for fix in tried if rows.stability[fix] == "stable"]
    if not works:
        look = f"the model has {advice}" if advice else "look at normalisation, residual connections, initialisation"
        return _finding("architecture", f"None of {', '.join(tried)} restored stable training: {look}.", evidence)
    evidence |= {"restored": works, "restored_at_highest": [fix for fix in works if high.stability[fix] == "stable"]}
    low, start = rows.final.get("lower lr", float("inf")), rows.initial["nothing"]
    cures = [fix for fix in works if fix != "lower lr"]
    gains = {fix: compare(rows.final[fix], low, start) for fix in cures}
    worth = [fix for fix in cures if gains[fix].matters]
    if "lower lr" in rows.index and not cures:
        has = f" The model has {advice}." if advice else ""
        return _finding("none", f"No remedy restores stable training at the higher rate.{has}", evidence)
    if "lower lr" in rows.index and not worth:
        best = max(cures, key=lambda fix: gains[fix].share)
        text = f"{', '.join(cures)} {'restores' if len(cures) == 1 else 'restore'} stable training at the higher rate, "
        text += f"but a lower rate needs none: with {best} it ends {gains[best].words('the best calm rate')}."
        return _finding("none", text, evidence, caveats=(ONE_SEED,))
    works = worth or works
    chosen, least = works[0], min(works, key=lambda fix: rows.final[fix])
    rate = f" at its own lr of {rows.lr[chosen]:.3g}" if chosen == "adam" and "lr" in rows else ""
    if beside is not None and not beside.matters:
        text = f"{chosen}{rate} restores stable training at the higher rate, but it ends "
        return _finding("none", f"{text}{beside.words('the best calm rate')}.", evidence)
    text = f"{chosen}{rate} restores stable training"
    if chosen in gains:
        text += f" and ends {(beside or gains[chosen]).words('the best calm rate')}"
    if len(at) > 1 and chosen != "lower lr":
        holds = "too" if high.stability[chosen] == "stable" else "not"
        text += f"; at {multiples.max():g} times the rate it does {holds}"
    note = "" if least == chosen else f" The lowest final loss came with {least} ({rows.final[least]:.3g})."
    return _finding(chosen, f"{text}.{note}", evidence, caveats=(ONE_SEED,) if beside is None else ())


def _at(trials: pd.DataFrame, times: float) -> pd.DataFrame:
    """The remedies tried at one multiple of the rate, and the best calm rate as it is, by fix."""
    return trials[(trials.times == times) | (trials.fix == "lower lr")].set_index("fix")


def _ends(rows: pd.DataFrame) -> dict[str, Any]:
    return {str(fix): {"stability": row.stability, "final": row.final} for fix, row in rows.iterrows()}


def _finding(value: str, text: str, evidence: Any, confidence: str = "medium", **more: Any) -> Finding:
    return Finding(
        name="recommended_fix", value=value, rule=RULE, summary=text, confidence=confidence, evidence=evidence, **more
    )


def _inconclusive(text: str, settle: str, evidence: Any) -> Finding:
    return Finding(
        name="recommended_fix",
        value=None,
        rule=RULE,
        summary=text,
        confidence="low",
        evidence=evidence,
        settle=settle,
    )
