"""Pace, evaluations and schedule of a run, from what its log holds."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.judge import history

NOTHING = dict.fromkeys(("seconds", "data_seconds", "examples", "throughput", "time"))


def pace(**logged):
    return {finding.name: finding for finding in history.pace(**{**NOTHING, **logged})}


def series(values, every=1, start=0):
    return pd.Series(np.asarray(values, float), start + every * np.arange(len(values)))


# -- pace -----------------------------------------------------------------------------------


def test_throughput_is_examples_over_the_median_step():
    found = pace(seconds=series([0.1] * 9 + [4.1]), examples=series([32] * 10))
    assert found["throughput"].value == pytest.approx(320)
    assert found["throughput"].unit == "examples/s"
    assert found["throughput"].evidence["slow_share"] == pytest.approx(4.1 / 5.0)
    assert "input_bound" not in found


def test_the_clock_tells_the_step_where_its_time_was_not_logged_and_a_resume_does_not_disturb_it():
    clock = series(np.r_[np.arange(20) * 5.0, 1000 + np.arange(20) * 5.0], every=10)
    found = pace(time=clock)
    assert (found["throughput"].value, found["throughput"].unit) == (2.0, "steps/s")


def test_without_any_clock_the_logged_throughput_stands_and_without_that_nothing():
    assert pace(throughput=series([100, 120, 110]))["throughput"].value == 110
    assert pace() == {}
    assert pace(seconds=series([np.nan, 0.0, -1.0]), data_seconds=series([0.1] * 3)) == {}


@pytest.mark.parametrize(("wait", "bound"), [(0.08, False), (0.10, True), (0.5, True)])
def test_the_share_of_time_spent_waiting_says_whether_training_is_input_bound(wait, bound):
    found = pace(seconds=series([1.0] * 50), data_seconds=series([wait] * 50))["input_bound"]
    assert found.value is bound
    assert found.evidence["waiting_share"] == pytest.approx(wait)


# -- evaluations ----------------------------------------------------------------------------


def noisy(n, seed):
    return 1 + 2 * np.exp(-np.arange(n) / (n / 4)) + 0.02 * np.random.default_rng(seed).standard_normal(n)


def test_regular_evaluations_are_told_with_their_interval_whenever_training_ends():
    losses = series(noisy(12, 0), every=500, start=500)
    losses = pd.concat([losses, pd.Series([1.0], [6123])])
    found = history.evaluation(losses)
    assert (found.value, found.unit) == (500, "steps")
    assert (found.evidence["irregular"], found.evidence["period"]) == (False, None)


def test_evaluations_by_the_clock_come_at_irregular_steps():
    steps = np.cumsum(np.random.default_rng(0).integers(400, 600, 20))
    found = history.evaluation(pd.Series(noisy(20, 0), steps))
    assert found.evidence["irregular"]
    assert "do it at regular steps" in found.summary


@pytest.mark.parametrize("period", [3, 5, 8])
def test_an_evaluation_loss_that_repeats_is_told_with_its_period(period):
    pattern = np.random.default_rng(period).standard_normal(period)
    found = history.evaluation(series(noisy(80, 1) + 0.1 * pattern[np.arange(80) % period], every=100))
    assert found.evidence["period"] == period
    assert "is training data shuffled" in found.summary


@pytest.mark.parametrize("n", [30, 60, 200])
def test_no_period_is_seen_in_noise_nor_in_a_trend_nor_in_a_walk(n):
    curves = [noisy(n, seed) for seed in range(20)] + [np.exp(-np.arange(n) / n), np.ones(n), np.arange(n)]
    curves += [np.cumsum(np.random.default_rng(seed).standard_normal(n)) for seed in range(20)]
    assert [history.evaluation(series(c)).evidence["period"] for c in curves] == [None] * len(curves)


def test_two_evaluations_tell_no_interval():
    assert not history.evaluation(series([2.0, 1.0])).is_conclusive


# -- schedule -------------------------------------------------------------------------------

T = np.arange(400) / 400
SHAPES = {
    "constant": np.ones(400),
    "linear": 1 - T,
    "cosine": 0.5 * (1 + np.cos(np.pi * T)),
    "exponential": np.exp(-3 * T),
    "inverse_sqrt": (1 + 400 * T / 40) ** -0.5,
    "steps": 0.1 ** np.floor(3 * T),
    "restarts": 0.5 * (1 + np.cos(np.pi * (4 * T % 1))),
    "other": 1 - T**3 + 0.3 * np.where(T > 0.5, -(T - 0.5), 0),
}


@pytest.mark.parametrize("warmup", [0, 50])
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_is_told_by_its_shape_with_its_warmup_and_peak(shape, every, warmup):
    rate = 3e-4 * np.r_[np.arange(1, warmup + 1) / max(warmup, 1), SHAPES[shape]]
    logged = series(rate, start=1)[every - 1 :: every]
    found = history.schedule(logged)
    assert found.value == shape
    assert found.evidence["peak_lr"] == logged.max()
    assert found.evidence["warmup_steps"] == pytest.approx(warmup, abs=every)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
def test_a_cosine_is_known_before_its_end_and_above_a_floor(floor, share):
    rate = floor + (1 - floor) * SHAPES["cosine"][: int(400 * share)]
    assert history.schedule(series(rate)).value == "cosine"


def test_a_rate_that_is_held_and_then_falls_is_told_by_its_fall():
    found = history.schedule(series(np.r_[np.linspace(0.1, 1, 10), np.ones(200), np.linspace(1, 0, 101)[1:]]))
    assert (found.value, found.evidence["held_steps"]) == ("linear", 200)


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential"])
def test_what_is_held_at_the_end_does_not_hide_the_fall_before_it(shape):
    rate = SHAPES[shape]
    assert history.schedule(series(np.r_[rate, np.full(150, rate[-1])])).value == shape


@given(scale=st.floats(1e-8, 1e8), shape=st.sampled_from(sorted(SHAPES)))
@settings(max_examples=40, deadline=None)
def test_the_shape_does_not_depend_on_the_rates_unit(scale, shape):
    assert history.schedule(series(scale * SHAPES[shape])).value == shape


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
@settings(max_examples=80, deadline=None)
def test_any_rates_give_a_finding(rates):
    found = history.schedule(series(rates))
    assert found.name == "lr_schedule"
    assert not found.is_conclusive or math.isfinite(found.evidence["peak_lr"])
