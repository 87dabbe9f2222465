from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.judge import stability

N = 500


def healthy(seed=0, n=N, noise=0.12):
    rng = np.random.default_rng(seed)
    return (0.3 + 2.2 * np.exp(-np.arange(n) / 80)) * np.exp(noise * rng.standard_normal(n))


def faulty(kind, seed=0):
    x, t = healthy(seed), np.arange(N)
    if kind == "jump":
        x[300:] *= 4
    elif kind == "rise and return":
        x[150:200] *= 1 + 1.5 * np.sin(np.linspace(0, np.pi, 50))
    elif kind == "early rise":
        x[5:] = x[5:] * (1 + 6 * np.exp(-((t[5:] - 12) ** 2) / 20))
    elif kind == "early jump":
        x[45:] = 2.1 + x[-1] * 0.1 * np.random.default_rng(seed).standard_normal(N - 45)
    elif kind == "blow-up":
        x[300:] *= np.exp(0.03 * (t[300:] - 300))
    elif kind == "nan":
        x[250:] = np.nan
    elif kind == "outlier":
        x[250] *= 4
    elif kind == "six steps":
        x[250:256] *= 2.2
    elif kind == "alternation":
        x *= 1 + 0.3 * (-1.0) ** t
    return x


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("none", "stable"),
        ("outlier", "stable"),
        ("alternation", "stable"),
        ("jump", "mid"),
        ("rise and return", "mid_recovered"),
        ("six steps", "mid_recovered"),
        ("early rise", "early_recovered"),
        ("early jump", "early"),
        ("blow-up", "diverged"),
        ("nan", "diverged"),
    ],
)
def test_each_kind_is_told_from_the_others(kind, value):
    assert stability.judge(faulty(kind)).value == value


def test_the_event_is_placed_where_it_was_planted():
    (event,) = stability.judge(faulty("six steps")).evidence["events"]
    assert abs(event["begin"] - 250) <= 2
    assert 250 <= event["peak"] < 260
    assert 254 <= event["end"] <= 262
    assert event["recovered"]
    assert event["size"] > 4


def test_steps_are_reported_in_the_callers_numbering():
    x = faulty("jump")[::5]
    (event,) = stability.judge(x, step=np.arange(0, N, 5)).evidence["events"]
    assert 290 <= event["begin"] <= 310


def test_training_at_the_edge_of_stability_is_stable_and_said_to_oscillate():
    assert stability.judge(faulty("alternation")).evidence["oscillation"]
    assert not stability.judge(healthy()).evidence["oscillation"]


def test_a_divergence_says_when_it_began():
    early, mid = faulty("nan").copy(), faulty("nan")
    early[10:] = np.nan
    assert stability.judge(early).evidence["began"] == "early"
    assert stability.judge(mid).evidence["began"] == "mid"


def test_a_single_skipped_step_is_counted_and_no_divergence():
    x = healthy()
    x[100] = np.inf
    found = stability.judge(x)
    assert (found.value, found.evidence["nonfinite"]) == ("stable", 1)


def test_a_rise_within_the_warmup_is_early():
    x = healthy()
    x[80:120] += 2
    lr = np.minimum(1, np.arange(1, N + 1) / 100)
    assert stability.judge(x, lr=lr).value == "early_recovered"
    assert stability.judge(x).value == "mid_recovered"


def test_gradient_norms_and_evaluations_are_set_beside_the_events():
    x, norms, evals = faulty("rise and return"), np.ones(N), np.full(N, np.nan)
    norms[170] = 50
    evals[::100] = 1.0
    found = stability.judge(x, grad_norm=norms, eval_loss=evals)
    assert found.evidence["grad_norm_ratio"] == [50]
    assert found.evidence["eval_shows"] == [False]


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_too_short_a_curve_cannot_be_told(n):
    found = stability.judge([1.0] * n)
    assert found.value == "cannot_tell"
    assert found.settle


def test_a_loss_that_never_was_finite_blames_the_data():
    found = stability.judge([np.nan] * 30)
    assert found.value == "diverged"
    assert "before any update" in found.summary


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"loss": [[1.0]]}, "shape"),
        ({"loss": ["a"]}, "numbers"),
        ({"loss": [1j] * 20}, "complex"),
        ({"loss": [10**400] * 20}, "too large"),
        ({"loss": pd.date_range("2020", periods=20)}, "datetime"),
        ({"loss": (v for v in [1.0])}, "generator"),
        ({"loss": [1.0] * 3, "step": [0, 1, np.inf]}, "finite"),
        ({"loss": [1.0] * 20, "grad_norm": [1.0]}, "20"),
        ({"loss": [1.0] * 3, "step": [0, 2, 1]}, "increase"),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises(ParameterError, match=words):
        stability.judge(**call)


def test_watching_uses_nothing_of_what_comes_after():
    x = faulty("jump")
    live = [f.value for f in stability.watch(x, every=100)]
    assert live == [stability.judge(x[:t]).value for t in (100, 200, 300, 400, 500)]
    assert live[2:4] == ["stable", "mid"]
    assert len(list(stability.watch(x[:250], every=100))) == 3


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["none", "jump", "rise and return", "early rise", "six steps", "alternation", "nan", "waves"]),
    st.integers(0, 5),
    st.floats(1e-280, 1e280),
)
def test_a_positive_factor_on_the_loss_changes_no_verdict(kind, seed, factor):
    x = climb(kind, 0.5, seed) if kind == "waves" else faulty(kind, seed)
    a, b = stability.judge(x), stability.judge(x * factor)
    assert a.value == b.value
    assert [e["begin"] for e in a.evidence["events"]] == [e["begin"] for e in b.evidence["events"]]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_any_row_of_numbers_gets_a_verdict(values):
    found = stability.judge(values)
    assert found.value in {"stable", "early", "early_recovered", "mid", "mid_recovered", "diverged", "cannot_tell"}
    for event in found.evidence["events"]:
        assert 0 <= event["begin"] <= event["peak"] < len(values)
        assert event["recovered"] == (event["end"] is not None)


def test_no_false_alarm_on_clean_curves_with_heavy_tails_and_plateaus():
    rng = np.random.default_rng(3)
    alarms = 0
    for seed in range(20):
        plateau = np.ones(400) * 2.3 + 0.02 * rng.standard_normal(400)
        heavy = healthy(seed) + 0.05 * np.abs(rng.standard_t(2, N))
        alarms += (stability.judge(plateau).value != "stable") + (stability.judge(heavy).value != "stable")
    assert alarms == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(120, 380), st.integers(20, 60), st.floats(1.5, 5), st.integers(0, 50))
def test_a_planted_hump_is_found_where_it_is(begin, length, height, seed):
    x = healthy(seed)
    x[begin : begin + length] *= 1 + height * np.sin(np.linspace(0, np.pi, length))
    found = stability.judge(x)
    assert found.value == "mid_recovered"
    event = found.evidence["events"][0]
    assert begin - 3 <= event["begin"] <= begin + length / 2
    assert abs(event["peak"] - (begin + length / 2)) <= length / 2
    assert event["end"] <= begin + length + 50


def test_labels_by_eye_on_real_curves_are_mostly_met():
    data = Path(__file__).parent.parent / "data"
    labels = pd.read_csv(data / "stability_labels.csv").query("curve == 'whole' and half in ['tune', 'held']").iloc[::3]
    curves = pd.read_parquet(data / "curves_whole.parquet").set_index("run").loss
    shown = [
        (curves[row.run].head(len(curves) if np.isnan(row.upto) else int(row.upto)), row) for row in labels.itertuples()
    ]
    assert np.mean([stability.judge(loss).value == row.label for loss, row in shown]) >= 0.95


def test_the_size_of_a_rise_is_told_in_the_losses_unit_and_in_noise():
    (event,) = stability.judge(1000 * faulty("rise and return")).evidence["events"]
    assert 300 < event["rise"] < 1500
    assert event["size"] == pytest.approx(event["rise"] / (0.12 * 640), rel=0.6)


def test_the_share_of_the_run_without_progress_is_told_and_is_no_event():
    rng, t = np.random.default_rng(0), np.arange(300)
    stuck, going = (3.1 + 2.6 * np.exp(-t / pace) + 0.1 * rng.standard_normal(300) for pace in (10, 200))
    assert stability.judge(stuck).value == "stable"
    assert stability.judge(stuck).evidence["still"] > 0.7
    assert stability.judge(going).evidence["still"] < 0.3


@pytest.mark.parametrize("form", [list, tuple, pd.Series, lambda x: pd.Series(x, index=np.arange(len(x)) * 7 + 2)])
def test_lists_arrays_and_series_are_the_same_row(form):
    x = faulty("rise and return")
    found = stability.judge(form(x), grad_norm=form(x), eval_loss=form(x), lr=form(x), step=form(np.arange(N)))
    assert found == stability.judge(x, grad_norm=x, eval_loss=x, lr=x, step=np.arange(N))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(["none", "jump", "rise and return", "nan"]), st.integers(20, N), st.integers(0, 5))
def test_the_verdict_so_far_uses_no_step_to_come(kind, upto, seed):
    x = faulty(kind, seed)
    (*_, last) = stability.watch(iter(x[:upto]), every=upto)
    assert last == stability.judge(x[:upto])


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(["none", "jump", "rise and return"]), st.integers(0, 5))
def test_a_loss_of_any_sign_gets_the_events_of_its_shape(kind, seed):
    x = faulty(kind, seed)
    below, above = stability.judge(x - 64), stability.judge(x)
    assert below.value == above.value
    assert [e["begin"] for e in below.evidence["events"]] == [e["begin"] for e in above.evidence["events"]]


def test_noise_that_grows_as_training_sets_in_is_no_rise():
    rng, t = np.random.default_rng(1), np.arange(1000)
    x = 4.9 - 0.2 * t / 180 + 0.003 * np.clip(1 + (t - 150) / 10, 1, 10) * rng.standard_normal(1000)
    assert stability.judge(x).value == "stable"


def test_a_hump_of_five_steps_within_the_first_ten_is_an_early_rise():
    x = healthy()
    x[4:10] = [2.0, 4.0, 6.0, 5.0, 4.5, 3.5]
    assert stability.judge(x).value == "early_recovered"


def climb(shape, spread, seed=0, at=60):
    """A loss that falls from 2.3 till ``at``, climbs to 1e9 in 40 steps and ends near 1e7; noise grows with it."""
    t, rng = np.arange(N), np.random.default_rng(seed)
    after = np.clip((t - at - 40) / (N - at - 40), 0, 1)
    top = {
        "plateau": np.full(N, 7.0),
        "slow decline": 9 - 2 * after,
        "fast decline": 7 + 2 * np.exp(-20 * after),
        "waves": 4 + 4 * np.cos(t / 5),
    }[shape]
    tens = np.where(t < at, -0.3 * t / max(at, 1), np.minimum((t - at) / 40, 1) * top)
    return 2.3 * 10**tens * np.exp(np.where(t < at, 0.05, spread) * rng.standard_normal(N))


@pytest.mark.parametrize("spread", [0.02, 0.5, 1.5])
@pytest.mark.parametrize("shape", ["plateau", "slow decline", "fast decline", "waves"])
def test_a_run_that_climbs_by_powers_of_ten_has_diverged_however_wild_its_noise(shape, spread):
    for at in (2, 60, 200):
        found = stability.judge(climb(shape, spread, at=at))
        assert (found.value, found.evidence["began"]) == ("diverged", "early" if at < 50 else "mid")
    assert max(e["rise"] for e in found.evidence["events"]) > 1e5


def test_a_lasting_rise_is_seen_through_the_noise_it_brings_below_the_first_loss_too():
    t = np.arange(N)
    for seed in range(5):
        noise = np.random.default_rng(seed).standard_normal(N)
        x = np.where(t < 250, 2.3 * np.exp(-t / 40) + 0.01, 1) * np.exp(np.where(t < 250, 0.2, 1) * noise)
        assert stability.judge(x).value == "mid"


def test_a_step_of_a_loss_without_noise_is_no_rounding():
    loss = np.where(np.arange(400) < 200, 1.0, 5.0)
    found = stability.judge(loss)
    assert found.value == "diverged"
    assert (found.evidence["events"][0]["base"], found.evidence["events"][0]["rise"]) == pytest.approx((1, 4))
    assert stability.judge(np.where(np.arange(400) // 50 == 4, 5.0, 1.0)).value == "mid_recovered"
    assert stability.judge(np.where(np.arange(400) < 200, 2.3, 2.4)).value == "stable"


@settings(deadline=None, max_examples=40)
@given(st.floats(3, 12), st.floats(0, 1), st.integers(1, 100), st.integers(1, 200), st.integers(0, 20))
def test_no_run_that_ends_a_thousand_times_above_its_first_loss_is_called_recovered(tens, decline, at, long, seed):
    t, rng = np.arange(N), np.random.default_rng(seed)
    height = np.clip((t - at) / long, 0, 1) * (tens - decline * (tens - 3) * np.clip((t - at - long) / 200, 0, 1))
    assert stability.judge(2.3 * 10**height * np.exp(0.3 * rng.standard_normal(N))).value == "diverged"


@pytest.mark.parametrize("call", [([1.0], 0), ([1.0], "x"), ([1.0], np.nan), (["a"], 1), ([[1.0], [2.0]], 1), (3, 1)])
def test_watching_what_is_no_row_of_numbers_is_refused(call):
    with pytest.raises(ParameterError, match=r"every|numbers"):
        list(stability.watch(call[0], every=call[1]))


def test_missing_values_small_floats_and_text_are_read_as_numbers():
    x = faulty("rise and return")
    found = stability.judge([np.nan, *x])
    for form in ([None, *x], pd.Series([pd.NA, *x], dtype=object), [str(v) for v in [np.nan, *x]]):
        assert stability.judge(form) == found
    assert stability.judge(x.astype(np.float16)).value == "mid_recovered"
    assert stability.judge(x, lr=[np.inf] * N, grad_norm=[None] * N).value == "mid_recovered"


def test_a_run_whose_last_update_alone_is_not_finite_may_have_skipped_it():
    found = stability.judge([*healthy(), np.inf])
    assert (found.value, found.confidence) == ("diverged", "medium")
    assert any("skipped" in c for c in found.caveats)


def test_the_longest_stretch_of_a_heavy_tail_is_no_rise():
    values = []
    for seed in range(60):
        rng, trend = np.random.default_rng(seed), 0.3 + 2 * np.exp(-np.arange(800) / 240)
        values.append(stability.judge(trend + 0.1 * rng.standard_t(3, 800)).value)
    assert values.count("stable") >= 57


def test_a_first_loss_drawn_low_is_neither_a_rise_nor_a_divergence():
    values, rng = [], np.random.default_rng(0)
    for seed in range(300):
        x = (1 - 0.05 * (1 - np.exp(-np.arange(400) / 80))) * np.exp(
            0.1 * np.random.default_rng(seed).standard_normal(400)
        )
        x[0] = np.exp(-0.1 * rng.uniform(2.5, 4.5))
        values.append(stability.judge(x).value)
    assert values.count("stable") >= 297


def test_small_rises_on_real_curves_are_noise_and_real_ones_are_found():
    data = Path(__file__).parent.parent / "data"
    labels = pd.read_csv(data / "stability_labels.csv").query(
        "half == 'added tune' and not why.str.startswith('no rise')"
    )
    curves = {k: pd.read_parquet(data / f"curves_{k}.parquet").set_index("run").loss for k in ("first", "whole")}
    right = [stability.judge(curves[row.curve][row.run]).value == row.label for row in labels.itertuples()]
    assert len(right) > 12
    assert np.mean(right) >= 0.8


def test_a_rise_is_told_as_a_share_of_the_descent_and_in_noise():
    x = healthy(noise=0.02)
    x[20:40] += 0.6
    found = stability.judge(x)
    (event,) = found.evidence["events"]
    assert event["share"] == pytest.approx(event["rise"] / (x[0] - x.min()))
    assert 0.15 < event["share"] < 0.4
    assert f"at step 20, by {100 * event['share']:.2g}% of its descent" in found.summary
    assert f"is back by step {event['end']}." in found.summary
    assert "more than it ever fell" in stability.judge(np.where(np.arange(400) // 50 == 4, 5.0, 1.0)).summary


def test_only_a_rise_both_plain_and_large_is_told_with_high_confidence_once_it_is_back():
    rng, t = np.random.default_rng(0), np.arange(N)
    trend = 0.3 + 2.2 * np.exp(-t / 80) + 0.01 * rng.standard_normal(N)
    large, small = (stability.judge(trend + height * ((t >= 300) & (t < 340))) for height in (0.5, 0.1))
    assert (large.value, large.confidence) == ("mid_recovered", "high")
    assert (small.value, small.confidence) == ("mid_recovered", "medium")
