"""How short a warmup opens learning rates far above the unstable one? (playbook: D)"""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge.difference import Difference, compare
from workup.judge.given import curve as row
from workup.judge.given import frame, number
from workup.judge.sweep import stuck, trials_table

#: A trial trains if it makes this share of the best loss reduction among the trials.
TRAINED = 0.5
#: A ramp's trials are long: by then the curve that goes on has left most of the gap behind it.
FALL = 0.25
RULE = "playbook: D2, D4, D6"


def judge(
    trials: Any,
    *,
    baseline: float | None = None,
    baseline_lr: float | None = None,
    curve: Any = None,
    unstable_lr: float | None = None,
    max_train_steps: int | None = None,
) -> Finding:
    """The shortest warmup that makes a peak learning rate trainable.

    Args:
        trials: a table, a row a trial: ``warmup_steps, lr`` (the peak), ``seed, status, final``;
            optionally ``initial`` (the loss before training) or ``loss`` (the curve). Rows with
            ``warmup_steps`` 0 tell what happens without. Where trials failed for another reason than their
            rate (``status``, ``reason``), that no warmup is needed, or enough, cannot be told.
        baseline: final loss over the same steps of the best run without warmup; tells whether it pays.
        baseline_lr: its rate, for the wording.
        curve: its losses, shape [steps]; a trial that sticks on a plateau where it goes on does not train.
        unstable_lr: unstable_base_learning_rate, for the wording (playbook: D1).
        max_train_steps: of the real run; its 5% and 10% are the marks (playbook: D4, D6).

    Returns:
        Finding ``warmup_steps``. 0 with ``needed`` False: the peak trains without. 0 with
        ``enough`` False: no warmup tried is enough. ``evidence["peak_lr"]`` is the peak it
        opens, where that is worth having, else None. None where nothing was tried.

    Raises:
        ParameterError: a missing column, a learning rate or warmup_steps out of range.
    """
    given = frame(trials, "warmup.judge")
    table = trials_table(given, "warmup.judge", extra=("warmup_steps",))
    odd = table["warmup_steps"][~(table["warmup_steps"].between(0, 2**53) & (table["warmup_steps"] % 1 == 0))]
    if len(odd):
        raise ParameterError(f"warmup.judge: warmup_steps={odd.iloc[0]:g}: give whole numbers of steps, 0 for none.")
    if baseline is not None:
        # A trial at lr* that did not end finite is none to compare with.
        (baseline,) = [float(b) if np.isfinite(b) else None for b in row([baseline], "warmup.judge: baseline")]
    if max_train_steps is not None:
        max_train_steps = int(number(max_train_steps, "warmup.judge: max_train_steps", least=1))
    table["feasible"] = _trains(table, baseline, None if curve is None else row(curve, "warmup.judge: curve"))
    without = f"the best rate without warmup ({baseline_lr:.3g})" if baseline_lr else "the best rate without warmup"
    found = _judge(table, baseline, without, unstable_lr, max_train_steps)
    failed = (
        given[~given["status"].fillna("finished").isin(["finished", "diverged"])] if "status" in given else given[:0]
    )
    if failed.empty or found.value:
        return found
    explained = "reason" in failed and pd.notna(failed["reason"].iloc[0])
    why = failed["reason" if explained else "status"].iloc[0]
    return dataclasses.replace(
        found,
        value=None,
        summary=f"How much warmup is needed cannot be told: {len(failed)} of {len(given)} trials failed ({why}).",
        confidence="low",
        settle="Mend what failed, and run it again: what did train is kept.",
    )


def confirm(found: Finding, paid: Difference | None, peak: Finding | None) -> Finding:
    """``warmup_steps`` once it was compared over seeds, and the rate found once more with the ramp in place (D5).

    Args:
        found: from :func:`judge`. paid: the ramp's end beside the best rate without one, over seeds; None where
            none was worth comparing. peak: ``peak_lr`` with the ramp, of the whole run; None where it does not pay.
    """
    if not found.value or paid is None:
        return found
    seen = {"share": paid.share, "share_interval": paid.interval, "seeds": paid.seeds}
    ends = paid.words("the best rate without warmup")
    if not paid.matters or peak is None:
        text = f"No warmup is needed: {found.value} steps open lr {found.evidence['peak_lr']:.3g}, but it ends {ends}."
        facts = {**found.evidence, **seen, "peak_lr": None, "needed": False, "opens_with": found.value}
        because = "the rates that it opens end no lower"
        return dataclasses.replace(found, value=0, interval=None, summary=text, evidence=facts, because=because)
    if not peak.is_conclusive:
        settle = f"{peak.summary} {peak.settle}"
        text = (
            f"{found.value} steps of warmup pay in a short run, but with which rate over the whole one cannot be told."
        )
        facts = {**found.evidence, **seen, "peak_lr": None}
        return dataclasses.replace(found, value=None, summary=text, evidence=facts, confidence="low", settle=settle)
    facts = {**found.evidence, **seen, "opened_lr": found.evidence["peak_lr"], "peak_lr": peak.value}
    facts |= {"peak_interval": peak.interval, "peak_confidence": peak.confidence}
    text = f"{found.value} steps of warmup make lr {found.evidence['peak_lr']:.3g} trainable; it ends {ends}."
    text += f" {peak.summary}"
    because = f"opens a higher rate, which ends {ends}"
    return dataclasses.replace(found, summary=text, evidence=facts, because=because)


def _judge(
    table: pd.DataFrame, baseline: float | None, without: str, unstable_lr: float | None, max_steps: int | None
) -> Finding:
    if table.empty:
        return _finding(None, "No trial was run, so no warmup can be told.", settle="Run a sweep of warmup lengths.")
    by = table.groupby(["lr", "warmup_steps"]).agg(share=("feasible", "mean"), final=("final", "median")).reset_index()
    open_ = by[by["share"] > 0.5]
    tried: dict[str, Any] = {
        "tried": by["warmup_steps"].astype(int).unique().tolist(),
        "unstable_lr": unstable_lr,
        "baseline": baseline,
    }
    peaks = ", ".join(f"{lr:.3g}" for lr in sorted(by["lr"].unique()))
    if open_.empty:
        text = (
            f"No warmup up to {int(by['warmup_steps'].max())} steps opens lr {peaks}: where the best rate without is "
        )
        text += "too low, clip, or change the model (C8)."
        because = "no ramp tried opens a higher rate"
        return _finding(0, text, **tried, needed=True, enough=False, peak_lr=None, because=because)
    # The highest peak that any warmup opened; past it, nothing more can be had.
    peak = float(open_["lr"].max())
    rows = open_[open_["lr"] == peak].sort_values("warmup_steps")
    start = float(table["initial"].median())

    def beside(final: float) -> Difference | None:
        return None if baseline is None else compare(final, baseline, start)

    # The shortest ramp that trains and pays; where none pays, the shortest that trains.
    gains = [beside(final) for final in rows["final"]]
    pays = [gain is not None and gain.matters for gain in gains]
    paying = rows[np.array(pays, bool) & (rows["warmup_steps"] > 0)]
    row = (paying if len(paying) else rows).iloc[0]
    steps, final = int(row["warmup_steps"]), float(row["final"])
    facts = {**tried, "final": final, "trains_peak_lr": peak, "enough": True}
    shorter = by[(by["lr"] == peak) & (by["warmup_steps"] < steps)]["warmup_steps"]
    interval = (float(shorter.max()), float(steps)) if len(shorter) else None
    gain = beside(final)
    if steps == 0:
        text = f"No warmup is needed: lr {peak:.3g} trains without"
        if len(rows) > 1:
            ramped = compare(rows["final"].iloc[1:].min(), final, start)
            text += f", and a run with a ramp ends {ramped.words('one without')}"
        more = f"No ramp tried opens a higher rate than {peak:.3g}." if peak < by["lr"].max() else ""
        because = "no rate ends lower with a ramp than without"
        return _finding(0, f"{text}. {more}".strip(), **facts, needed=False, peak_lr=None, because=because)
    if gain is not None and not gain.matters:
        text = f"No warmup is needed: {steps} steps open lr {peak:.3g}, but it ends {gain.words(without)}."
        because = "the rates that it opens end no lower"
        return _finding(0, text, **facts, needed=False, opens_with=steps, peak_lr=None, because=because)
    caveats = []
    if max_steps and steps > 0.05 * max_steps:
        caveats.append(f"That is over 5% of {max_steps} steps: max_train_steps may have to grow (D6).")
    if interval is None:
        caveats.append("No shorter warmup was tried.")
    lower = f"; it ends {gain.words(without)}" if gain is not None else ""
    text = f"{steps} steps of warmup are the shortest tried that make lr {peak:.3g} trainable{lower}."
    return _finding(steps, text, **facts, needed=True, peak_lr=peak, interval=interval, caveats=tuple(caveats))


def _trains(table: Any, baseline: float | None, curve: Any) -> Any:
    """Finished, finite, with at least half of the best loss reduction where a start is known, and on no plateau."""
    ok = table["trained"].to_numpy(bool)
    start = table["initial"].to_numpy(float)
    best = (
        np.nanmin(np.append(table["final"][ok].to_numpy(float), np.nan if baseline is None else baseline))
        if ok.any()
        else np.nan
    )
    enough = table["final"].to_numpy(float) <= start - TRAINED * (start - best)
    ok = ok & np.where(np.isfinite(start) & np.isfinite(best), enough, True)
    if curve is not None and baseline is not None:
        ok = ok & [
            not stuck(loss, curve, first - baseline, FALL) for loss, first in zip(table["loss"], start, strict=True)
        ]
    return ok


def _finding(value: int | None, summary: str, *, settle: str = "", because: str = "", **evidence: Any) -> Finding:
    interval, caveats = evidence.pop("interval", None), evidence.pop("caveats", ())
    return Finding(
        name="warmup_steps",
        value=value,
        unit="steps",
        rule=RULE,
        summary=summary,
        interval=interval,
        confidence="low" if value is None else "medium",
        evidence={"peak_lr": None, **evidence},
        caveats=caveats,
        settle=settle,
        because=because,
    )
