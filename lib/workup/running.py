"""`workup run`: the workbook on one workload, or on several, each in a study of its own."""

import contextlib
import io
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from workup import kernels, workbook
from workup.errors import ParameterError, WorkloadError
from workup.measure import cluster, devices
from workup.measure.check import check
from workup.references import load
from workup.show.report import write_report
from workup.show.summary import summary
from workup.study import Study, default_folder
from workup.terminal import exit_code, typed
from workup.workload import fingerprint


def workbook_of(reference: str, *, study: str | None, wanted: str, kernel: str | None, pairs: Any, **rest: Any) -> int:
    """One workload's notebooks; the exit code."""
    chosen = workbook.select(wanted)
    kernels.manager(kernel)
    device, workload = devices.resolve(rest["device"]), load(reference)
    if rest["executor"] == "ray":
        cluster.check(device)
    folder = study or default_folder(workload.name)
    own = {name: workbook.value(text) for name, text in pairs}
    plan = workbook.assign(chosen, {"workload": reference, "study": folder, **rest}, own)
    for made in check(workload, device=device, seed=rest["seed"], until="gradients"):
        if made.result == "fail":
            raise WorkloadError(f"workload '{reference}', {made.name}: {made.detail.rstrip('.')}.")
    opened = Study.open(folder, workload=workload.name, fingerprint=fingerprint(workload))
    failed = _notebooks(plan, opened, kernel)
    click.echo(f"\n{summary(opened)}\n\nReport: {typed(write_report(opened))}")
    click.echo(f"Executed notebooks: {typed(opened.folder / 'notebooks')}")
    if failed:
        click.echo(f"Failed: {', '.join(failed)}. The same command runs only what is missing.", err=True)
    return int(bool(failed))


def several(references: Sequence[str], **asked: Any) -> int:
    """Several workloads' workbooks, one after another or over a Ray cluster; the worst of their exit codes."""
    if asked["study"]:
        raise ParameterError("run --study: each of several workloads has a study of its own. Leave --study out.")
    names = [load(reference).name for reference in references]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ParameterError(f"run: two workloads are named '{twice[0]}', and their studies would be one. Rename one.")
    spread = asked["executor"] == "ray"
    calls = [(reference, asked | {"executor": None if spread else asked["executor"]}) for reference in references]
    ended = (
        cluster.workbooks(_aside, calls, device=devices.resolve(asked["device"]), note=click.echo)
        if spread
        else ((index, (_one_of(*call), ""), "") for index, call in enumerate(calls))
    )
    codes = dict.fromkeys(references, 0)
    for index, answer, why in ended:
        codes[references[index]], said = answer or (1, f"Error: {why}")
        click.echo(said, nl=bool(said))
    click.echo("\n".join(f"{reference}: {'failed' if code else 'done'}" for reference, code in codes.items()))
    return max(codes.values())


def _one_of(reference: str, asked: dict[str, Any]) -> int:
    """A workbook among several: a mistake in one is printed and does not stop the others."""
    click.echo(f"== {reference}")
    try:
        return workbook_of(reference, **asked)
    except Exception as error:
        return exit_code(error)


def _aside(reference: str, asked: dict[str, Any]) -> tuple[int, str]:
    """A workbook on another machine; its exit code and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return _one_of(reference, asked), said.getvalue()


def _notebooks(plan: dict[str, dict[str, Any]], study: Study, kernel: str | None) -> list[str]:
    """Run the notebooks with a line at each one's start and end; the names of those that failed."""
    failed = []
    try:
        with workbook.kernels_ahead(list(plan), kernel) as take:
            for number, (name, values) in enumerate(plan.items(), 1):
                click.echo(f"[{number}/{len(plan)}] {name}")
                began = time.monotonic()
                if error := workbook.execute(name, values, study=study, kernel=take(name), out=sys.stdout):
                    failed.append(name)
                    at = typed(study.folder / "notebooks" / name)
                    click.echo(f"{name} failed: {error}\n  See {at}.ipynb", err=True)
                else:
                    click.echo(f"  done in {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        click.echo(f"\nStopped. {typed(study.folder)} keeps what was measured; the same command resumes.", err=True)
        sys.exit(130)
    return failed
