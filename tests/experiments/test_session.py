import numpy as np
import pytest

from workup import ParameterError, StudyError, Trial, WorkloadError, start
from workup.experiments.session import more_rounds
from workup.finding import Finding

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workup import Workload

x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :3].argmax(1))
calls = []

def loss(model, batch):
    calls.append(1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

def make(**changes):
    fields = dict(name="mine", model=lambda: nn.Linear(8, 3), train_data=data, eval_data=data, loss=loss,
                  optimizer=torch.optim.SGD, batch_size=16, lr=0.1, max_train_steps=100)
    return Workload(**{**fields, **changes})

workload = make()
nan = make(loss=lambda model, batch: loss(model, batch) * float("nan"))
def broken(model, batch):
    raise RuntimeError("shapes cannot be multiplied")
raising = make(loss=broken)
"""
TRIAL = Trial(lr=0.1, steps=5, batch_size=16)


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return {"workload": "mine.py:workload", "study": "runs/mine", "budget": "smoke"}


def begin(given, **changes):
    return start("04_learning_rate", {**given, **changes})


def test_a_study_lands_where_the_relative_path_says(given, tmp_path):
    assert begin(given).study.folder == tmp_path / "runs" / "mine"


def test_a_command_is_one_to_type_with_the_next_budget_and_this_study(given):
    plain = begin({"workload": "mine.py:workload"})
    assert plain.command("02") == "workup run mine.py:workload --notebooks 02 --budget thorough"
    assert plain.command("03", more=False) == "workup run mine.py:workload --notebooks 03"
    smoke = begin(given, study="runs/other").command("02")  # standard is what is run by default
    assert smoke == "workup run mine.py:workload --notebooks 02 --study runs/other"


@pytest.mark.parametrize(
    ("extra", "words"), [(-3, ""), (0, ""), (1, " Measured 1 more round to tell."), (3, " 3 more rounds")]
)
def test_a_finding_says_how_many_more_rounds_it_took(extra, words):
    found = Finding(name="x", value=1, rule="", summary="One.")
    assert more_rounds(found, extra).summary.startswith("One.")
    assert words in more_rounds(found, extra).summary
    assert extra > 0 or more_rounds(found, extra) == found


def test_from_inside_the_notebooks_folder_paths_mean_the_same(given, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "04_learning_rate.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path / "notebooks")
    assert begin(given).study.folder == tmp_path / "runs" / "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "standrad"}, "Did you mean 'standard'"),
        ({"steps": "many"}, "steps='many' must be a whole number"),
        ({"steps": 2.5}, "must be a whole number"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_named(given, changes, message):
    with pytest.raises(ParameterError, match=message):
        begin(given, **changes)


def test_what_papermill_injects_under_an_unknown_name_stops_with_the_nearest(given):
    cells = ["", "# Parameters\nstep = 50\n"]
    with pytest.raises(ParameterError, match=r"no parameter 'step'. Did you mean 'steps'\?"):
        begin(given, In=cells, step=50)
    assert begin(given, In=["step = 50"], step=50).knobs["steps"] is None


def test_numbers_given_as_text_are_understood(given):
    assert begin(given, lr="1e-3", steps="50").knobs == {"lr": 1e-3, "steps": 50, "batch_size": None, "executor": None}


def test_the_environment_stands_in_for_defaults_only(given, monkeypatch):
    monkeypatch.setenv("WORKUP_STUDY", "runs/other")
    monkeypatch.setenv("WORKUP_SEED", "7")
    session = begin(given)
    assert (session.study.folder.name, session.seed) == ("mine", 7)
    del given["study"]
    assert begin(given).study.folder.name == "other"


def test_a_knob_is_taken_as_given_else_found_else_from_the_workload(given):
    session = begin(given)
    assert session.resolve_parameter("lr", finding="best_lr", fallback=0.1) == 0.1
    assert "no best_lr yet" in session.sources["lr"]["from"]
    session.study.record("02_batch_size", [Finding(name="best_lr", value=0.3, rule="C1", summary="…")])
    assert begin(given).resolve_parameter("lr", finding="best_lr", fallback=0.1) == 0.3
    assert begin(given, lr=0.7).resolve_parameter("lr", finding="best_lr", fallback=0.1) == 0.7
    # What this notebook or a later one found is not what it works around: a second run does as the first.
    session.study.record("04_learning_rate", [Finding(name="best_lr", value=0.9, rule="C1", summary="…")])
    assert begin(given).resolve_parameter("lr", finding="best_lr", fallback=0.1) == 0.3
    with pytest.raises(ParameterError, match=r"lr=-1\.0 must be positive"):
        begin(given, lr=-1).resolve_parameter("lr", fallback=0.1)


def test_a_finished_trial_is_read_and_not_run_again(given):
    import sys

    first = begin(given).run([TRIAL])[0]
    session = begin(given)
    calls = sys.modules[session.workload.loss.__module__].calls
    before = len(calls)
    again = session.run([TRIAL])[0]
    assert len(calls) == before
    np.testing.assert_array_equal(first.steps.loss, again.steps.loss)


def test_an_interrupt_keeps_what_was_measured_and_the_trial_runs_again(given, monkeypatch):
    session = begin(given)
    real, seen = session.workload.loss, []

    def interrupted(model, batch):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(model, batch)

    object.__setattr__(session.workload, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run([TRIAL])
    ((_, kept),) = session.study.traces()
    assert (kept.status, len(kept.steps)) == ("interrupted", 3)
    assert session.run([TRIAL])[0].status == "finished"


def test_what_no_setting_can_cause_stops_the_notebook(given):
    with pytest.raises(WorkloadError, match=r"fails at its first step.*shapes cannot be multiplied"):
        begin(given, workload="mine.py:raising").run([TRIAL])
    with pytest.raises(WorkloadError, match="the loss of the first batch is nan before any update"):
        begin(given, workload="mine.py:nan", study="runs/nan").run([TRIAL])


def test_a_changed_workload_is_refused_but_a_comment_is_no_change(given, tmp_path):
    begin(given)
    (tmp_path / "mine.py").write_text(FILE + "\n# a comment\n")
    begin(given)
    (tmp_path / "mine.py").write_text(FILE.replace("nn.Linear(8, 3)", "nn.Linear(8, 4)"))
    with pytest.raises(StudyError, match="changed since: model, code"):
        begin(given)


def test_a_stacked_sweep_gives_the_serial_one_and_the_study_says_what_was_chosen(given, tmp_path):
    trials = [Trial(lr=lr, steps=5, batch_size=16) for lr in (0.03, 0.1)]
    plain = begin(given).run(trials)
    session = begin(given, executor="ensemble", study="runs/stacked")
    stacked = session.run([*trials, trials[0]])
    for ours, theirs in zip(stacked, [*plain, plain[0]], strict=True):
        np.testing.assert_allclose(ours.steps.loss, theirs.steps.loss, rtol=1e-5)
    assert [trace.versions["executor"] for trace in stacked] == ["ensemble"] * 3
    assert "a step of 2 trials takes" in session.sources["executor"]["from"]
    assert [key for key, _ in session.study.traces()] == [key for key, _ in begin(given).study.traces()]


def test_an_unknown_executor_is_a_mistake_in_the_parameters(given):
    with pytest.raises(ParameterError, match=r"executor='ensembel'\. Did you mean 'ensemble'"):
        begin(given, executor="ensembel")
