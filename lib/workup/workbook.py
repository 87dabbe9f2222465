"""The workbook on the command line: notebooks run one after another by papermill, into a study."""

import ast
import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from workup import errors, kernels, notebooks
from workup.errors import ParameterError, nearest
from workup.study import Study


def names() -> list[str]:
    """The workbook's notebooks in order, without their ending.

    Raises:
        ParameterError: there are none.
    """
    found = sorted(path.stem for path in notebooks.folder().glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise ParameterError(f"the workbook's notebooks are not in {notebooks.folder()}. Install Workup again.")
    return found


def select(wanted: str) -> list[str]:
    """The notebooks that ``wanted`` names, in the workbook's order.

    Args:
        wanted: numbers, ranges and names with commas between: ``02,04-07,clipping``. A range
            takes what exists of it.

    Raises:
        ParameterError: a number or name of no notebook, or a range that holds none.
    """
    known = names()
    chosen: set[str] = set()
    for part in filter(None, (piece.strip() for piece in wanted.split(","))):
        if span := re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part):
            found = {name for name in known if int(span[1]) <= int(name[:2]) <= int(span[2] or span[1])}
        else:
            found = {name for name in known if part in (name, name[3:], f"{name}.ipynb")}
        if not found:
            hint = nearest(part, known if part[0].isdecimal() else [name[3:] for name in known])
            raise ParameterError(f"--notebooks {wanted}: no notebook '{part}'. {hint}")
        chosen |= found
    if not chosen:
        raise ParameterError(f"--notebooks '{wanted}' names none. Known: {', '.join(known)}.")
    return sorted(chosen)


def value(text: str) -> Any:
    """A parameter's value as typed on a command line: a Python literal where it is one, else the text.

    >>> value("1e-3"), value("None"), value("[1, 2]"), value("digits-mlp")
    (0.001, None, [1, 2], 'digits-mlp')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        with contextlib.suppress(ValueError):
            return float(text)  # nan and inf are no literals
        return text


def assign(chosen: Sequence[str], standard: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each notebook's parameters: the standard ones and those of ``own`` that it declares, checked.

    papermill only warns of a name that no notebook knows; here it stops.

    Raises:
        ParameterError: a value of the wrong type, or a name in ``own`` that is standard or
            that none of ``chosen`` declares.
    """
    paths = {name: notebooks.folder() / f"{name}.ipynb" for name in names()}
    declared = {name: notebooks.declared(path) for name, path in paths.items()}
    known = {parameter for name in chosen for parameter in declared[name]} - set(standard)
    for parameter in own:
        if parameter in standard:
            option = "REF" if parameter == "workload" else f"--{parameter}"
            raise ParameterError(f"-p {parameter}: give {option} instead.")
        if parameter not in known:
            other = next((name for name in declared if parameter in declared[name]), None)
            hint = f"{other} has it: add it to --notebooks." if other else nearest(parameter, known)
            raise ParameterError(f"-p {parameter}: not a parameter of {', '.join(chosen)}. {hint}")
    plan = {}
    for name in chosen:
        given = {key: value for key, value in {**standard, **own}.items() if key in declared[name]}
        checked = notebooks.check(paths[name], given)
        plan[name] = {key: checked[key] for key in given}
    return plan


#: Notebooks that time the machine: beside them no kernel starts.
TIMED = ("02_batch_size", "03_input_pipeline")
#: What a kernel imports while another notebook runs: the better part of its notebook's fixed cost.
_IMPORTS = ("workup.experiments.session", "workup.show.plots", "torch._dynamo")


@contextlib.contextmanager
def kernels_ahead(chosen: Sequence[str], kernel: str | None) -> Iterator[Callable[[str], Any]]:
    """A function from each of the ``chosen`` notebooks, in order, to its kernel; the next one's starts meanwhile.

    Raises:
        DeviceError: no such kernel.
    """
    from nbclient.util import run_sync

    spare: list[Any] = []

    def take(notebook: str) -> Any:
        running = spare.pop() if spare else kernels.manager(kernel)
        ours = "ipykernel" in " ".join(running.kernel_spec.argv)
        if ours and notebook not in TIMED and notebook != chosen[-1]:
            lines = f"[__import__(name) for name in {_IMPORTS}] and None"
            arguments = [f"--IPKernelApp.exec_lines={lines}", "--HistoryManager.hist_file=:memory:"]
            spare.append(kernels.manager(kernel))
            run_sync(spare[0].start_kernel)(extra_arguments=arguments)
        return running

    try:
        yield take
    finally:
        for unused in spare:
            with _closing(unused):
                pass


def execute(notebook: str, values: Mapping[str, Any], *, study: Study, kernel: Any, out: TextIO) -> str:
    """Run one notebook in ``kernel``, a manager as from :func:`kernels_ahead`; what stopped it, or "".

    What the kernel prints goes to ``out`` as it comes. The executed copy lands in the study's
    ``notebooks`` folder, whatever happened.

    Raises:
        KeyboardInterrupt: stopped; the kernel has saved what it had measured and is gone.
    """
    import papermill
    from nbclient.exceptions import CellExecutionError

    with _closing(kernel), _stoppable(kernel) as stops, tempfile.TemporaryDirectory(prefix="workup-") as scratch:
        copy = Path(scratch) / f"{notebook}.ipynb"

        def stop_between_cells(**_: Any) -> None:
            if stops:
                raise KeyboardInterrupt

        try:
            papermill.execute_notebook(
                notebooks.folder() / f"{notebook}.ipynb",
                copy,
                parameters=dict(values),
                kernel_name=kernel.kernel_name,
                language="python",
                progress_bar=False,
                stdout_file=out,
                start_timeout=120,
                km=kernel,
                on_cell_start=stop_between_cells,
            )
        except (papermill.PapermillExecutionError, CellExecutionError, RuntimeError, OSError) as error:
            stop_between_cells()
            return _said(error)
        finally:
            if copy.exists():
                study.write(f"notebooks/{notebook}.ipynb", copy.read_text())
        return ""


def _said(error: Any) -> str:
    """A failed cell in a line: a user's mistake by its message alone, anything else with its kind and cell."""
    from nbclient.exceptions import DeadKernelError

    if isinstance(error, DeadKernelError):
        return "the kernel died; where memory ran out, the system ends it without a word."
    if not hasattr(error, "ename"):
        return f"the kernel did not start or answer ({error})."
    if isinstance(getattr(errors, error.ename, None), type):
        return str(error.evalue)
    return f"{error.ename}: {error.evalue} (cell In [{error.exec_count}])"


@contextlib.contextmanager
def _closing(kernel: Any) -> Iterator[None]:
    """Shut the kernel down at the end, and the channels of the clients made for it, which papermill leaves open."""
    from nbclient.util import run_sync

    clients, build = [], kernel.client

    def client(**options: Any) -> Any:
        clients.append(build(**options))
        return clients[-1]

    kernel.client = client
    try:
        yield
    finally:
        for made in clients:
            made.stop_channels()
        if kernel.has_kernel and run_sync(kernel.is_alive)():
            run_sync(kernel.shutdown_kernel)()
        run_sync(kernel.cleanup_resources)()


@contextlib.contextmanager
def _stoppable(kernel: Any) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM go to the kernel, which saves what it has measured; a second one raises at once.

    The kernel leads a process group of its own, so the terminal does not reach it.
    """
    stops: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        stops.append(signum)
        pid = getattr(kernel.provisioner, "pid", None)
        if pid is None or len(stops) > 1:
            raise KeyboardInterrupt
        os.kill(pid, signal.SIGINT)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
