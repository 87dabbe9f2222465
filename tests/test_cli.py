"""`workup` on the command line: what each command does, and the one message that each mistake gets."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import nbformat
import pytest

from workup import cli, notebooks, workbook
from workup.finding import Finding
from workup.measure import cluster
from workup.study import Study

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workup import Workload

data = TensorDataset(torch.linspace(-1, 1, 128).reshape(32, 4), torch.zeros(32, dtype=torch.long))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(**changes):
    fields = dict(name="mine", model=lambda: nn.Linear(4, 2), train_data=data, loss=loss, batch_size=8, lr=0.1,
                  optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr), max_train_steps=20)
    return Workload(**{**fields, **changes})


workload = make()
"""
PARAMETERS = (
    'workload: str = "digits-mlp"  # r\nstudy: str = "runs/x"  # s\ndevice: str = "auto"  # d\n'
    'seed: int = 0  # n\nbudget: str = "standard"  # b\n'
)

LR = "lr: float = None  # peak\n"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project folder with the user's file and two notebooks, whose kernels must not start unless a test says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    (tmp_path / "mine.py").write_text(MINE)
    folder = tmp_path / "books"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "folder", lambda: folder)
    for name, knob in {"02_batch_size": "", "04_learning_rate": LR, "11_final_run": ""}.items():
        save(folder / f"{name}.ipynb", knob, "pass")
    return tmp_path


def save(path, knob, *cells):
    tagged = nbformat.v4.new_code_cell(PARAMETERS + knob, metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[tagged, *map(nbformat.v4.new_code_cell, cells)])
    nbformat.write(book, path)


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(workbook, "execute", lambda *a, **k: pytest.fail("a kernel was about to start"))


def workup(capsys, *arguments):
    """Exit code, stdout and stderr of a call."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


# -- mistakes ------------------------------------------------------------------------------

BROKEN = "import numbers\n\n\ndef build():\n    return 1 / 0\n\n\nworkload = build()\n"


#: functions added to mine.py, each a workload that is wrong in one field
CHANGES = {
    "zero": "batch_size=0",
    "large": "batch_size=64",
    "negative": "lr=-0.1",
    "nan": "lr=float('nan')",
    "empty": "train_data=[]",
    "changed": "lr=0.2",
    "number": "loss=lambda model, batch: 1.0",
    "shape": "loss=lambda model, batch: model(batch[0])",
    "detached": "loss=lambda model, batch: loss(model, batch).detach()",
    "raises": "model=lambda: nn.Linear(5, 2)",
    "infinite": "loss=lambda model, batch: loss(model, batch) * float('inf')",
    "no_module": "model=lambda: 3",
    "no_model": "model=lambda: nn.Linear(4, 2 / 0)",
}
#: what is asked for (of mine.py:workload where it begins with an option) -> the message
MISTAKES = {
    "digits-mpl": r"workload 'digits-mpl': no built-in .*'digits-mlp'\?",
    "gone.py:workload": r"workload 'gone\.py:workload': no file at /.*/gone\.py\.",
    "mine.py": r"'mine\.py': say which name in the file, as in 'mine\.py:workload'",
    "mine.py:wrkload": r"mine\.py has no 'wrkload'\. Did you mean 'workload'\?",
    "nowhere.at_all:workload": r"no module 'nowhere' to import",
    "mine.py:data": r"data is TensorDataset, not a Workload",
    "mine.py:nothing": r"nothing is NoneType, not a Workload",
    "broken.py:workload": r"(?s)broken\.py cannot be imported\..*line 5, in build.*ZeroDivisionError",
    "exits.py:workload": r"(?s)exits\.py cannot be imported\..*SystemExit: 0",
    "syntax.py:workload": r"(?s)syntax\.py cannot be imported\..*SyntaxError",
    "mine.py:zero": r"Workload\(batch_size=0\): batch_size must be a whole number of at least 1",
    "mine.py:large": r"Workload\(batch_size=64\): larger than train_data.*32 examples",
    "mine.py:negative": r"Workload\(lr=-0\.1\): lr must be a positive, finite number",
    "mine.py:nan": r"Workload\(lr=nan\): lr must be a positive, finite number",
    "mine.py:empty": r"train_data must be .*this one is empty",
    "mine.py:number": r"one batch passes: .*loss\(model, batch\) returned float, not a tensor",
    "mine.py:shape": r"one batch passes: .*loss\(model, batch\) has shape \[8, 2\].*reduction='none'",
    "mine.py:detached": r"one batch passes: .*loss\(model, batch\) has no gradient",
    "mine.py:raises": r"one batch passes: RuntimeError: mat1 and mat2 .*\(mine\.py:\d+\)",
    "mine.py:infinite": r"first loss: inf before any step \(8 of 8 values\): look at data, model and loss",
    "mine.py:no_model": r"builds: ZeroDivisionError: division by zero \(mine\.py:\d+\)",
    "mine.py:no_module": r"builds: Workload\(model=…\) of 'mine' returned int, not an nn\.Module",
    "--budget standrad": r"budget='standrad'\. Did you mean 'standard'\?",
    "--device gpu": r"device 'gpu' is unknown\. Use auto, cpu",
    "--device cuda:99": r"device 'cuda:99': this machine",
    "-p rl 1": r"-p rl: not a parameter of 02_batch_size, 04_learning_rate, 11_final_run\. Known: lr\.",
    "-p lr -1": r"lr=-1\.0 must be positive and finite",
    "-p lr fast": r"parameter lr='fast' must be a number",
    "-p seed 1": r"-p seed: give --seed instead",
    "--notebooks 99": r"--notebooks 99: no notebook '99'.*Known: 02_batch_size, 04_learning_rate",
    "--kernel workup-gpu7": r"kernel 'workup-gpu7': not installed\. .*python3.* `workup kernels install`",
    "--study mine.py": r"study 'mine\.py': /.*mine\.py is a file",
    "--study mine.py/x": r"study 'mine\.py/x': cannot write to /",
    "--study books": r"holds other files and no study\.json",
    "--study theirs": r"belongs to workload 'theirs', not 'mine'",
    "mine.py:changed --study old": r"another version of 'mine': changed since: settings",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_code_2_before_any_kernel_and_leaves_nothing(project, capsys, no_kernel, mistake):
    changed = [f"\n\ndef {name}():\n    return make({change})\n" for name, change in CHANGES.items()]
    (project / "mine.py").write_text("".join([MINE, *changed, "\n\ndef nothing():\n    pass\n"]))
    (project / "broken.py").write_text(BROKEN)
    (project / "exits.py").write_text("import sys\n\nsys.exit(0)\n")
    (project / "syntax.py").write_text("workload = = 3\n")
    Study.open("theirs", workload="theirs", fingerprint={})
    if "old" in mistake:
        from workup.references import load
        from workup.workload import fingerprint

        Study.open("old", workload="mine", fingerprint=fingerprint(load("mine.py:workload")))
    arguments = ["mine.py:workload"] * mistake.startswith("-") + mistake.split()
    before = sorted(path for path in project.rglob("*") if "__pycache__" not in str(path))
    code, out, err = workup(capsys, "run", *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    assert len(re.findall(r"^Error: ", err, re.MULTILINE)) == 1
    assert re.search(MISTAKES[mistake], err)
    assert sorted(path for path in project.rglob("*") if "__pycache__" not in str(path)) == before


def test_an_option_that_does_not_exist_gets_clicks_message_and_code_2(capsys):
    code, _, err = workup(capsys, "run", "mine.py:workload", "--buget", "smoke")
    assert code == 2
    assert "No such option '--buget'" in err


def test_a_seed_that_no_generator_takes_is_a_mistake(capsys):
    code, _, err = workup(capsys, "check", "digits-mlp", "--seed", "99999999999999999999")
    assert code == 2
    assert "Invalid value for '--seed'" in err


def test_an_error_nobody_expected_is_short_and_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.setattr(Study, "read", lambda _: 1 / 0)
    code, _, err = workup(capsys, "show", "runs/x")
    assert code == 1
    assert err == (
        "Error: ZeroDivisionError: division by zero\nNot expected: WORKUP_TRACEBACK=1 shows where it happened.\n"
    )
    monkeypatch.setenv("WORKUP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "runs/x"])


def test_what_a_loss_says_at_its_first_batch_is_not_asked_again_by_the_notebooks(project, capsys, no_kernel):
    (project / "mine.py").write_text(MINE.replace("0.1,", "0.1, initial_loss=7.0,"))
    with pytest.raises(pytest.fail.Exception, match="a kernel was about to start"):
        cli.main(["run", "mine.py:workload"])  # an unexpected first loss is a warning of `workup check`, no mistake


# -- run -----------------------------------------------------------------------------------

CONCLUDE = """
from workup.finding import Finding
from workup.judge.prescription import prescribe
from workup.study import Study
from workup.references import load
from workup.workload import fingerprint
w = load(workload)
opened = Study.open(study, workload=w.name, fingerprint=fingerprint(w))
found = Finding(name="peak_lr", value=lr or 0.25, rule="playbook: C1", summary="It trains best.", confidence="high")
opened.record("04_learning_rate", [found])
opened.save_prescription(prescribe(opened.findings(), workload=w))
print("sweep: 3 trials in 1 s")
"""


def test_run_prints_the_stages_the_recommendations_and_where_the_report_is(project, capsys):
    save(project / "books" / "04_learning_rate.ipynb", LR, CONCLUDE)
    save(project / "books" / "02_batch_size.ipynb", "", "1 / 0")
    code, out, err = workup(capsys, "run", "mine.py:workload", "-p", "lr", "0.5", "--seed", "7", "--notebooks", "02-04")
    assert code == 1
    assert err.splitlines()[0] == "02_batch_size failed: ZeroDivisionError: division by zero (cell In [3])"
    assert err.splitlines()[-1].startswith("Failed: 02_batch_size.")
    assert out.startswith("[1/2] 02_batch_size\n[2/2] 04_learning_rate\nsweep: 3 trials in 1 s\n  done in ")
    row = next(line for line in out.splitlines() if line.startswith("peak_lr"))
    assert row.split()[1:4] == ["0.1", "0.5", "high"]
    assert row.endswith("It trains best.")
    assert "What it is worth: not compared with today's settings yet." in out
    assert "--budget standard --notebooks 11\n" in out
    assert "Report: runs/mine/report.html" in out
    assert (project / "runs" / "mine" / "report.html").stat().st_size > 1000
    executed = nbformat.read(project / "runs/mine/notebooks/04_learning_rate.ipynb", as_version=4)
    given = {"workload": "mine.py:workload", "study": "runs/mine", "device": "auto", "seed": 7, "budget": "standard"}
    assert executed.metadata.papermill.parameters == {**given, "lr": 0.5}


OTHERS = """

def theirs():
    return make(name="theirs")


def broken():
    return make(name="broken", lr=0.3, loss=lambda model, batch: 1 / 0)
"""


def test_several_workloads_run_one_after_another_each_into_its_own_study(project, capsys, monkeypatch):
    (project / "mine.py").write_text(MINE + OTHERS)
    monkeypatch.setattr(workbook, "execute", lambda name, values, out, **_: print(values["workload"], file=out) or "")
    code, out, err = workup(
        capsys, "run", "mine.py:workload", "mine.py:broken", "mine.py:theirs", "--notebooks", "04", "--device", "cpu"
    )
    assert code == 2
    assert "workload 'mine.py:broken'" in err
    begun = ["[1/1] 04_learning_rate", "mine.py:workload", "[1/1] 04_learning_rate", "mine.py:theirs"]
    assert [line for line in out.splitlines() if line in begun] == begun
    assert out.endswith("mine.py:workload: done\nmine.py:broken: failed\nmine.py:theirs: done\n")
    assert (project / "runs/mine/report.html").exists()
    assert (project / "runs/theirs/report.html").exists()


def test_several_workloads_over_a_cluster_say_what_they_said_there(project, capsys, monkeypatch):
    (project / "mine.py").write_text(MINE + OTHERS)
    monkeypatch.setattr(workbook, "execute", lambda *_, **__: "")

    def elsewhere(function, calls, *, device, note):
        assert [asked["executor"] for _, asked in calls] == [None, None]  # there the plain loop trains
        yield 1, function(*calls[1]), ""
        yield 0, None, "its worker was lost 4 times"

    monkeypatch.setattr(cluster, "workbooks", elsewhere)
    how = ("--executor", "ray", "--device", "cpu", "--notebooks", "04")
    code, out, err = workup(capsys, "run", "mine.py:workload", "mine.py:theirs", *how)
    assert (code, err) == (1, "")
    assert out.startswith("== mine.py:theirs\n[1/1] 04_learning_rate\n")
    assert "Error: its worker was lost 4 times\nmine.py:workload: failed\nmine.py:theirs: done\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine.py:workload", "mine.py:make"), "two workloads are named 'mine'"),
        (("mine.py:workload", "mine.py:theirs", "--study", "s"), "each of several workloads has a study of its own"),
    ],
)
def test_several_workloads_that_would_share_a_study_are_a_mistake(project, capsys, no_kernel, arguments, said):
    (project / "mine.py").write_text(MINE + OTHERS)
    code, _, err = workup(capsys, "run", *arguments)
    assert code == 2
    assert said in err


def test_ctrl_c_stops_with_how_to_resume(project, capsys):
    begun = project / "begun"
    cell = f"import pathlib, time\npathlib.Path({str(begun)!r}).write_text('')\ntime.sleep(60)"
    save(project / "books" / "02_batch_size.ipynb", "", cell)

    def press():
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    code, out, err = workup(capsys, "run", "mine.py:workload", "--study", "s")
    pressing.join()
    assert code == 130
    assert out == "[1/3] 02_batch_size\n"
    assert err == "\nStopped. s keeps what was measured; the same command resumes.\n"


# -- the other commands --------------------------------------------------------------------


@pytest.fixture
def study():
    opened = Study.open("runs/mine", workload="mine", fingerprint={"model": "1"})
    evidence = {"losses": [0.1, float("inf")]}
    best = Finding(
        name="best_lr",
        value=0.03,
        rule="playbook: C1",
        summary="It trains best.",
        interval=(0.01, 0.1),
        evidence=evidence,
    )
    hidden = Finding(
        name="stability", value="cannot_tell", rule="playbook: C5", summary="Too short.", settle="Run 500 steps."
    )
    opened.record("04_learning_rate", [best, hidden])
    return opened


def test_show_prints_every_finding_and_what_would_settle_one_that_cannot_be_told(study, capsys):
    code, out, _ = workup(capsys, "show", "runs/mine")
    assert code == 0
    assert out.startswith("mine in runs/mine\n")
    assert "Best learning rate of the short sweep: 0.03 (0.01 to 0.1) [medium confidence]" in out
    assert "To settle it: Run 500 steps." in out


def test_show_as_json_is_strict_json_with_every_finding(study, capsys):
    code, out, _ = workup(capsys, "show", "runs/mine", "--json")
    shown = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == 0
    assert [f["name"] for f in shown["findings"]] == ["best_lr", "stability"]
    assert shown["findings"][0]["interval"] == [0.01, 0.1]
    assert shown["findings"][0]["evidence"]["losses"] == [0.1, "inf"]
    assert shown["prescription"] is None


@pytest.mark.parametrize("command", ["show", "report"])
def test_a_study_that_is_not_there_is_a_mistake(capsys, command):
    code, _, err = workup(capsys, command, "runs/nowhere")
    assert code == 2
    assert err.startswith("Error: study 'runs/nowhere': no folder at ")


def test_report_writes_one_file_and_says_where(study, capsys):
    code, out, _ = workup(capsys, "report", "runs/mine")
    assert (code, out) == (0, "runs/mine/report.html\n")
    assert "It trains best." in (study.folder / "report.html").read_text()


def test_check_prints_every_check_and_ends_with_code_1_only_where_one_fails(project, capsys):
    code, out, _ = workup(capsys, "check", "mine.py:workload")
    assert code == 0
    assert "gradients                  pass" in out
    assert out.splitlines()[-1].startswith("It can be trained; look first at: ")
    (project / "mine.py").write_text(MINE.replace('reduction="none")', 'reduction="none").detach()'))
    code, out, _ = workup(capsys, "check", "mine.py:workload")
    assert code == 1
    assert re.search(r"one batch passes +fail +.*has no gradient", out)
    assert out.splitlines()[-1] == "Not ready to train: one batch passes."


def test_new_writes_a_file_that_passes_its_own_check_and_is_never_overwritten(project, capsys):
    code, out, _ = workup(capsys, "new", "my_workload.py")
    assert (code, out) == (0, "Wrote my_workload.py. It runs as it is: workup check my_workload.py:workload\n")
    written = (project / "my_workload.py").read_text()
    assert "workup run my_workload.py:workload" in written
    assert workup(capsys, "check", "my_workload.py:workload")[0] == 0
    code, _, err = workup(capsys, "new", "my_workload.py")
    assert code == 2
    assert err == "Error: new my_workload.py: it is there already, and stays as it is. Name another.\n"
    assert (project / "my_workload.py").read_text() == written


@pytest.mark.parametrize(("file", "said"), [("w.txt", "ends in .py"), ("mine.py/w.py", "cannot write it")])
def test_new_says_why_it_cannot_write(capsys, file, said):
    code, _, err = workup(capsys, "new", file)
    assert code == 2
    assert said in err


def test_workloads_lists_every_built_in_with_a_line(capsys):
    from workup.workloads import BUILT_IN

    code, out, _ = workup(capsys, "workloads")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == list(BUILT_IN)
    assert all(len(line.split()) > 3 for line in out.splitlines()[2:])


def test_kernels_are_installed_listed_and_removed(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert workup(capsys, "kernels", "list")[1] == "None. `workup kernels install` installs them.\n"
    _, out, _ = workup(capsys, "kernels", "install")
    assert out == "Installed: workup-cpu.\nNo GPU is visible here, so there is only the CPU's kernel.\n"
    assert workup(capsys, "kernels", "list")[1].splitlines()[2].split() == ["workup-cpu", "none", sys.executable]
    assert workup(capsys, "kernels", "remove")[1] == "Removed: workup-cpu.\n"
    assert workup(capsys, "kernels", "remove")[1] == "Removed: none was installed.\n"


def test_help_imports_neither_torch_nor_pandas_nor_papermill():
    look = "import sys, workup.cli\ntry: workup.cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
    look += "print([m for m in ('torch', 'pandas', 'numpy', 'papermill', 'matplotlib') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert "--budget" in ended.stdout


def test_run_on_ray_stops_before_any_notebook_where_no_cluster_answers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "digits-mlp", "--executor", "ray", "--device", "cpu"])
    assert stopped.value.code == 2
    assert "Ray is not installed. pip install 'workup[ray]'" in capsys.readouterr().err
