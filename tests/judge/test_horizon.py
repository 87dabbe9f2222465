import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.judge.horizon import NEAR, carry, turns_up

RATES = 10.0 ** np.arange(-4, 0.1, 0.2)
NAN = float("nan")


def trial(lr, loss):
    tenth = len(loss) // 10
    return {"lr": lr, "status": "finished", "final": loss[-tenth:].mean(), "initial": 2.3, "loss": loss}


def curves(best, n=400, slope=0.0, power=2, noise=0.0, width=1.0):
    """Trials whose best rate after t steps is best * (t / n) ** -slope, with a bowl around it as wide as ``width``."""
    t, rng, rows = np.arange(n), np.random.default_rng(0), []
    for lr in RATES:
        off = (np.log10(lr / best) + slope * np.log10((t + 1) / n)) / width
        loss = 2.3 - 2 * np.exp(-(np.abs(off) ** power)) * (1 - np.exp(-t / 20)) + noise * rng.standard_normal(n)
        rows.append(trial(lr, loss))
    return rows


def test_a_longer_run_is_given_a_lower_rate_than_the_leader_by_the_square_root_of_the_steps():
    found = carry(curves(0.01), 4000)
    assert found.value == pytest.approx(0.01 / 10**0.5, rel=0.01)
    assert found.interval[0] < 0.01 / 10**0.9
    assert 0.01 / 10**0.1 < found.interval[1] < 0.02
    assert found.evidence["horizons"] == [40, 120, 400]
    assert found.evidence["leader"] == pytest.approx(0.01)
    assert found.evidence["steps"] == 4000
    assert found.confidence == "medium"
    assert carry(curves(0.01), 400_000).value < found.value
    assert carry(curves(0.01), 400_000).confidence == "low"


@pytest.mark.parametrize("slope", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_interval_holds_the_best_of_the_whole_run_whatever_the_decline_is_in_it(slope, noise):
    found = carry(curves(0.01, slope=slope, noise=noise), 4000)
    assert found.interval[0] < 0.01 * 10**-slope < found.interval[1]


def test_steps_are_those_that_the_curves_span():
    few = [{**t, "loss": t["loss"][::4]} for t in curves(0.01)]
    found = carry(few, 4000, steps=400)
    assert found.evidence["horizons"] == [40, 120, 400]
    assert found.value == pytest.approx(carry(curves(0.01), 4000).value, rel=0.05)
    assert "Over 4,000 steps" in found.summary
    assert "after 400 steps, 0.01 leads." in found.summary


def test_the_peak_of_a_decaying_schedule_stays_where_the_short_trials_lead():
    found, constant = carry(curves(0.01), 4000, decaying=True), carry(curves(0.01), 4000)
    assert found.value == pytest.approx(0.01, rel=0.01)
    assert found.interval == pytest.approx(np.multiply(constant.interval, 10**0.5))
    assert "peak lr" in found.summary
    assert "schedule" in found.caveats[0]


def test_trials_as_long_as_the_run_have_nothing_to_carry():
    found = carry(curves(0.01), 400)
    assert found.value == pytest.approx(0.01)
    assert found.interval[0] < found.value < found.interval[1]


def test_the_same_rates_more_coarsely_give_nearly_the_same_answer():
    fine = carry(curves(0.02), 4000).value
    for half in (curves(0.02)[::2], curves(0.02)[1::2]):
        assert carry(half, 4000).value == pytest.approx(fine, rel=0.2)


def test_of_rates_as_good_over_decades_a_higher_one_is_taken_and_said_so():
    """As on a plateau that every rate has reached: a longer run leaves it first at a high rate."""
    found = carry(curves(0.003, power=8, width=1.5), 4000)
    assert found.evidence["high"] > 50 * found.evidence["low"]
    assert found.evidence["high"] / 10**1.1 < found.value < found.evidence["high"]
    assert found.confidence == "low"
    assert any("all are as good" in c for c in found.caveats)


@pytest.mark.parametrize("how", ["diverges", "turns up"])
def test_the_rate_is_kept_well_below_one_that_breaks_and_one_that_turns_up(how):
    trials, at = curves(0.01), 10**-1.6
    for row in trials:
        if row["lr"] > at / 1.01 and how == "diverges":
            row |= {"status": "diverged", "final": NAN, "loss": row["loss"][:250]}
        elif at / 1.01 < row["lr"] < at * 1.01:
            row |= trial(row["lr"], row["loss"] + 0.3 * np.clip(np.arange(400) / 100 - 3, 0, 1))
    found = carry(trials, 4000)
    assert found.evidence["breaks"] == pytest.approx(at, rel=1e-3)
    assert found.value == pytest.approx(at / 10, rel=0.01)
    assert carry(trials, 40_000).value == pytest.approx(at / NEAR / 100**0.5, rel=0.01)
    assert any("breaks or turns up" in c for c in found.caveats)


def test_a_run_hardly_longer_than_the_trials_needs_no_margin():
    trials = [t if t["lr"] < 0.015 else {**t, "status": "diverged", "final": NAN} for t in curves(0.01)]
    assert 0.007 < carry(trials, 420).value < 0.011


def test_turning_up_is_told_from_noise():
    rng, t = np.random.default_rng(0), np.arange(300)
    fall = np.exp(-t / 100)
    assert not any(turns_up(fall + 0.1 * rng.standard_normal(300), 0.02) for _ in range(500))
    rise = fall + np.clip(t / 300 - 0.6, 0, 1)
    assert np.mean([turns_up(rise + 0.1 * rng.standard_normal(300), 0.02) for _ in range(100)]) >= 0.95
    assert not turns_up(rise, 0.8)
    assert not turns_up(rise[:10], 0.02)
    assert not turns_up(np.where(t == 200, np.inf, rise), 0.02)


def test_a_best_rate_that_falls_faster_than_the_steps_grow_is_not_carried():
    found = carry(curves(0.001, slope=2.0), 4000)
    assert not found.is_conclusive
    assert "falls faster" in found.summary


def test_a_best_rate_that_has_risen_is_carried_with_low_confidence():
    found = carry(curves(0.03, slope=-0.6), 4000)
    assert found.is_conclusive
    assert found.confidence == "low"


def test_trials_that_begin_on_a_plateau_are_carried_with_low_confidence():
    late = [trial(t["lr"], np.r_[np.full(250, 2.3), t["loss"][:150]]) for t in curves(0.01)]
    found = carry(late, 4000)
    assert found.value == pytest.approx(0.01 / 10**0.5, rel=0.1)
    assert found.confidence == "low"
    assert any("no trend" in c for c in found.caveats)


def test_trials_without_curves_are_not_carried_and_a_shorter_run_is_an_error():
    bare = [{k: v for k, v in t.items() if k != "loss"} for t in curves(0.01)]
    for trials in (bare, [], [t for t in curves(0.01) if 0.009 < t["lr"] < 0.02], curves(0.01, n=30)):
        assert not carry(trials, 4000).is_conclusive
        assert carry(trials, 4000).settle
    with pytest.raises(ParameterError, match="shorter"):
        carry(curves(0.01), 100)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_trials_of_a_step_or_two_tell_nothing(n):
    assert not carry([{"lr": lr, "final": 2.0 + lr, "loss": np.full(n, 2.0 + lr)} for lr in RATES], 100).is_conclusive


def test_losses_that_never_fell_tell_nothing():
    assert not carry([trial(lr, np.full(400, 2.3)) for lr in RATES], 4000).is_conclusive


@pytest.mark.parametrize(
    "setting", [{"max_train_steps": v} for v in (None, NAN, "x")] + [{"steps": v} for v in (0, "x")]
)
def test_a_horizon_that_is_no_number_is_named(setting):
    with pytest.raises(ParameterError, match=next(iter(setting))):
        carry(curves(0.01), **{"max_train_steps": 4000, **setting})


def test_numbers_given_as_text_and_any_order_and_seeds_are_read():
    trials = curves(0.01, noise=0.02)
    text = [{**t, "loss": [str(v) for v in t["loss"]]} for t in trials]
    assert carry(text, "4000") == carry(trials, 4000)
    assert carry(pd.DataFrame(trials)[::-1], 4000) == carry(trials, 4000)
    seeds = [{**t, "seed": s} for s in (0, 1) for t in trials]
    assert carry(seeds, 4000).value == pytest.approx(carry(trials, 4000).value)


@settings(deadline=None, max_examples=30)
@given(st.integers(-200, 200), st.floats(-2.5, -1.5), st.floats(0, 0.1), st.booleans())
def test_scale_and_shift_of_the_loss_change_no_verdict(power, best, noise, shift):
    def found(factor, constant):
        trials = [{**t, "loss": factor * t["loss"] + constant} for t in curves(10**best, noise=noise)]
        return carry([t | {k: factor * t[k] + constant for k in ("final", "initial")} for t in trials], 4000)

    plain, other = found(1.0, 0.0), found(1.0, 64.0) if shift else found(2.0**power, 0.0)
    assert other.value == pytest.approx(plain.value, rel=1e-4)
    assert other.interval == pytest.approx(plain.interval, rel=1e-4)
    assert other.confidence == plain.confidence
