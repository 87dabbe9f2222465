"""Each contradiction, planted; and a study without any, which has none."""

import dataclasses
from pathlib import Path

import pytest

from workup import Finding
from workup.judge.prescription import CONTRADICTIONS, prescribe


class Own:
    batch_size, lr, max_train_steps, schedule, precision = 64, 0.1, 1000, None, "fp32"


FROM = {
    "recommended_batch_size": "02_batch_size",
    "max_feasible_batch_size": "02_batch_size",
    "input_bound": "03_input_pipeline",
    "best_lr": "04_learning_rate",
    "peak_lr": "04_learning_rate",
    "stability": "05_instability",
    "unstable_lr": "05_instability",
    "recommended_fix": "05_instability",
    "warmup_steps": "06_warmup",
    "clip_norm": "07_clipping",
    "clipped_fraction": "07_clipping",
    "improvement": "11_final_run",
}


def found(name, value, **more):
    inconclusive = {"settle": "more"} if value is None else {}
    return Finding(
        name=name, value=value, rule="playbook: C1", summary=f"{name}.", experiment=FROM[name], **inconclusive | more
    )


def together(*findings):
    return prescribe({finding.name: finding for finding in findings}, workload=Own)


#: A study whose findings agree: each judged around the rate, size and warmup that are prescribed.
AT = {"lr": 0.05, "batch_size": 64}
AGREEING = (
    found("recommended_batch_size", 64),
    found("max_feasible_batch_size", 256, evidence={"largest_tried": 300}),
    found("input_bound", False),
    found("best_lr", 0.2, at={"batch_size": 64}),
    found("peak_lr", 0.05, interval=(0.02, 0.2), confidence="high", at={"batch_size": 64}, because="over 1,000 steps"),
    found("stability", "stable", at=AT),
    found("unstable_lr", 0.5, evidence={"stable_up_to": 0.25}, at=AT),
    found("recommended_fix", "none", at=AT),
    found("warmup_steps", 0, at=AT),
    found("clip_norm", "none", at={**AT, "warmup_steps": 0}),
    found("clipped_fraction", 0.0),
    found("improvement", 0.02, at={**AT, "warmup_steps": 0, "clip_norm": None}),
)


def planted(*changed):
    """The agreeing study with some findings replaced; None takes one away."""
    names = {finding.name for finding in changed}
    return together(*[f for f in AGREEING if f.name not in names], *changed)


def named(prescription):
    return [conflict.name for conflict in prescription.conflicts]


def line(prescription, name):
    return next(setting for setting in prescription.settings if setting.name == name)


def test_findings_that_agree_have_no_conflict():
    made = planted()
    assert made.conflicts == ()
    assert made.tried == {"lr": 0.05, "batch_size": 64, "warmup_steps": 0, "clip_norm": None}
    peak = line(made, "peak_lr")
    assert (peak.today, peak.value, peak.interval) == (0.1, 0.05, (0.02, 0.2))
    assert (peak.confidence, peak.why, peak.source) == ("high", "over 1,000 steps", "04_learning_rate")


def test_without_findings_all_stays_as_the_user_has_it():
    made = together()
    assert (made.batch_size, made.peak_lr, made.warmup_steps, made.clip_norm) == (64, 0.1, 0, None)
    assert made.max_train_steps == 1000
    assert {(setting.why, setting.confidence, setting.source) for setting in made.settings} == {
        ("as you have it", "", "")
    }


def test_the_short_sweeps_best_rate_is_not_the_one_prescribed():
    assert together(found("best_lr", 0.2)).peak_lr == Own.lr
    assert together(found("best_lr", 0.2), found("peak_lr", 0.05)).peak_lr == 0.05


RAMP = {"peak_lr": 0.4, "peak_interval": (0.2, 0.6), "peak_confidence": "low"}

#: name -> (findings planted, what the prescription is then, notebooks to run, words of the sentence)
PLANTED = {
    "own rate fails": (
        [found("peak_lr", None), found("best_lr", 0.02), found("unstable_lr", 0.08), found("stability", "mid")],
        {"peak_lr": 0.02},
        "",
        "your own, 0.1, does not train",
    ),
    "unstable as prescribed": (
        [found("unstable_lr", 0.05, evidence={"stable_up_to": 0.0125}, at=AT), found("stability", "diverged", at=AT)],
        {"peak_lr": 0.0125},
        "",
        "0.05 was expected to train best, but proved unstable",
    ),
    "warmup at another rate": (
        [found("warmup_steps", 100, evidence=RAMP, at={"lr": 0.5})],
        {"peak_lr": 0.05, "warmup_steps": 0, "max_train_steps": 1000},
        "06",
        "judged around lr 0.5, and 0.05 is prescribed",
    ),
    "warmup raises the rate": (
        [
            found("warmup_steps", 100, evidence=RAMP, at=AT),
            found("clip_norm", "none", at={"lr": 0.4, "warmup_steps": 100}),
        ],
        {"peak_lr": 0.4, "warmup_steps": 100, "max_train_steps": 1100},
        "",
        "100 steps of it open 0.4",
    ),
    "clipping at other settings": (
        [found("clip_norm", 0.37, at={"lr": 0.63, "warmup_steps": 0}), found("clipped_fraction", 0.2)],
        {"clip_norm": None},
        "07",
        "judged at lr 0.63",
    ),
    "clips most steps": (
        [found("clip_norm", 2.0, at={**AT, "warmup_steps": 0}), found("clipped_fraction", 0.8)],
        {"clip_norm": None},
        "",
        "clip 80% of the updates",
    ),
    "clipping raises the rate": (
        [found("clip_norm", 2.0, evidence={"peak_lr": 0.3}, at={**AT, "warmup_steps": 0})],
        {"peak_lr": 0.3, "clip_norm": 2.0},
        "",
        "clipping opens 0.3",
    ),
    "no room above": (
        [found("unstable_lr", 0.09, evidence={"stable_up_to": 0.05}, at=AT)],
        {"peak_lr": 0.05},
        "",
        "0.05 trains, but 0.09 does not",
    ),
    "rate of another batch size": (
        [found("recommended_batch_size", 256)],
        {"batch_size": 64},
        "04-07",
        "Batches of 256 are recommended",
    ),
    "batch does not fit": (
        [
            found("recommended_batch_size", 512),
            found("peak_lr", 0.05, at={"batch_size": 512}),
            found("max_feasible_batch_size", 256, evidence={"largest_tried": 300}),
        ],
        {"batch_size": 256},
        "04-07",
        "Batches of 512 do not fit",
    ),
    "input limits throughput": (
        [
            found("recommended_batch_size", 128, confidence="high"),
            found("peak_lr", 0.05, at={"batch_size": 128}),
            found("input_bound", True),
        ],
        {"batch_size": 128},
        "03",
        "training waits for its input",
    ),
    "fix changes code": ([found("recommended_fix", "adam", at=AT)], {"peak_lr": 0.05}, "04-07", "changes your code"),
    "fix not confirmed": (
        [found("recommended_fix", "warmup+clipping", at=AT)],
        {"warmup_steps": 0, "clip_norm": None},
        "",
        "brings nothing there",
    ),
    "compared other settings": (
        [found("improvement", 0.02, at={"lr": 0.2, "batch_size": 64})],
        {"peak_lr": 0.05},
        "11",
        "was of other settings",
    ),
    "brings nothing": (
        [found("improvement", 0.0001, evidence={"matters": False}, at={**AT, "warmup_steps": 0, "clip_norm": None})],
        {"peak_lr": 0.1, "batch_size": 64},
        "",
        "peak_lr 0.05 would train as well, and no faster",
    ),
    "worse than today": (
        [found("improvement", -0.02, at={**AT, "warmup_steps": 0, "clip_norm": None})],
        {"peak_lr": 0.1, "batch_size": 64},
        "",
        "WORSE than today's",
    ),
}


def test_every_contradiction_is_planted_here():
    assert list(PLANTED) == list(CONTRADICTIONS)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_named_and_resolved_as_its_table_says(name):
    findings, expected, run, words = PLANTED[name]
    made = planted(*findings)
    conflict = next(conflict for conflict in made.conflicts if conflict.name == name)
    assert {key: getattr(made, key) for key in expected} == expected
    assert conflict.run == run
    assert words in conflict.text
    assert CONTRADICTIONS[name].rule in conflict.text


def test_the_table_for_contributors_names_every_contradiction():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    for name, one in CONTRADICTIONS.items():
        assert f"| {name} | {one.rule.removeprefix('playbook: ')} | {one.when} | {one.does} |" in page


def test_a_raised_rate_carries_the_interval_and_certainty_it_was_found_with():
    peak = line(planted(*PLANTED["warmup raises the rate"][0]), "peak_lr")
    assert (peak.value, peak.interval, peak.confidence, peak.source) == (0.4, (0.2, 0.6), "low", "06_warmup")


def test_a_warmup_that_opens_no_rate_worth_having_is_not_prescribed():
    made = planted(found("warmup_steps", 100, at=AT))
    assert made.warmup_steps == 0
    assert "none is prescribed" in made.conflicts[0].text


def test_a_rate_near_the_edge_is_less_sure():
    near = planted(*PLANTED["no room above"][0])
    assert line(near, "peak_lr").confidence == "medium"
    nearer = planted(found("unstable_lr", 0.06, at=AT))
    assert line(nearer, "peak_lr").confidence == "low"


def test_an_unstable_rate_below_which_none_was_calm_is_kept_with_low_confidence():
    made = planted(found("unstable_lr", 0.05, at=AT), found("stability", "mid", at=AT))
    assert (made.peak_lr, line(made, "peak_lr").confidence) == (0.05, "low")
    assert made.conflicts[0].run == "05"


def test_a_single_trials_fix_that_was_not_judged_yet_is_said_to_be_open():
    made = together(found("peak_lr", 0.05), found("recommended_fix", "clipping"))
    assert [(conflict.name, conflict.run) for conflict in made.conflicts] == [("fix not confirmed", "07")]


def test_settings_that_end_no_lower_but_sooner_are_prescribed():
    gain = AGREEING[-1]
    sooner = dataclasses.replace(gain, value=-0.0001, evidence={"matters": False, "faster": True})
    assert planted(sooner).peak_lr == 0.05


@pytest.mark.parametrize("one", PLANTED)
@pytest.mark.parametrize("other", PLANTED)
def test_two_contradictions_at_once_still_give_settings_to_train_with(one, other):
    made = planted(*{finding.name: finding for finding in (*PLANTED[one][0], *PLANTED[other][0])}.values())
    assert made.peak_lr > 0
    assert made.batch_size in (64, 128, 256)
    assert made.max_train_steps == Own.max_train_steps + made.warmup_steps
    # A warmup or a threshold that raised the rate is prescribed with that rate alone.
    assert made.peak_lr != 0.4 or made.warmup_steps == 100
    assert made.peak_lr != 0.3 or made.clip_norm == 2.0
