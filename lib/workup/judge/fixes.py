"""Which remedy for an unstable rate (playbook: C8), from paired short trials."""

import pandas as pd

from workup.finding import Finding

#: The playbook's order of trying; the present setting at a lower rate comes last.
ORDER = ("warmup", "clipping", "warmup+clipping", "adam", "lower lr")
RULE = "playbook: C8"
CAVEATS = ("One short trial a fix, at one seed.",)


def judge(trials: pd.DataFrame, *, needed: bool = True) -> Finding:
    """The first remedy, in the playbook's order, that trains stably where nothing did.

    Args:
        trials: columns ``fix`` (one of ``ORDER``, or "nothing" for the rate as it is),
            ``stability`` (its verdict) and ``final`` (loss at the end, lower is better).
        needed: whether the rate in use is itself near the instability. Where it is not, a
            remedy is only worth having if it opens a higher rate to a lower loss: an
            instability matters where it forces a rate that is too small (playbook: C1).

    Returns:
        ``recommended_fix``: "none" where none is worth having; its evidence lists what each
        remedy costs in final loss against the lower rate.

    Example:
        >>> tried = pd.DataFrame({"fix": ["nothing", "warmup", "lower lr"],
        ...     "stability": ["diverged", "stable", "stable"], "final": [9.0, 0.4, 0.5]})
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
    evidence = {fix: {"stability": row.stability, "final": row.final} for fix, row in rows.iterrows()}
    if rows.stability["nothing"] == "stable":
        return Finding(
            name="recommended_fix",
            value="none",
            rule=RULE,
            summary="Training is stable as it is: no fix is needed.",
            confidence="high",
            evidence=evidence,
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
    if not needed:
        works = [
            fix for fix in works if fix != "lower lr" and rows.final[fix] < rows.final.get("lower lr", float("inf"))
        ]
        if not works:
            return Finding(
                name="recommended_fix",
                value="none",
                rule=RULE,
                summary="Higher rates break, but no remedy there ends below the present best rate: nothing to fix.",
                confidence="medium",
                evidence=evidence,
                caveats=CAVEATS,
            )
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
