"""Running notebooks into a study: which, with what, and how each ends."""

import io
import json
import os
import signal
import sys
import threading
import time

import nbformat
import psutil
import pytest

from workup import notebooks, workbook
from workup.errors import DeviceError, ParameterError
from workup.study import Study

PARAMETERS = (
    'workload: str = "digits-mlp"  # reference\n'
    'study: str = "runs/x"  # folder\n'
    'device: str = "auto"  # where\n'
    "seed: int = 0  # seed\n"
    'budget: str = "standard"  # how much'
)


def write(folder, name, *cells, knobs=""):
    """A notebook of the standard parameters, ``knobs`` and code cells."""
    book = nbformat.v4.new_notebook()
    tagged = nbformat.v4.new_code_cell(PARAMETERS + knobs, metadata={"tags": ["parameters"]})
    book.cells = [tagged, *(nbformat.v4.new_code_cell(cell) for cell in cells)]
    book.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(book, folder / f"{name}.ipynb")


@pytest.fixture
def books(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "folder", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def study(tmp_path):
    return Study.open(tmp_path / "study", workload="w", fingerprint={"model": "1"})


@pytest.fixture
def core(books):
    for name in ("00_start_here", "02_batch_size", "04_learning_rate", "05_instability", "11_final_run"):
        write(books, name, "pass", knobs="\npoints: int = None  # rates" if name.startswith("04") else "")


def standard(**changed):
    return {"workload": "w", "study": "s", "device": "cpu", "seed": 3, "budget": "smoke", **changed}


# -- which notebooks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("02", ["02_batch_size"]),
        ("2,4", ["02_batch_size", "04_learning_rate"]),
        ("02,04-07,11", ["02_batch_size", "04_learning_rate", "05_instability", "11_final_run"]),
        ("11, learning_rate", ["04_learning_rate", "11_final_run"]),
        ("05_instability,5", ["05_instability"]),
        ("0-99", ["00_start_here", "02_batch_size", "04_learning_rate", "05_instability", "11_final_run"]),
    ],
)
def test_numbers_ranges_and_names_choose_notebooks_in_the_workbooks_order(core, wanted, chosen):
    assert workbook.select(wanted) == chosen


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("03", r"--notebooks 03: no notebook '03'\. .*Known: 00_start_here, 02_batch_size"),
        ("02,06-09", r"no notebook '06-09'"),
        ("11-04", r"no notebook '11-04'"),
        ("learning_rat", r"no notebook 'learning_rat'\. Did you mean 'learning_rate'\?"),
        (" , ", r"names none\. Known: 00_start_here"),
    ],
)
def test_a_notebook_that_does_not_exist_is_an_error_with_the_known_ones(core, wanted, message):
    with pytest.raises(ParameterError, match=message):
        workbook.select(wanted)


def test_without_notebooks_the_error_says_where_they_were_looked_for(books):
    with pytest.raises(ParameterError, match=r"notebooks are not in .*notebooks\. Install"):
        workbook.names()


# -- their parameters ----------------------------------------------------------------------


def test_each_notebook_gets_the_standard_parameters_and_those_of_its_own_that_are_given(core):
    plan = workbook.assign(["02_batch_size", "04_learning_rate"], standard(), {"points": 5})
    assert plan == {"02_batch_size": standard(), "04_learning_rate": standard(points=5)}


def test_numbers_given_as_strings_are_understood(core):
    assert workbook.assign(["04_learning_rate"], standard(), {"points": "7"})["04_learning_rate"]["points"] == 7


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"pionts": 5}, r"-p pionts: not a parameter of 04_learning_rate, 02_batch_size\. Did you mean 'points'\?"),
        ({"budget": "smoke"}, r"-p budget: give --budget instead"),
        ({"workload": "x"}, r"-p workload: give REF instead"),
        ({"points": "many"}, r"04_learning_rate: parameter points='many' must be a whole number"),
    ],
)
def test_an_unknown_parameter_or_a_wrong_type_stops_with_the_remedy(core, own, message):
    with pytest.raises(ParameterError, match=message):
        workbook.assign(["04_learning_rate", "02_batch_size"], standard(), own)


def test_a_parameter_of_a_notebook_that_was_not_chosen_says_which_notebook_to_add(core):
    with pytest.raises(ParameterError, match=r"-p points: .* 04_learning_rate has it: add it to --notebooks"):
        workbook.assign(["02_batch_size"], standard(), {"points": 5})


def test_an_unknown_budget_names_the_known_ones(core):
    with pytest.raises(ParameterError, match=r"budget='standrad'\. Did you mean 'standard'\?"):
        workbook.assign(["02_batch_size"], standard(budget="standrad"), {})


# -- running them --------------------------------------------------------------------------


def empty(*names):
    return {name: {} for name in names}


def run(plan, study, kernel=None):
    """What stopped each notebook, and what they printed."""
    out = io.StringIO()
    with workbook.kernels_ahead(list(plan), kernel) as take:
        stopped = [workbook.execute(n, v, study=study, kernel=take(n), out=out) for n, v in plan.items()]
    return stopped, out.getvalue()


def executed(study, name):
    return nbformat.read(study.folder / "notebooks" / f"{name}.ipynb", as_version=4)


def test_a_notebook_runs_in_this_python_with_its_parameters_and_its_lines_come_through(books, study):
    write(
        books,
        "04_learning_rate",
        "import sys, os; print(sys.executable, seed, study, lr, os.getcwd())",
        knobs="\nlr: float = None",
    )
    plan = {"04_learning_rate": {"seed": 3, "study": "runs/y", "lr": 1e-3}}
    errors, printed = run(plan, study)
    assert errors == [""]
    assert printed == f"{sys.executable} 3 runs/y 0.001 {os.getcwd()}\n"
    last = executed(study, "04_learning_rate").cells[-1]
    assert last.execution_count == 3
    assert last.outputs[0].text == printed


def test_the_next_kernel_starts_while_a_notebook_runs_that_times_nothing_and_none_is_left(books, study, monkeypatch):
    monkeypatch.setattr(workbook, "_IMPORTS", ("colorsys",))
    look = "import sys; print('colorsys' in sys.modules, 'colorsys' in dir())"
    for name in ("02_batch_size", "04_learning_rate", "05_instability"):
        write(books, name, look)
    errors, printed = run(empty("02_batch_size", "04_learning_rate", "05_instability"), study)
    assert errors == ["", "", ""]
    assert printed.split("\n") == ["False False", "False False", "True False", ""]
    others = set(psutil.Process().children())
    with workbook.kernels_ahead(["04_learning_rate", "05_instability"], None) as take:
        take("04_learning_rate")
        (child,) = set(psutil.Process().children()) - others
    assert not child.is_running()


def test_a_failed_notebook_tells_its_own_error_is_saved_and_lets_the_others_run(books, study):
    write(books, "02_batch_size", "1 / 0", "print('not reached')")
    write(books, "04_learning_rate", "from workup.errors import ParameterError; raise ParameterError('lr: too hot.')")
    errors, printed = run(empty("02_batch_size", "04_learning_rate"), study)
    assert errors == ["ZeroDivisionError: division by zero (cell In [2])", "lr: too hot."]
    assert printed == ""
    failed = executed(study, "02_batch_size").cells
    assert [o.ename for cell in failed if cell.cell_type == "code" for o in cell.outputs] == ["ZeroDivisionError"]


def test_a_kernel_that_is_killed_ends_its_notebook_only(books, study):
    write(books, "02_batch_size", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    errors, _ = run(empty("02_batch_size"), study)
    assert errors == ["the kernel died; where memory ran out, the system ends it without a word."]
    assert "SIGKILL" in executed(study, "02_batch_size").cells[-1].source


def test_ctrl_c_reaches_the_kernel_keeps_what_it_measured_and_stops_the_workbook(books, study, tmp_path):
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    write(
        books,
        "02_batch_size",
        "import pathlib, time\n"
        f"pathlib.Path({str(begun)!r}).write_text('')\n"
        "try:\n    time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(saved)!r}).write_text('kept'); raise",
    )
    write(books, "04_learning_rate", "print('not reached')")

    def press():
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(empty("02_batch_size", "04_learning_rate"), study)
    pressing.join()
    assert saved.read_text() == "kept"
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in (study.folder / "notebooks").iterdir()] == ["02_batch_size.ipynb"]


def test_a_kernel_that_does_not_exist_is_an_error_and_one_that_cannot_start_an_outcome(
    books, study, tmp_path, monkeypatch
):
    write(books, "02_batch_size", "pass")
    with pytest.raises(DeviceError, match="kernel 'nowhere': not installed"):
        run(empty("02_batch_size"), study, kernel="nowhere")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    spec = tmp_path / "jupyter" / "kernels" / "broken"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", "raise SystemExit(3)"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "x", "language": "python"}))
    (error,), _ = run(empty("02_batch_size"), study, kernel="broken")
    assert error.startswith("the kernel did not start or answer")
