"""Which clipping threshold (playbook: E1-E6): the norms, their percentile, the trial with it, tightened."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.experiments import instability
from workup.experiments.learning_rate import again, at, final_loss, initial_loss
from workup.experiments.pairs import over_seeds
from workup.experiments.session import Session
from workup.finding import Finding
from workup.judge import clipping as judge
from workup.judge.difference import Difference
from workup.trace import Trace, Trial

BUDGET = {"smoke": {"steps": 120}, "standard": {"steps": 500}, "thorough": {"steps": 2000}}
#: From the 90th percentile downwards (playbook: E3, E4).
PERCENTILES = (90, 75, 50)


def plan(session: Session) -> list[Trial]:
    """Unclipped, with the warmup prescribed: the prescribed rate, whose norms set the threshold, and twice it."""
    lr = session.resolve_parameter("lr", setting="peak_lr")
    high = session.resolve_parameter("high_lr", fallback=2 * lr)
    size = session.resolve_parameter("batch_size", setting="batch_size")
    ramp = session.resolve_parameter("warmup_steps", setting="warmup_steps")
    wanted = session.resolve_parameter("steps", fallback=BUDGET[session.budget]["steps"])
    steps = min(max(int(wanted), 2 * ramp), session.workload.max_train_steps)
    base = Trial(
        lr=float(f"{lr:.6g}"),
        steps=steps,
        batch_size=int(size),
        warmup_steps=min(ramp, steps),
        seed=session.seed,
        eval_every=1 if session.workload.eval_data is not None else 0,
        eval_examples=int(instability.BUDGET[session.budget]["eval_examples"]),
    )
    return [base, at(base, high)]


def plan_clipped(session: Session, traces: list[Trace]) -> list[Trial]:
    """The prescribed rate clipped at the threshold; a rate that is not stable clipped ever tighter (E3, E4)."""
    calm = traces[0]
    thresholds = [judge.threshold(calm.steps.grad_norm, percentile=p) for p in PERCENTILES]
    if session.knobs.get("clip_norm"):
        thresholds = [session.resolve_parameter("clip_norm", fallback=None)]
    limits = list(dict.fromkeys(float(f"{t:.4g}") for t in thresholds if t is not None and t > 0))
    tried = [(trace, limits) for trace in traces if instability.verdict(trace).value not in instability.NOT_SHAKY]
    tried = tried if calm in [trace for trace, _ in tried] else [(calm, limits[:1]), *tried]
    return [dataclasses.replace(trace.trial, clip_norm=limit) for trace, each in tried for limit in each]


def plan_open(session: Session, traces: list[Trace]) -> dict[str, Trial]:
    """What the playbook leaves open (E6), at the high rate, by name; only on ``thorough``, and with norms to clip at.

    A fixed percentile against a running one; clipping during a warmup, or only after it.
    """
    calm, high = traces
    limit = session.knobs.get("clip_norm") or judge.threshold(calm.steps.grad_norm, percentile=PERCENTILES[0])
    if session.budget != "thorough" or not limit:
        return {}
    fixed = {"clip_norm": float(f"{limit:.4g}")}
    ramp = {"warmup_steps": max(1, high.trial.steps // 10)}
    settings: dict[str, dict[str, Any]] = {
        "fixed": fixed,
        "adaptive": {"clip_percentile": PERCENTILES[0]},
        "warmup alone": ramp,
        "warmup, clipped throughout": ramp | fixed,
        "warmup, clipped after it": ramp | fixed | {"clip_from": ramp["warmup_steps"]},
    }
    return {how: dataclasses.replace(high.trial, **changes) for how, changes in settings.items()}


def open_table(questions: Mapping[str, Trial], traces: list[Trace]) -> pd.DataFrame:
    """A row per way of clipping: how, clipped_fraction, stability, final, status."""
    rows = table(traces).assign(how=list(questions))
    return rows[["how", "clipped_fraction", "stability", "final", "status"]]


def _answers(opened: pd.DataFrame) -> tuple[str, ...]:
    """What was measured on each open question, a sentence each; none where nothing was."""
    ends = {
        row["how"]: row["stability"].replace("_", " ")
        + f", final loss {row['final']:.3g}" * bool(np.isfinite(row["final"]))
        for row in opened.to_dict("records")
    }
    if not ends:
        return ()
    ramp = [f"{how.removeprefix('warmup, ')}: {end}" for how, end in ends.items() if how.startswith("warmup, ")]
    return (
        f"An adaptive threshold, the {PERCENTILES[0]}th percentile of the last norms: {ends['adaptive']}; "
        f"the fixed one: {ends['fixed']} (E6).",
        f"With a warmup, {'; '.join(ramp)}; not clipped: {ends['warmup alone']} (E6).",
    )


def table(traces: list[Trace]) -> pd.DataFrame:
    """A row per trace: lr, clip_norm (NaN unclipped), clipped_fraction, stability, initial, final, status."""
    return pd.DataFrame(
        {
            "lr": [t.trial.lr for t in traces],
            "clip_norm": [float("nan") if t.trial.clip_norm is None else t.trial.clip_norm for t in traces],
            "clipped_fraction": [float(t.steps.clipped.mean()) if len(t.steps) else float("nan") for t in traces],
            "stability": [instability.verdict(t).value for t in traces],
            "initial": [initial_loss(t) for t in traces],
            "final": [final_loss(t) for t in traces],
            "status": [t.status for t in traces],
        }
    )


def raised(traces: list[Trace], clipped: list[Trace]) -> Trial | None:
    """The higher rate with the loosest threshold that makes it stable where it breaks without; None where none does."""
    rows = table([*traces, *clipped])
    if rows.stability[1] in instability.NOT_SHAKY:
        return None
    stable = [trace.trial for trace, verdict in zip(clipped, rows.stability[2:], strict=True) if verdict == "stable"]
    held = [trial for trial in stable if trial.lr == traces[1].trial.lr]
    return max(held, key=lambda trial: trial.clip_norm or 0.0, default=None)


def beside(session: Session, traces: list[Trace], clipped: list[Trace]) -> Difference | None:
    """How that ends beside the prescribed rate unclipped, over seeds; None where no threshold opens the higher one."""
    trial = raised(traces, clipped)
    return over_seeds(session, trial, traces[0].trial) if trial else None


def rate_again(session: Session, trial: Trial | None, paid: Difference | None) -> Finding | None:
    """The rate to train the whole run with once that threshold is in place; None where it does not pay."""
    return again(session, trial) if trial and paid and paid.matters else None


def named(unclipped: list[Trace], clipped: list[Trace]) -> dict[str, Trace]:
    """The prescribed rate, and the higher one by what it was clipped at, for a figure."""
    calm, high = unclipped
    above = [trace for trace in clipped if trace.trial.lr == high.trial.lr]
    held = {f"clipped at {trace.trial.clip_norm:.3g}": trace for trace in above}
    return {f"lr {calm.trial.lr:.3g}, unclipped": calm, f"lr {high.trial.lr:.3g}, unclipped": high, **held}


def conclude(
    session: Session,
    traces: list[Trace],
    clipped: list[Trace],
    opened: pd.DataFrame,
    paid: Difference | None = None,
    peak: Finding | None = None,
) -> tuple[Finding, ...]:
    """clip_norm and clipped_fraction: from the norms, then corrected by what the trials showed.

    Args:
        paid: from :func:`beside`. peak: from :func:`rate_again`.
    """
    norms = [trace.steps.grad_norm for trace in traces]
    touched = judge.touched(norms[0], norms[1], PERCENTILES)
    proposed = judge.judge(norms[0])
    clip, share = judge.choose(table([*traces, *clipped]), proposed, touched=touched, paid=paid, peak=peak)
    failed = [trace for trace in (*traces, *clipped) if trace.status in ("failed", "out_of_memory")]
    if failed and clip.value == "none":
        why = f"Which threshold helps cannot be told: {len(failed)} trials failed ({failed[0].reason})."
        settle = "Mend what failed, and run it again."
        clip, share = (
            dataclasses.replace(found, value=None, summary=why, confidence="low", settle=settle)
            for found in (clip, share)
        )
    measured = opened.set_index("how").to_dict("index")
    clip = dataclasses.replace(
        clip,
        evidence={**clip.evidence, **({"open_questions": measured} if measured else {})},
        caveats=(*clip.caveats, *_answers(opened)),
    )
    trial = traces[0].trial
    where = {"lr": trial.lr, "batch_size": trial.batch_size, "warmup_steps": trial.warmup_steps}
    return session.conclude(clip, share, at=where)
