"""Does training wait for its data, why, and what ends it (playbook: F1, F2, B4)."""

import os
from collections.abc import Mapping
from typing import Any

import pandas as pd

from workup.experiments.session import Session, more_rounds
from workup.finding import Finding
from workup.judge import pipeline as judge
from workup.measure import data, devices, loader, stages, steps, syncs
from workup.progress import progress

#: rounds of the three speeds, and their timed seconds in all; passes over the sweep, least and most, and timed seconds
#: of each measurement in it; the most workers tried; batches the stages are timed over.
BUDGET: dict[str, dict[str, Any]] = {
    "smoke": {"rounds": 3, "seconds": 1.0, "passes": (1, 1), "each": 0.2, "workers": 1, "batches": 2},
    "standard": {"rounds": 5, "seconds": 7.5, "passes": (2, 4), "each": 0.7, "workers": 8, "batches": 8},
    "thorough": {"rounds": 9, "seconds": 45.0, "passes": (5, 8), "each": 3.0, "workers": 32, "batches": 32},
}
#: Where the rounds do not tell, as many follow, at most so often.
MORE = 3
#: Batches that each worker may have ready: torch's default, and one that rides out slow batches.
PREFETCH = (2, 8)
#: What a sweep is read by.
COMPARED = list(judge.SECONDS)
#: Where in the study the profiler's trace is written.
TRACE = "profile.json"


def measured(session: Session) -> dict[str, Any]:
    """Where everything is measured: at the batch size given, found, or the workload's own; device and seed."""
    own = session.workload.batch_size
    size = int(session.resolve_parameter("batch_size", finding="recommended_batch_size", fallback=own))
    return {"batch_size": size, "device": session.device, "seed": session.seed}


def speeds(session: Session) -> pd.DataFrame:
    """The loader alone, the step alone, both together, interleaved: a row a stretch; more rounds until they tell."""
    budget, how = BUDGET[session.budget], measured(session)
    table = pd.DataFrame()
    for block in range(1 + MORE):
        again = how | {"seed": how["seed"] + block, "rounds": budget["rounds"], "seconds": budget["seconds"]}
        rows = loader.speeds(session.workload, **again)
        table = pd.concat([table, rows.assign(round=rows["round"] + block * budget["rounds"])], ignore_index=True)
        if judge.input_bound(table, batch_size=how["batch_size"]).is_conclusive:
            break
    return table


def plan(session: Session) -> list[Mapping[str, Any]]:
    """The settings to try: the user's own first, then workers in powers of two with two depths of prefetch.

    No more workers than cores, unless asked for; at least one is tried.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = int(session.resolve_parameter("max_workers", fallback=max(1, min(cores, BUDGET[session.budget]["workers"]))))
    own = {key: value for key, value in session.workload.loader.items() if key in loader.DEFAULTS}
    pinned = {"pin_memory": True} if devices.numbered(session.device) else {}
    settings = [own, {"num_workers": 0}, {"num_workers": 0, **pinned}]
    if data.sliceable(session.workload):
        settings.append(dict(loader.BY_EXAMPLE))
    if own.get("num_workers"):
        settings.append({**own, "prefetch_factor": PREFETCH[-1]})
    counts = sorted({most, *(2**k for k in range(most.bit_length()))})
    for depth in PREFETCH[:1] if session.budget == "smoke" else PREFETCH:
        more = {"prefetch_factor": depth, **pinned, "persistent_workers": True}
        settings += [{"num_workers": count, **more} for count in counts]
    filled = [{**loader.DEFAULTS, **setting} for setting in settings]
    return [setting for i, setting in enumerate(settings) if filled[i] not in filled[:i]]


def sweep(session: Session, settings: list[Mapping[str, Any]]) -> pd.DataFrame:
    """Training with its loader under each setting: a row a setting and pass, ``setting`` its description.

    Passes follow, up to the budget's most, while they disagree too much to be believed.
    """
    (least, most), each = BUDGET[session.budget]["passes"], BUDGET[session.budget]["each"]
    how, table = {**measured(session), "seconds": each}, pd.DataFrame()
    with progress(len(settings) * least, "loader settings", unit="measurements") as bar:
        while (done := len(table) // len(settings)) < most and (done < least or judge.noisy(table)):
            passes = least - done if done < least else 1
            bar.total = len(settings) * (done + passes)
            rows = loader.sweep(
                session.workload,
                settings,
                **how | {"seed": how["seed"] + len(table)},
                passes=passes,
                advance=bar.advance,
            )
            table = pd.concat([table, rows.assign(**{"pass": rows["pass"] + done})], ignore_index=True)
    table.insert(0, "setting", [judge.describe(row) for _, row in table.iterrows()])
    return table


def look_inside(session: Session) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Where a batch's time goes by stage; which fields training uses; the lines of its step that wait."""
    how = measured(session)
    by_stage = stages.stages(session.workload, **how, batches=BUDGET[session.budget]["batches"])
    return by_stage, stages.fields(session.workload, **how), syncs.find_syncs(session.workload, **how)


def profile(session: Session) -> pd.DataFrame:
    """A profiler's trace of some steady steps, written to the study as ``TRACE``; returns its summary."""
    text, summary = steps.profile_steps(session.workload, **measured(session))
    session.study.write(TRACE, text)
    return summary


def conclude(
    session: Session, speeds: pd.DataFrame, sweep: pd.DataFrame, inside: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
) -> tuple[Finding, ...]:
    """input_bound, input_causes and loader_settings."""
    size, collate = measured(session)["batch_size"], "collate_fn" in session.workload.loader
    by_stage, fields, waits = inside
    bound = judge.input_bound(speeds, batch_size=size, settle=session.command("03"))
    bound = more_rounds(bound, speeds["round"].nunique() - BUDGET[session.budget]["rounds"])
    return session.conclude(
        bound,
        judge.causes(bound, stages=by_stage, sweep=sweep, fields=fields, syncs=waits),
        judge.loader_settings(bound, sweep, batch_size=size, collate=collate, settle=session.command("03")),
    )
