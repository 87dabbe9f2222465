import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.judge.difference import WORTH, compare, mean_interval


def test_a_share_is_of_the_way_from_the_first_loss_to_where_the_other_ends():
    found = compare([0.2], [0.4], 2.4)
    assert found.share == pytest.approx(0.1)
    assert found.matters
    assert found.interval is None


def test_what_is_less_than_a_hundredth_of_the_descent_does_not_matter_however_many_times_lower():
    found = compare([2.96e-5], [0.000162], 2.3)
    assert 0 < found.share < WORTH
    assert not found.matters
    assert found.words("lr*") == "where lr* does, to within 0.0058% of the descent"


def test_over_seeds_the_interval_is_students_and_a_wide_one_is_not_clear():
    gains = np.array([0.1, 0.2, 0.3])
    found = compare(1.0 - gains, [1.0, 1.0, 1.0], 2.0)
    assert found.interval == pytest.approx(mean_interval(gains))
    assert not found.clear
    assert not found.is_conclusive
    assert "within the spread of the seeds" in found.words("it")
    assert compare([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], 2.0).matters


def test_a_difference_surely_too_small_is_conclusive_without_mattering():
    found = compare([1.0, 1.0001, 0.9999], [1.0, 1.0, 1.0], 2.0)
    assert found.is_conclusive
    assert not found.matters


@pytest.mark.parametrize(("final", "other", "share"), [([math.nan], [1.0], -math.inf), ([1.0], [math.inf], math.inf)])
def test_a_training_that_did_not_end_finite_loses(final, other, share):
    found = compare(final, other, 2.0)
    assert found.share == share
    assert found.matters == (share > 0)
    assert found.is_conclusive


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=5),
    st.integers(-20, 20),
    st.integers(-64, 64),
)
def test_scaling_and_shifting_the_losses_changes_no_share(pairs, power, shift):
    def move(values):
        return [2.0**power * (value / 64 + shift) for value in values]

    final, other = zip(*pairs, strict=True)
    plain, moved = (
        compare([f / 64 for f in final], [o / 64 for o in other], 2.0),
        compare(move(final), move(other), 2.0**power * (2.0 + shift)),
    )
    assert moved.share == pytest.approx(plain.share)
    assert moved.matters == plain.matters
