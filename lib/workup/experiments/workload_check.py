"""Can this workload be trained at all (playbook: A3, C4, F3): run the checks, sum them up."""

import pandas as pd

from workup.experiments.session import Session
from workup.finding import Finding
from workup.measure.check import Check
from workup.measure.check import check as run_checks


def run(session: Session) -> list[Check]:
    """The checks of :func:`workup.measure.check.check` on the session's workload, device and seed."""
    return run_checks(session.workload, device=session.device, seed=session.seed)


def table(checks: list[Check]) -> pd.DataFrame:
    """One row per check: columns check, result, detail, rule."""
    return pd.DataFrame(checks).rename(columns={"name": "check"})


def verdict(checks: list[Check]) -> Finding:
    """``workload_check``: ``pass``, ``warn`` or ``fail``, the worst of its checks.

    Example:
        >>> verdict([Check(name="gradients", result="warn", detail="none reaches 3.bias", rule="playbook: C4")]).value
        'warn'
    """
    by = {result: [c for c in checks if c.result == result] for result in ("fail", "warn", "pass")}
    worst = next(result for result, found in by.items() if found)
    names = ", ".join(c.name for c in by[worst])
    summary = {
        "fail": f"Not ready to train: {names}.",
        "warn": f"It can be trained; look first at: {names}.",
        "pass": f"It can be trained: all {len(checks)} checks pass.",
    }
    return Finding(
        name="workload_check",
        value=worst,
        rule="playbook: A3, C4, F3",
        summary=summary[worst],
        confidence="high",
        evidence={c.name: f"{c.result}: {c.detail}" for c in checks},
        caveats=tuple(f"{c.name}: {c.detail}" for c in [*by["fail"], *by["warn"]]),
    )


def conclude(session: Session, checks: list[Check]) -> Finding:
    """Record the verdict in the study."""
    return session.conclude(verdict(checks))[0]
