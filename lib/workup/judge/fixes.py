"""Which remedy for an unstable rate (playbook: C8), from paired short trials."""

import pandas as pd

from workup.finding import Finding

#: The playbook's order of trying; the present setting at a lower rate comes last.
ORDER = ("warmup", "clipping", "warmup+clipping", "adam", "lower lr")
RULE = "playbook: C8"
CAVEATS = ("One short trial a fix, at one seed.",)


#: A lower final loss is worth a change of settings from this share of the loss reduction on.
WORTH = 0.01


def pays(final: float, instead_of: float, initial: float) -> bool:
    """Whether ending at ``final`` is worth a change: lower by at least ``WORTH`` of what training gains.

    >>> pays(0.10, 0.20, 2.3), pays(0.001, 0.002, 2.3)
    (True, False)
    """
    return instead_of - final >= WORTH * abs(initial - instead_of)


def judge(trials: pd.DataFrame) -> Finding:
    """The first remedy, in the playbook's order, that trains stably where nothing did, and pays.

    An instability only matters where it forces a rate that is too small (playbook: C1), so a
    remedy must also end lower than the present best rate does without it.

    Args:
        trials: columns ``fix`` (one of ``ORDER``, or "nothing" for the rate as it is),
            ``stability`` (its verdict), ``final`` (loss at the end, lower is better) and
            ``initial`` (loss before training).

    Returns:
        ``recommended_fix``: "none" where none is worth having; its evidence lists how each
        remedy ended.

    Example:
        >>> tried = pd.DataFrame({"fix": ["nothing", "warmup", "lower lr"],
        ...     "stability": ["diverged", "stable", "stable"], "final": [9.0, 0.4, 0.5], "initial": 2.3})
        >>> judge(tried).value
        'warmup'
    """
    rows = trials.set_index("fix")
    if "nothing" not in rows.index:
        return Finding(
            name="recommended_fix",
            value=None,
            rule=RULE,
            summary="No trial at the unstable rate was given.",
            confidence="low",
            settle="Run the rate as it is, and each fix, with equal seeds and batches.",
        )
    evidence = {str(fix): {"stability": row.stability, "final": row.final} for fix, row in rows.iterrows()}
    if rows.stability["nothing"] == "stable":
        return Finding(
            name="recommended_fix",
            value="none",
            rule=RULE,
            summary="Training is stable as it is: no fix is needed.",
            confidence="high",
            evidence=evidence,
        )
    if rows.stability["nothing"] == "cannot_tell":
        return Finding(
            name="recommended_fix",
            value=None,
            rule=RULE,
            summary="Whether training is stable as it is cannot be told, so no fix can be judged.",
            confidence="low",
            evidence=evidence,
            settle="Train longer.",
        )
    tried = [fix for fix in ORDER if fix in rows.index]
    works = [fix for fix in tried if rows.stability[fix] == "stable"]
    if not works:
        return Finding(
            name="recommended_fix",
            value="architecture",
            rule=RULE,
            summary=f"None of {', '.join(tried)} restored stable training: look at normalisation, residual "
            "connections and their initialisation.",
            confidence="medium",
            evidence=evidence,
        )
    low = rows.final.get("lower lr", float("inf"))
    worth = [fix for fix in works if fix != "lower lr" and pays(rows.final[fix], low, rows.initial["nothing"])]
    if "lower lr" in rows.index and not worth:
        restored = ", ".join(fix for fix in works if fix != "lower lr") or "No remedy"
        return Finding(
            name="recommended_fix",
            value="none",
            rule=RULE,
            summary=f"{restored} restores stable training at the higher rate, but ends no lower than lr* as it is.",
            confidence="medium",
            evidence={**evidence, "restored": works},
            caveats=CAVEATS,
        )
    works = worth or works
    chosen = works[0]
    least = min(works, key=lambda fix: rows.final[fix])
    note = "" if least == chosen else f" The lowest final loss came with {least} ({rows.final[least]:.3g})."
    return Finding(
        name="recommended_fix",
        value=chosen,
        rule=RULE,
        summary=f"{chosen} restores stable training (final loss {rows.final[chosen]:.3g}).{note}",
        confidence="medium",
        evidence={**evidence, "restored": works},
        caveats=CAVEATS,
    )
