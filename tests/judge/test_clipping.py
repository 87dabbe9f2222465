import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.finding import Finding
from workup.judge import clipping
from workup.judge.difference import compare


def norms(n=1000, seed=0):
    return np.exp(0.3 * np.random.default_rng(seed).standard_normal(n))


def test_the_threshold_is_the_percentile_and_the_share_what_it_cuts():
    found = clipping.judge(norms())
    assert found.value == pytest.approx(np.percentile(norms(), 90))
    assert found.evidence["clipped_fraction"] == pytest.approx(0.1)


def test_norms_without_outliers_are_told_that_clipping_does_nothing():
    found = clipping.judge(norms())
    assert not found.evidence["helps"]
    assert found.summary.startswith("Leave clipping off")


def test_spikes_are_counted_early_and_mid():
    x = norms()
    x[[3, 5, 400, 700, 900]] = 40
    found = clipping.judge(x)
    assert (found.evidence["outliers_early"], found.evidence["outliers_mid"]) == (2, 3)
    assert found.evidence["helps"]


def test_norms_that_only_decline_have_no_outliers():
    decline = 10 * np.exp(-np.arange(1000) / 200) * norms()
    assert clipping.judge(decline).evidence["outliers"] == 0


def test_non_finite_norms_are_counted_and_move_no_threshold():
    x = norms()
    bad = np.concatenate([x, [np.nan, np.inf, -np.inf]])
    assert clipping.judge(bad).value == clipping.judge(x).value
    found, clean = clipping.judge(bad).evidence, clipping.judge(x).evidence
    assert found["nonfinite"] == 3
    assert {k: found[k] for k in ("clipped_fraction", "outliers", "helps")} == {
        k: clean[k] for k in ("clipped_fraction", "outliers", "helps")
    }
    x[[300, 600]] = 40
    x[299] = np.nan
    assert np.flatnonzero(clipping.outliers(x)).tolist() == [300, 600]


def test_more_than_half_clipped_says_lower_the_rate():
    assert "lower learning rate" in clipping.judge(norms(), percentile=40).caveats[0]


@pytest.mark.parametrize("x", [[], [np.nan] * 5, [0.0] * 5])
def test_no_usable_norm_cannot_be_told(x):
    found = clipping.judge(x)
    assert not found.is_conclusive
    assert not found.evidence["helps"]


def test_lists_arrays_and_series_are_the_same_row_of_norms():
    x = norms(200)
    assert clipping.judge(list(x)) == clipping.judge(x) == clipping.judge(pd.Series(x, index=np.arange(200) * 5 + 3))


@pytest.mark.parametrize(
    ("x", "p"),
    [([1.0], "x"), ([1.0], None), ([1j], 90), (["a"], 90), ([1.0, -1.0], 90), ([1.0], 0), ([1.0], 100), ([[1.0]], 90)],
)
def test_bad_input_is_an_error(x, p):
    with pytest.raises(ParameterError):
        clipping.judge(x, percentile=p)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.floats(1, 99), st.floats(1e-3, 1e3))
def test_the_threshold_scales_with_the_norms_and_is_one_of_their_range(x, p, factor):
    found, scaled = clipping.judge(x, percentile=p), clipping.judge(np.asarray(x) * factor, percentile=p)
    assert scaled.value == pytest.approx(found.value * factor)
    assert min(x) <= found.value * (1 + 1e-12)
    assert found.value <= max(x) * (1 + 1e-12)


def trial(lr, clip, stability, final, share=0.0):
    settings = {"lr": lr, "clip_norm": clip, "clipped_fraction": share}
    return settings | {"stability": stability, "final": final, "initial": 2.3}


CALM, WILD = trial(0.1, np.nan, "stable", 0.5), trial(0.2, np.nan, "diverged", 9.0)
HELD = [trial(0.2, 4, "early", 3, 0.1), trial(0.2, 2, "stable", 0.4, 0.3), trial(0.2, 1, "stable", 0.6, 0.7)]


def choose(*tried, **more):
    return clipping.choose(pd.DataFrame(tried), clipping.judge(norms()), **more)


def test_the_loosest_threshold_that_makes_twice_the_rate_stable_is_chosen():
    touched = {"75": {"threshold": 2.0, "share": 0.05, "share_at_double": 0.3}}
    clip, share = choose(CALM, trial(0.1, 4, "stable", 0.5, 0.01), WILD, *HELD, touched=touched)
    assert (clip.value, clip.evidence["peak_lr"]) == (2, None)
    assert share.value == 0.05  # at the prescribed rate, where it will clip
    assert clip.because == "0.2, above it, breaks without it and trains with it"


def test_a_rate_that_breaks_by_itself_is_cured_first():
    broken = trial(0.1, np.nan, "mid", 2.0)
    clip, share = choose(broken, trial(0.1, 3, "stable", 0.5, 0.2), WILD, *HELD)
    assert (clip.value, share.value) == (3, 0.2)
    assert "this rate breaks" in clip.because


def test_what_trains_stably_needs_no_clipping_and_the_share_each_percentile_touches_is_said():
    touched = clipping.touched(norms(), 2 * norms(), (90, 50))
    assert touched["90"]["share"] == pytest.approx(0.1)
    assert touched["90"]["share_at_double"] > 0.5
    found = choose(CALM, trial(0.1, 2, "stable", 0.5), trial(0.2, np.nan, "stable", 0.4), touched=touched)[0]
    assert found.value == "none"
    assert found.summary.startswith("No clipping is needed: lr 0.1 and 0.2 train stably without.")
    assert "90th percentile 10% and " in found.summary


def test_a_threshold_that_lowers_the_loss_at_the_prescribed_rate_does_something():
    found = choose(CALM, trial(0.1, 2, "stable", 0.3, 0.1), trial(0.2, np.nan, "stable", 0.4))[0]
    assert found.value == 2
    assert found.because == "ends lower than the same rate unclipped, by 11% of the descent"


def test_where_no_threshold_holds_another_remedy_is_named():
    found = choose(CALM, WILD, trial(0.2, 1, "diverged", 9))[0]
    assert found.value == "none"
    assert "not the remedy" in found.summary


def test_a_rate_that_clipping_opens_comes_with_the_one_found_for_the_whole_run():
    peak = Finding(name="peak_lr", value=0.15, interval=(0.1, 0.2), rule="C1", summary="0.15.", confidence="low")
    paid = compare([0.3, 0.31, 0.3], [0.5, 0.5, 0.51], 2.3)
    facts = choose(CALM, WILD, *HELD, paid=paid, peak=peak)[0].evidence
    assert (facts["peak_lr"], facts["peak_interval"], facts["peak_confidence"]) == (0.15, (0.1, 0.2), "low")
    assert facts["seeds"] == 3


def test_norms_of_nearly_always_zero_give_no_threshold_of_zero():
    found = clipping.judge([0.0] * 99 + [1.0])
    assert not found.is_conclusive
    assert "1 are finite and above 0" in found.summary


def test_missing_values_and_text_are_read_as_numbers():
    x = norms(200)
    found = clipping.judge([*x, np.nan])
    assert clipping.judge([*x, None]) == clipping.judge(pd.Series([*x, pd.NA], dtype=object)) == found
    assert clipping.judge([str(v) for v in [*x, np.nan]], percentile="90") == found
