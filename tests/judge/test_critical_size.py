import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.finding import NO_MATTER
from workup.judge import critical_size as judge

SIZES = [2**k for k in range(3, 13)]
SPEEDS = pd.DataFrame(
    {"batch_size": SIZES, "examples_per_second": 100.0, "step_seconds": [size / 100 for size in SIZES]}
)


def test_costs_follow_the_papers_law_and_meet_todays_run():
    table = judge.costs(SPEEDS, 128, present=64, steps=3000)
    at = table.set_index("batch_size")
    assert at.loc[64, "steps"] == pytest.approx(3000)
    assert at.loc[128, "steps"] == pytest.approx(2 * 3000 / 3)
    assert at.loc[4096, "steps"] == pytest.approx(3000 / 3 * (1 + 128 / 4096))
    assert at["examples"].tolist() == pytest.approx((at.index * at["steps"]).tolist())
    assert at.loc[64, "seconds"] == pytest.approx(3000 * 0.64)


@settings(max_examples=50, deadline=None)
@given(critical=st.floats(0, 1e6), present=st.sampled_from(SIZES))
def test_a_larger_batch_never_needs_more_steps_nor_fewer_examples(critical, present):
    table = judge.costs(SPEEDS, critical, present=present, steps=1000)
    assert (table["steps"].diff().dropna() <= 1e-6).all()
    assert (table["examples"].diff().dropna() >= -1e-6).all()


def noise_rows(
    trace, length, *, loss=1.0, small=32, large=512, population=0, draws=50, spread=0.0, steps=(0, 100), seed=0
):
    rng = np.random.default_rng(seed)
    rows = []
    for step in steps:
        for draw in range(draws):
            off = rng.normal(0, spread, 2)
            norms = [length + trace / small + off[0], length + trace / large + off[1]]
            rows.append([step, draw, small, large, population, loss, *norms])
    names = ["step", "draw", "small", "large", "population", "loss", "small_norm2", "large_norm2"]
    return pd.DataFrame(rows, columns=names)


def test_the_critical_size_is_that_of_the_law_summed_over_a_trainings_steps():
    both = pd.concat([noise_rows(100.0, 1.0, steps=[0]), noise_rows(300.0, 1.0, steps=[100])])
    found = judge.critical(both)
    assert found.evidence["noise_scale_by_step"] == pytest.approx({"0": 100, "100": 300})
    fewest = 1 / (1 + 100 / 32) + 1 / (1 + 300 / 32)  # what two steps at 32 are worth without noise
    examples = 32 * (2 - fewest)
    assert found.value == round(examples / fewest)
    assert found.evidence["noise_scale_interval"] == pytest.approx((examples / fewest,) * 2)
    assert found.interval == pytest.approx((examples / fewest / judge.ROUGH, examples / fewest * judge.ROUGH))


def test_steps_after_most_of_the_losss_fall_count_no_more():
    falls = [(0, 100.0, 2.0), (50, 100.0, 1.2), (100, 900.0, 1.05), (150, 900.0, 1.0)]
    rows = [noise_rows(trace, 1.0, steps=[step], loss=loss) for step, trace, loss in falls]
    assert judge.critical(pd.concat(rows)).value == 100
    assert judge.critical(pd.concat(rows)).evidence["noise_scale_by_step"].keys() == {"0", "50"}


def test_steps_that_noise_makes_endless_are_no_part_of_the_fewest():
    lost = pd.concat([noise_rows(100.0, 1.0, steps=[0]), noise_rows(100.0, -10.0, steps=[100])])
    found = judge.critical(lost)
    assert found.evidence["noise_scale_by_step"]["100"] == float("inf")
    assert found.value == round(32 * (2 * (1 + 100 / 32) - 1))


def test_a_gradient_lost_in_its_noise_cannot_tell():
    found = judge.critical(noise_rows(1000.0, 0.01, spread=2.0, draws=6))
    assert found.value is None
    assert "lost in its noise" in found.summary
    assert not judge.critical(noise_rows(100.0, -10.0)).is_conclusive


# -- what it decides --------------------------------------------------------------------------

LAW = pd.DataFrame({"batch_size": SIZES, "examples_per_second": 1.0, "step_seconds": [0.01 * (60 + n) for n in SIZES]})
FOUND = judge.critical(noise_rows(100.0, 1.0))


def around(low, high, **more):
    return dataclasses.replace(FOUND, interval=(low, high), **more)


def test_the_regret_is_that_of_each_time_against_the_best_at_the_worst_critical_size():
    worst = judge.regrets(LAW, around(20, 500))
    step = LAW.set_index("batch_size")["step_seconds"]
    times = {b: step * (1 + b / step.index) for b in np.geomspace(20, 500, 50)}
    slow = pd.concat([time / time.min() - 1 for time in times.values()], axis=1).max(axis=1)
    assert worst.to_dict() == pytest.approx(slow.to_dict(), abs=1e-6)


def test_where_the_size_is_known_the_best_has_no_regret_and_without_end_throughput_decides():
    assert judge.regrets(LAW, around(100, 100)).min() == pytest.approx(0, abs=1e-9)
    endless = judge.regrets(LAW, around(1e9, math.inf))
    assert endless.idxmin() == 4096
    assert endless[64] == pytest.approx((124 / 64) / (4156 / 4096) - 1, rel=1e-3)
    assert judge.regrets(LAW, dataclasses.replace(FOUND, value=None, interval=None, settle="x")).empty
    assert judge.regrets(LAW.iloc[:0], around(1, 2)).empty


@settings(max_examples=30, deadline=None)
@given(unit=st.sampled_from([1e-6, 0.25, 1e4]), low=st.floats(0.1, 1e3), wider=st.floats(1, 100))
def test_the_regret_does_not_depend_on_the_unit_of_time_and_grows_with_the_interval(unit, low, wider):
    here = judge.regrets(LAW, around(low, 2 * low))
    scaled = judge.regrets(LAW.assign(step_seconds=LAW["step_seconds"] * unit), around(low, 2 * low))
    assert scaled.to_dict() == pytest.approx(here.to_dict(), abs=1e-6)
    assert (judge.regrets(LAW, around(low / wider, 2 * low)) >= here - 1e-3).all()


def test_one_sizes_luck_is_not_taken_for_what_it_can_do():
    lucky = LAW.assign(step_seconds=LAW["step_seconds"] * np.where(LAW["batch_size"] == 128, 0.8, 1))
    smooth, bare = judge.regrets(lucky, around(100, 100))[64], judge.regrets(LAW, around(100, 100))[64]
    assert smooth - bare < 0.1


def test_a_size_that_is_good_wherever_the_critical_one_lies_makes_it_not_matter():
    worst = pd.Series({64: 0.5, 128: 0.18})
    found = judge.judged(around(20, 500), worst, 128, settle="workup run x")
    assert (found.value, found.confidence, found.unit, found.interval) == (NO_MATTER, "medium", "", (20, 500))
    assert found.evidence["estimate"] == FOUND.value
    assert found.evidence["longer_at_most"] == 0.18
    assert "batches of 128 take at most 18% longer" in found.summary
    endless = judge.judged(around(20, math.inf), worst, 128, settle="x")
    assert "anywhere above 20" in endless.summary


def test_one_that_matters_stays_and_names_what_would_settle_it():
    kept = judge.judged(around(20, 500), pd.Series({64: 0.5}), 64, settle="workup run x")
    assert (kept.value, kept.confidence, kept.settle) == (FOUND.value, "low", "workup run x")
    assert "Batches of 64 could take 50% longer" in kept.summary
    assert judge.judged(around(20, 500), pd.Series(dtype=float), None, settle="y").settle == "y"
    measured = dataclasses.replace(FOUND, confidence="medium")
    assert judge.judged(measured, pd.Series({64: 0.1}), 64, settle="x") == measured
    few = judge.critical(noise_rows(100.0, 1.0).iloc[:0])
    assert judge.judged(few, pd.Series(dtype=float), 64, settle="x").settle == "A smaller batch size or more data."


def test_draws_that_disagree_are_not_clear():
    assert judge.clear(noise_rows(100.0, 1.0, steps=[0], spread=0.05, draws=6))
    assert not judge.clear(noise_rows(1000.0, 0.01, steps=[0], spread=2.0, draws=6))


# -- by experiment ----------------------------------------------------------------------------


def goal_rows(law, sizes=(16, 64, 256, 1024)):
    """Three rates a size: one that never reaches the goal, the best one, and one at half its speed."""
    rows = [(n, lr, steps) for n in sizes for lr, steps in [(0.1, math.nan), (0.2, law(n)), (0.4, 2 * law(n))]]
    return pd.DataFrame(rows, columns=["batch_size", "lr", "steps"])


def test_the_critical_size_by_experiment_is_the_laws_own_at_the_best_rate_of_each_size():
    found = judge.measured_critical(goal_rows(lambda n: 50 * (1 + 120 / n)))
    assert found.value == 120
    assert found.interval == pytest.approx((120, 120))
    assert "fewest steps (50)" in found.summary


def test_its_interval_holds_what_is_found_without_one_of_the_sizes():
    rows = goal_rows(lambda n: 50 * (1 + 120 / n))
    rows.loc[rows["batch_size"] == 64, "steps"] *= 1.2
    found = judge.measured_critical(rows)
    low, high = found.interval
    assert low == pytest.approx(120)  # without the size that is off
    assert low < found.value < high


@pytest.mark.parametrize("law", [lambda n: 100 + n / 10, lambda n: 1e5 / n**1.2])
def test_steps_that_do_not_bend_within_the_sizes_tried_cannot_tell(law):
    found = judge.measured_critical(goal_rows(law))
    assert not found.is_conclusive
    assert "lies outside" in found.summary


def test_a_goal_reached_at_two_sizes_only_cannot_tell():
    assert not judge.measured_critical(goal_rows(lambda n: 10, sizes=(8, 16))).is_conclusive
    assert not judge.measured_critical(pd.DataFrame(columns=["batch_size", "lr", "steps"])).is_conclusive
