"""`workup` on the command line. A user's mistake is one message and exit code 2, never a traceback."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workup import __version__
from workup.errors import ParameterError, WorkupError
from workup.terminal import exit_code, typed

if TYPE_CHECKING:
    from workup.finding import Finding
    from workup.logs import Log


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: exit code 0 done, 1 something failed or was found, 2 a mistake in what was asked."""
    try:
        commands(args=argv, prog_name="workup")
    except Exception as error:
        sys.exit(exit_code(error))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="workup")
def commands() -> None:
    """Short controlled experiments on your PyTorch training, and what they say to change.

    REF names a workload: a built-in ("digits-mlp"), "path/to/file.py:attr" or "package.module:attr".
    """


@commands.command("run")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@click.option("--study", help="Folder of the study, of one workload.  [default: runs/<workload's name>]")
@click.option("--budget", default="standard", show_default=True, help="smoke, standard or thorough.")
@click.option("--notebooks", "wanted", default="02,04-07,11", show_default=True, help="Numbers, ranges or names.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda:0 or mps.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Fixes initial weights and batches."
)
@click.option("--executor", help="serial, processes, ensemble, auto or ray.  [default: serial]")
@click.option("--ray-address", help="The cluster of --executor ray.  [default: RAY_ADDRESS, else this machine's]")
@click.option("--gpus-per-trial", help="With --executor ray; 0.25 lets four trials share a GPU.  [default: 1]")
@click.option("--kernel", help="Jupyter kernel to run in.  [default: this Python]")
@click.option("-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="A notebook's own parameter.")
def run_command(references: tuple[str, ...], **asked: Any) -> None:
    """Run the workbook's notebooks on a workload, or on several, each in a study of its own."""
    from workup import running

    for name, variable in (("ray_address", "RAY_ADDRESS"), ("gpus_per_trial", running.cluster.GPUS)):
        if value := asked.pop(name):
            os.environ[variable] = value  # the notebooks' kernels inherit it
    one = len(references) == 1
    sys.exit(running.workbook_of(references[0], **asked) if one else running.several(references, **asked))


@commands.command("check")
@click.argument("reference", metavar="REF")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda:0 or mps.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Fixes initial weights and batches."
)
def check_command(reference: str, device: str, seed: int) -> None:
    """Check in seconds that a workload can be trained at all; exit code 1 where it cannot."""
    from workup.experiments.workload_check import verdict
    from workup.measure import devices
    from workup.measure.check import check
    from workup.references import load
    from workup.show.cards import columns

    checks = check(load(reference), device=devices.resolve(device), seed=seed)
    found = verdict(checks)
    rows = [("check", "result", "what was seen"), *((made.name, made.result, made.detail) for made in checks)]
    click.echo(f"{columns(rows)}\n\n{found.summary}")
    sys.exit(found.value == "fail")


@commands.command("show")
@click.argument("study")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def show_command(study: str, as_json: bool) -> None:
    """Print what a study found."""
    from workup.show.cards import cards
    from workup.show.summary import summary
    from workup.study import Study

    opened = Study.read(study)
    found = opened.findings()
    if as_json:
        body = {
            "study": str(opened.folder),
            "workload": opened.about["workload"],
            "findings": [finding.to_dict() for finding in found.values()],
            "prescription": opened.prescription(),
        }
        click.echo(json.dumps(body, indent=2, allow_nan=False))
    else:
        click.echo(f"{opened.about['workload']} in {typed(opened.folder)}\n\n{summary(opened)}")
        if found:
            click.echo(f"\n{cards(found)!r}")


@commands.command("report")
@click.argument("study")
def report_command(study: str) -> None:
    """Write a study's report.html, one file to hand on."""
    from workup.show.report import write_report
    from workup.study import Study

    click.echo(typed(write_report(Study.read(study))))


@commands.command("read")
@click.argument("paths", metavar="LOG...", nargs=-1, required=True)
@click.option("--column", "pairs", multiple=True, metavar="OURS=THEIRS", help="As loss=train/nll, where not found.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--follow", is_flag=True, help="Keep looking, with a line at each change, until Ctrl-C.")
def read_command(paths: tuple[str, ...], pairs: tuple[str, ...], as_json: bool, follow: bool) -> None:
    """Judge runs by their logs: exit code 0 clean, 1 a problem found, 2 unreadable.

    A LOG is transformers' trainer_state.json, Lightning's metrics.csv, TensorBoard's events, a W&B
    export, CSV or JSON lines, or a folder that holds one.
    """
    from workup import logs
    from workup.experiments.existing_logs import assigned, judge, problems

    if follow and (as_json or len(paths) > 1):
        raise ParameterError("read --follow: name one LOG, without --json.")
    columns, code, read = assigned(pairs), 0, []
    for path in paths:
        try:
            log = _followed(path, columns) if follow else logs.read(path, columns=columns)
        except WorkupError as error:
            click.echo(f"Error: {error}", err=True)
            code = 2
            continue
        found = judge(log)
        wrong = [finding.name for finding in problems(found)]
        code = max(code, int(bool(wrong)))
        about = {"log": path, "format": log.format, "columns": dict(log.columns), "notes": list(log.notes)}
        read.append({**about, "findings": [finding.to_dict() for finding in found], "problems": wrong})
        if not as_json:
            _tell(log, found, wrong)
    if as_json:
        click.echo(json.dumps(read, indent=2, allow_nan=False))
    sys.exit(code)


def _followed(path: str, columns: dict[str, str]) -> "Log":
    """Print a line each time a log has changed, until Ctrl-C; the log as it was then."""
    from workup import logs
    from workup.experiments.existing_logs import judge

    last, log = "", None
    try:
        for log in logs.follow(path, columns=columns):
            loss = log.series["loss"]
            line = f"step {loss.index[-1]:,}, loss {loss.iloc[-1]:.4g}: {judge(log)[0].value.replace('_', ' ')}"
            if line != last:
                click.echo(line)
            last = line
    except KeyboardInterrupt:
        if log is None:
            raise
    assert log is not None
    return log


def _tell(log: "Log", found: "Sequence[Finding]", wrong: Sequence[str]) -> None:
    from workup.show.cards import cards, title

    loss = log.series["loss"]
    click.echo(f"{log.path}: {log.format}, {len(loss):,} losses, steps {loss.index[0]:,} to {loss.index[-1]:,}")
    click.echo(f"  read as {', '.join(f'{ours}={theirs}' for ours, theirs in log.columns.items())}")
    for note in log.notes:
        click.echo(f"  note: {note}")
    verdict = "No problem found" if found[0].is_conclusive else "Whether training is stable cannot be told"
    click.echo(f"{cards(found)!r}\n{'Problems: ' + ', '.join(map(title, wrong)) if wrong else verdict}.\n")


@commands.command("new")
@click.argument("file", type=click.Path(path_type=Path))
def new_command(file: Path) -> None:
    """Write a commented starting file for your own workload, which runs as it is."""
    template = Path(__file__).parent / "workloads" / "template.py"
    if file.suffix != ".py":
        raise ParameterError(f"new {file}: name a file that ends in .py.")
    try:
        with file.open("x") as new:
            new.write(template.read_text().replace("FILE", str(file)))
    except FileExistsError:
        raise ParameterError(f"new {file}: it is there already, and stays as it is. Name another.") from None
    except OSError as error:
        raise ParameterError(f"new {file}: cannot write it ({error.strerror}).") from None
    click.echo(f"Wrote {file}. It runs as it is: workup check {file}:workload")


@commands.command("workloads")
def workloads_command() -> None:
    """List the built-in workloads."""
    from workup.show.cards import columns
    from workup.workloads import BUILT_IN

    rows = [(name, (made.__doc__ or "").partition("\n")[0]) for name, made in BUILT_IN.items()]
    click.echo(columns([("name", "what it is"), *rows]))


@commands.group("kernels")
def kernels_group() -> None:
    """Jupyter kernels bound to this environment: one for the CPU, one for each GPU."""


@kernels_group.command("install")
def install_command() -> None:
    """Install workup-cpu and a workup-gpuN for each GPU this process sees."""
    from workup import kernels

    names = kernels.install()
    click.echo(f"Installed: {', '.join(names)}.")
    if len(names) == 1:
        click.echo("No GPU is visible here, so there is only the CPU's kernel.")


@kernels_group.command("list")
def list_command() -> None:
    """List the Workup kernels of this user."""
    from workup import kernels
    from workup.show.cards import columns

    found = kernels.installed()
    if not found:
        click.echo("None. `workup kernels install` installs them.")
        return
    pins = {name: spec.env.get("CUDA_VISIBLE_DEVICES", "") for name, spec in found.items()}
    rows = [(name, pins[name] or "none", found[name].argv[0]) for name in found]
    click.echo(columns([("kernel", "GPU", "Python"), *rows]))


@kernels_group.command("remove")
def remove_command() -> None:
    """Remove this environment's Workup kernels."""
    from workup import kernels

    click.echo(f"Removed: {', '.join(kernels.remove()) or 'none was installed'}.")
