"""The first page: the settings, what they are worth, what is open, and the one command that settles it."""

from types import SimpleNamespace

import pytest

from workup.finding import Finding
from workup.judge.prescription import prescribe
from workup.show.summary import HEADER, summary
from workup.study import Study

OWN = SimpleNamespace(batch_size=64, lr=0.1, max_train_steps=1000, schedule=None, precision="fp32")
PEAK = Finding(
    name="peak_lr",
    value=0.0316,
    rule="playbook: C1",
    summary="0.0316.",
    interval=(0.01, 0.1),
    confidence="medium",
    because="best to expect over 1,000 steps",
)
UNKNOWN = Finding(name="warmup_steps", value=None, rule="playbook: D4", summary="No ramp helps.", settle="Try 100 x.")


@pytest.fixture
def made(tmp_path):
    return Study.open(tmp_path / "study", workload="w", fingerprint={})


def record(study, *findings, **about):
    """Each finding as (notebook, finding); the summary of the study then."""
    for notebook, finding in findings:
        study.record(notebook, [finding], **{"workload": "my.py:w", "budget": "standard"} | about)
    study.save_prescription(prescribe(study.findings(), workload=OWN))
    return summary(study)


def gain(**changes):
    how = {"value": 0.03, "interval": (0.01, 0.05), "caveats": ("Short.",)} | changes
    return Finding(name="improvement", rule="F4", summary="Lower.", **how)


def test_a_new_study_says_that_nothing_has_been_concluded(made):
    assert repr(summary(made)) == "Nothing has been concluded yet."
    assert "Nothing has been concluded yet." in summary(made)._repr_html_()


def test_the_settings_stand_beside_todays_with_interval_sureness_and_reason(made):
    first = record(made, ("04_learning_rate", PEAK))
    assert first.settings[:3] == [
        HEADER,
        ("batch_size", "64", "64", "", "", "as you have it"),
        ("peak_lr", "0.1", "0.0316", "0.01 to 0.1", "medium", "best to expect over 1,000 steps"),
    ]
    assert len(first.settings) <= 9
    assert first.worth == "not compared with today's settings yet."
    assert first.command.split()[-4:] == ["--budget", "standard", "--notebooks", "11"]


def test_what_is_surely_not_there_is_no_open_question(made):
    calm = Finding(
        name="unstable_lr", value=None, rule="C7", summary="None.", confidence="high", settle="Sweep higher."
    )
    assert record(made, ("05_instability", calm)).open == []


def test_what_it_is_worth_has_its_interval_and_what_would_make_it_wrong(made):
    first = record(made, ("04_learning_rate", PEAK), ("11_final_run", gain()))
    assert first.worth == "Lower. Difference 0.03 (0.01 to 0.05). But: Short."
    assert first.command == ""


def test_what_could_not_be_told_comes_with_the_cheapest_command_at_a_larger_budget(made):
    bound = Finding(name="input_bound", value=None, rule="F1", summary="Too near.", settle="More.")
    first = record(made, ("03_input_pipeline", bound), ("06_warmup", UNKNOWN), ("11_final_run", gain()))
    assert first.open == [("Warmup steps", "No ramp helps."), ("Bound by its input", "Too near.")]
    expected = f"workup run my.py:w --study {made.folder} --budget thorough --notebooks 06"
    assert first.command == expected
    assert first.command in repr(first)


def test_a_conflict_is_said_and_its_notebook_run_before_anything_else(made):
    stale = Finding(name="clip_norm", value=2.0, rule="E3", summary="2.", at={"lr": 0.9})
    first = record(made, ("04_learning_rate", PEAK), ("06_warmup", UNKNOWN), ("07_clipping", stale))
    assert "Clipping was judged at lr 0.9" in first.conflicts[0]
    assert first.command.endswith("--budget standard --notebooks 07")


def test_a_comparison_of_other_settings_is_not_sold_as_their_worth(made):
    first = record(made, ("04_learning_rate", PEAK), ("11_final_run", gain(at={"lr": 0.5})))
    assert first.worth.startswith("The comparison over seeds was of other settings")
    assert first.conflicts == []
    assert first.command.endswith("--notebooks 11")


def test_names_that_a_shell_would_read_are_quoted_and_every_text_on_the_page_escaped(made):
    evil = Finding(name="input_bound", value=None, rule="F1", summary="<script>", settle="More.")
    first = record(made, ("03_input_pipeline", evil), workload="a b.py:w; rm -rf ~")
    assert "'a b.py:w; rm -rf ~'" in first.command
    assert "<script" not in first._repr_html_()
