import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge import warmup
from workup.judge.difference import compare


def rows(finals, lr=1.0, start=2.3):
    return [
        {
            "warmup_steps": w,
            "seed": 0,
            "lr": lr,
            "status": "finished" if f == f else "diverged",
            "final": f,
            "initial": start,
        }
        for w, f in finals.items()
    ]


NAN = float("nan")


def test_the_shortest_that_trains_is_taken_and_bracketed():
    found = warmup.judge(rows({0: NAN, 10: 2.4, 100: 0.3, 1000: 0.29}), baseline=0.5, max_train_steps=10_000)
    assert found.value == 100
    assert found.interval == (10, 100)
    assert found.evidence["peak_lr"] == 1.0
    assert found.caveats == ()


def test_the_lengths_beyond_a_twentieth_of_the_run_are_warned_of():
    found = warmup.judge(rows({10: NAN, 100: 0.3}), max_train_steps=1000)
    assert "max_train_steps" in found.caveats[0]


def test_the_highest_peak_that_opens_counts():
    found = warmup.judge(rows({10: 0.4, 100: 0.4}, lr=1.0) + rows({10: NAN, 100: 0.3}, lr=10.0))
    assert (found.value, found.evidence["peak_lr"]) == (100, 10.0)


def test_no_warmup_needed_is_a_finding():
    found = warmup.judge(rows({0: 0.3, 10: 0.3}))
    assert (found.value, found.evidence["needed"]) == (0, False)
    assert "No warmup is needed" in found.summary


def test_a_ramp_that_lowers_the_loss_is_taken_though_its_peak_trains_without():
    assert warmup.judge(rows({0: 0.5, 10: 0.49, 100: 0.3}), baseline=0.5).value == 100
    found = warmup.judge(rows({0: 0.5, 10: 0.49, 100: 0.489}), baseline=0.5)
    assert found.value == 0
    assert found.summary == (
        "No warmup is needed: lr 1 trains without, and a run with a ramp ends where one without does, to within "
        "0.61% of the descent."
    )


def test_no_warmup_enough_is_a_finding_that_says_what_else():
    found = warmup.judge(rows({0: NAN, 100: NAN, 1000: 2.4}))
    assert (found.value, found.evidence["enough"]) == (0, False)
    assert "clip, or change the model" in found.summary


def test_a_peak_that_trains_worse_than_without_is_not_recommended():
    found = warmup.judge(rows({0: NAN, 100: 0.8}), baseline=0.5)
    assert (found.value, found.evidence["peak_lr"], found.evidence["opens_with"]) == (0, None, 100)


def test_most_seeds_must_train():
    table = rows({10: 0.3, 100: 0.3}) + rows({10: NAN, 100: 0.3})
    assert warmup.judge(table).value == 100


def test_nothing_tried_cannot_be_told():
    assert not warmup.judge([]).is_conclusive


def test_a_missing_column_is_named():
    with pytest.raises(ParameterError, match="warmup_steps"):
        warmup.judge([{"lr": 1.0, "final": 0.3}])


@pytest.mark.parametrize("finals", [{0: 0.3, 10: 0.3}, {0: NAN, 10: NAN}, {}])
def test_where_trials_failed_it_is_told_neither_that_no_warmup_is_needed_nor_that_none_is_enough(finals):
    failed = {"warmup_steps": 100, "lr": 10.0, "status": "failed", "final": NAN, "reason": "step 3: ValueError: oops"}
    found = warmup.judge([*rows(finals), failed])
    assert not found.is_conclusive
    assert f"1 of {len(finals) + 1} trials failed (step 3: ValueError: oops)" in found.summary


def test_a_warmup_that_works_is_told_though_another_trial_failed():
    failed = {"warmup_steps": 100, "lr": 10.0, "status": "out_of_memory", "final": NAN}
    assert warmup.judge([*rows({0: NAN, 10: 0.3}), failed]).value == 10


def test_a_peak_that_sticks_on_a_plateau_without_a_ramp_does_not_train():
    """A post-norm transformer started too hot neither rises nor diverges: it stays where it is."""
    steps = np.arange(300)
    goes_on, plateau = 2.5 + 3 * np.exp(-steps / 80), 3.1 + 2.5 * np.exp(-steps / 5)
    rows = [
        {"warmup_steps": ramp, "lr": 0.003, "status": "finished", "final": loss[-30:].mean(), "loss": loss}
        for ramp, loss in ((0, plateau), (10, plateau), (100, goes_on - 0.1))
    ]
    known = {"baseline": float(goes_on[-30:].mean()), "max_train_steps": 5000}
    assert warmup.judge(pd.DataFrame(rows), curve=goes_on, **known).value == 100
    # Without the goes-on trial's curve the plateau passes for trained; the ramp that pays is taken all the same.
    assert warmup.judge(pd.DataFrame(rows[:2]), **known).value == 0
    assert warmup.judge(pd.DataFrame(rows), **known).value == 100
    assert not warmup.judge(pd.DataFrame(rows[:2]), curve=goes_on, **known).evidence["enough"]


def test_where_the_shortest_ramp_that_trains_does_not_pay_a_longer_one_that_does_is_taken():
    found = warmup.judge(pd.DataFrame(rows({0: float("nan"), 10: 0.6, 100: 0.4})), baseline=0.5)
    assert (found.value, found.evidence["peak_lr"], found.interval) == (100, 1.0, (10, 100))
    assert warmup.judge(pd.DataFrame(rows({0: float("nan"), 10: 0.6, 100: 0.5})), baseline=0.5).value == 0


@pytest.mark.parametrize("steps", [-1, NAN, 0.5, float("inf"), None, "x"])
def test_a_number_of_warmup_steps_that_is_none_is_named(steps):
    with pytest.raises(ParameterError, match="warmup_steps"):
        warmup.judge([{"warmup_steps": steps, "lr": 1.0, "final": 0.3}])


@pytest.mark.parametrize(
    "setting", [{"baseline": "x"}, {"max_train_steps": 0}, {"max_train_steps": "x"}, {"curve": ["a"]}, {"curve": 3}]
)
def test_a_setting_that_is_no_number_is_named(setting):
    with pytest.raises(ParameterError, match=next(iter(setting))):
        warmup.judge(rows({0: NAN, 10: 0.3}), **setting)


@pytest.mark.parametrize("baseline", [NAN, float("inf"), None])
def test_a_trial_at_lr_star_that_did_not_end_finite_is_none_to_compare_with(baseline):
    found = warmup.judge(rows({0: NAN, 10: 0.3}), baseline=baseline)
    assert (found.value, found.evidence["needed"], found.evidence["baseline"]) == (10, True, None)


def test_text_and_generators_are_read_as_tables_of_numbers():
    trials = [*rows({0: NAN, 10: 0.3}), {"warmup_steps": 5, "lr": 1.0, "status": "failed", "final": NAN}]
    found = warmup.judge(trials, baseline=0.5, max_train_steps=100)
    text = [{k: v if k == "status" else str(v) for k, v in row.items()} for row in trials]
    assert warmup.judge(text, baseline="0.5", max_train_steps="100") == found
    lost = [{**row, "final": NAN} for row in trials]
    assert warmup.judge(row for row in lost) == warmup.judge(lost)
    assert not warmup.judge(lost).is_conclusive


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.one_of(st.integers(1, 24).map(lambda k: k / 8), st.just(NAN)), min_size=4, max_size=4),
    st.integers(-200, 200),
    st.integers(-8, 8),
)
def test_scaled_or_shifted_losses_ask_for_the_same_warmup(finals, power, shift):
    def judged(move):
        table = rows({w: move(f) for w, f in zip((0, 10, 100, 1000), finals, strict=True)}, start=move(2.25))
        found = warmup.judge(table, baseline=move(0.5))
        return found.value, found.interval, found.evidence["needed"], found.evidence["peak_lr"]

    assert judged(lambda f: f * 2.0**power) == judged(lambda f: f + shift) == judged(lambda f: f)


def opened():
    return warmup.judge(rows({0: NAN, 10: 2.4, 100: 0.3}), baseline=0.5)


PEAK = Finding(name="peak_lr", value=0.4, interval=(0.2, 0.8), rule="C1", summary="0.4 for all.", confidence="low")


def test_a_ramp_that_pays_over_seeds_brings_the_rate_found_with_it_in_place():
    found = warmup.confirm(opened(), compare([0.3, 0.31, 0.3], [0.5, 0.5, 0.51], 2.3), PEAK)
    facts = found.evidence
    assert (found.value, facts["opened_lr"], facts["peak_lr"]) == (100, 1.0, 0.4)
    assert (facts["peak_interval"], facts["peak_confidence"]) == ((0.2, 0.8), "low")
    assert "3 seeds" in found.because


def test_a_ramp_that_pays_at_one_seed_only_is_not_needed():
    found = warmup.confirm(opened(), compare([0.3, 0.8, 0.5], [0.5, 0.5, 0.5], 2.3), None)
    assert (found.value, found.evidence["peak_lr"], found.evidence["needed"]) == (0, None, False)
    assert found.summary.startswith("No warmup is needed: 100 steps open lr 1, but it ends ")


def test_where_the_rate_with_the_ramp_cannot_be_told_neither_can_the_warmup():
    inconclusive = Finding(name="peak_lr", value=None, rule="C1", summary="It moves.", settle="Train longer.")
    found = warmup.confirm(opened(), compare([0.3] * 3, [0.5] * 3, 2.3), inconclusive)
    assert not found.is_conclusive
    assert found.settle == "It moves. Train longer."
