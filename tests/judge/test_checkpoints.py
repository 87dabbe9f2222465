import numpy as np
import pandas as pd
import pytest

from workup.judge import checkpoints


def runs(present, prescribed, **columns):
    rows = [("present", i, v) for i, v in enumerate(present)] + [("prescribed", i, v) for i, v in enumerate(prescribed)]
    return pd.DataFrame(rows, columns=["settings", "seed", "best"]).assign(**columns)


def test_a_clear_gain_is_told_with_students_interval():
    found = checkpoints.judge(runs([1.0, 1.1, 1.2], [0.5, 0.6, 0.8]))
    gains = np.array([0.5, 0.5, 0.4])
    half = 4.303 * gains.std(ddof=1) / np.sqrt(3)
    assert found.value == pytest.approx(gains.mean())
    assert found.interval == pytest.approx((gains.mean() - half, gains.mean() + half))


def test_a_loss_is_told_as_loudly_as_a_gain():
    found = checkpoints.judge(runs([0.5, 0.6, 0.7], [1.0, 1.1, 1.2]))
    assert found.value == pytest.approx(-0.5)
    assert "HIGHER" in found.summary


@pytest.mark.parametrize(
    ("present", "prescribed", "words"),
    [
        ([1.0, 1.2, 0.8], [0.9, 1.3, 0.8], "No difference that 3 seeds can show"),
        ([1.0], [0.5], "Fewer than two pairs"),
        ([1.0, 1.0], [np.nan, np.nan], "keep the present ones"),
    ],
)
def test_what_cannot_be_told_says_why_and_what_would_settle_it(present, prescribed, words):
    found = checkpoints.judge(runs(present, prescribed))
    assert found.value is None
    assert words in found.summary
    assert found.settle


def test_a_difference_too_small_to_matter_is_an_answer():
    table = runs([1.0, 1.001, 0.999], [0.999, 1.001, 1.0], initial=[2.3] * 6)
    found = checkpoints.judge(table)
    assert found.is_conclusive
    assert found.summary.startswith("No difference that matters")
    assert found.evidence["matters"] is False
    assert abs(found.evidence["share_of_descent"]) < 0.001


def test_the_same_loss_in_less_time_is_told_with_its_interval():
    table = runs([1.0, 1.001, 0.999], [0.999, 1.001, 1.0], initial=[2.3] * 6, to_goal=[10, 11, 9, 4, 4.4, 3.6])
    facts = checkpoints.judge(table).evidence
    assert facts["time"] == pytest.approx(0.4)
    assert facts["time_interval"] == pytest.approx((0.4, 0.4))
    assert facts["faster"]
    assert "in 40% of the time (40% to 40%)" in checkpoints.judge(table).summary
    for slow in ([10, 11, 9, 4, 12, 9], [10, 11, 9, 4, np.nan, 4]):
        assert not checkpoints.judge(table.assign(to_goal=slow)).evidence["faster"]


def test_present_settings_that_never_train_lose_to_any_that_do():
    assert checkpoints.judge(runs([np.nan, np.nan], [0.5, 0.6])).value == np.inf


def test_prescribed_runs_that_became_unstable_are_told_beside_a_gain():
    table = runs([1.0, 1.1, 1.2], [0.5, 0.6, 0.7], stability=["stable"] * 5 + ["mid"])
    assert checkpoints.judge(table).caveats == ("1 of 3 prescribed runs became unstable: take a lower peak_lr.",)


def test_a_gain_over_a_small_part_of_the_run_is_of_low_confidence_and_says_so():
    found = checkpoints.judge(runs([1.0, 1.1, 1.2], [0.5, 0.6, 0.8]), share=0.04)
    assert found.confidence == "low"
    assert found.caveats[0].startswith("Trained for 4% of the run's steps, with a rate meant for all of them: ")
    assert checkpoints.judge(runs([1.0, 1.1, 1.2], [0.5, 0.6, 0.8])).caveats == ()


def test_more_examples_in_as_many_steps_are_told():
    table = runs([1.0, 1.1, 1.2], [0.5, 0.6, 0.8], examples=[640] * 3 + [1280] * 3)
    assert checkpoints.judge(table).caveats == ("Steps are equal: the prescribed runs saw 2 times as many examples.",)


def test_what_was_compared_is_named_and_full_runs_are_not_asked_to_be_longer():
    found = checkpoints.judge(runs([1.0, 1.2, 0.8], [0.9, 1.3, 0.8]), what="training loss")
    assert "best training loss" in found.summary
    assert found.settle == "Run more seeds."


@pytest.mark.parametrize(
    ("last", "words"), [(0.63, ()), (0.9, ("3 of 3 prescribed runs overfit", "step 40", "0.27 at"))]
)
def test_runs_that_end_well_above_their_best_are_said_to_overfit(last, words):
    found = checkpoints.judge(runs([1.0, 1.1, 1.2], [0.6, 0.6, 0.7], initial=5.0, best_step=40, last=last))
    said = " ".join(found.caveats)
    assert all(word in said for word in words)
    assert ("overfit" in said) == bool(words)
