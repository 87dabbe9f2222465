import pytest

import workup
from workup.errors import ParameterError
from workup.experiments import existing_logs as experiment


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A session of the notebook, with a study of its own."""
    monkeypatch.chdir(tmp_path)
    standard = {"workload": "digits-mlp", "study": "runs/x", "device": "cpu", "budget": "smoke"}
    return lambda **knobs: workup.start("12_existing_logs", {**standard, **knobs})


def test_without_a_log_a_short_trial_is_run_and_read_back(begin):
    session = begin()
    log = experiment.load(session)
    assert log.format == "parquet"
    assert log.table()["step"].tolist() == list(range(60))
    assert set(log.series) >= {"loss", "lr", "grad_norm", "eval_loss", "seconds", "data_seconds", "examples"}
    assert log.notes == ()
    findings = experiment.judge(log)
    names = ["stability", "clip_norm", "throughput", "input_bound", "evaluation_interval", "lr_schedule"]
    assert [finding.name for finding in findings] == names
    assert findings[4].value == 6
    experiment.conclude(session, findings)
    assert set(session.study.findings()) == {f"logged_{name}" for name in names}
    assert session.study.prescription()["clip_norm"] is None


def test_a_given_log_is_read_with_the_columns_given(begin, tmp_path):
    (tmp_path / "log.csv").write_text("n,nll\n1,2.0\n2,1.9\n")
    log = experiment.load(begin(log="log.csv", columns="loss=nll, step = n"))
    assert log.series["loss"].to_dict() == {1: 2.0, 2: 1.9}
    with pytest.raises(ParameterError, match="write it as OURS=THEIRS"):
        experiment.load(begin(log="log.csv", columns="loss"))


def test_a_figure_is_drawn_of_what_was_logged_alone(begin, tmp_path):
    (tmp_path / "log.csv").write_text("step,loss,grad_norm,lr\n1,2.0,,0.1\n2,,3.0,0.2\n3,nan,,0.1\n")
    log = experiment.load(begin(log="log.csv"))
    verdict = experiment.judge(log)[0]
    assert experiment.trace(log, verdict).steps["step"].tolist() == [1, 3]
    norms = experiment.trace(log, verdict, column="grad_norm")
    assert (norms.steps["grad_norm"].tolist(), norms.trial.lr) == ([3.0], 0.2)
    assert len(experiment.trace(log, verdict, column="seconds").steps) == 0


def test_norms_without_an_outlier_leave_clipping_off_and_with_one_name_a_threshold(begin, tmp_path):
    for spike, said in ((1.2, "none"), (90, pytest.approx(1.44, abs=0.02))):
        norms = [*(1 + i * 37 % 99 / 198 for i in range(99)), spike]
        (tmp_path / "log.csv").write_text("loss,grad_norm\n" + "".join(f"1,{norm}\n" for norm in norms))
        clip = experiment.judge(experiment.load(begin(log="log.csv")))[1]
        assert clip.value == said
