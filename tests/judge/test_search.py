"""Which rates a search tries next; what it spends and finds on real sweeps: tests/benchmarks/spending.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.judge import learning_rate, search


def rows(rates, final, initial=2.0):
    return [{"lr": lr, "final": final(lr), "initial": initial} for lr in rates]


def bowl(best, edge):
    """Final loss by rate: lowest at ``best``, the start's far from it; none from ``edge`` times that."""
    return lambda lr: 2 - 1.9 * np.exp(-(np.log10(lr / best) ** 2) / 2) if lr < edge * best else np.nan


def searched(final, start, coarse, fine):
    """Every rate that the search tries, in order."""
    rates = [start / 10, start, start * coarse]
    for step, factor in ((search.wider, coarse), (search.finer, fine)):
        for _ in range(20):
            more = step(rows(rates, final), factor)
            if not more:
                break
            assert not set(np.round(np.log(more), 6)) & set(np.round(np.log(rates), 6))
            rates += more
    return rates


@pytest.mark.parametrize("steps", [(0.75, 0.25), (0.5, 0.25), (0.6, 0.2)])
@pytest.mark.parametrize(
    ("start", "best", "edge"), [(-2, -2.1, 0.5), (-3, -1.2, 1.0), (0.3, -1.4, 0.35), (-1, -2.9, 1.6)]
)
def test_it_ends_a_fine_step_from_the_best_rate_and_near_where_training_breaks(start, best, edge, steps):
    coarse, fine = (10**k for k in steps)
    final = bowl(10**best, 10**edge)
    tried = rows(searched(final, 10**start, coarse, fine), final)
    found, breaks = learning_rate.judge(tried), learning_rate.unstable(tried)
    assert abs(np.log10(found.value) - best) <= steps[1]
    under, over = breaks.interval
    away = max(1, round(np.log(under / found.value) / np.log(fine)) // 2)  # half as sure as it is far above the best
    assert over / under <= 1.01 * fine**away
    assert len(tried) < 11


def test_a_second_bottom_below_a_shallow_first_is_found():
    def final(lr):
        return 0.5 - 0.1 * np.exp(-(np.log10(lr / 0.1) ** 2)) - 0.2 * np.exp(-(np.log10(lr / 1e-3) ** 2)) + (lr > 1) * 9

    found = learning_rate.judge(rows(searched(final, 0.1, 10**0.5, 10**0.25), final))
    assert found.value == pytest.approx(1e-3, rel=0.01)


def test_where_all_fail_it_goes_down_and_refines_nothing():
    all_bad = rows([0.1, 1.0, 10.0], lambda lr: np.nan)
    assert search.wider(all_bad, 10.0) == pytest.approx([0.01, 0.001])
    assert search.finer(all_bad, 10.0) == []
    assert search.contenders(all_bad) == []


def test_a_rate_that_trains_above_one_that_fails_sends_it_down_too():
    assert search.wider(rows([0.1, 1.0, 10.0], lambda lr: 1.0 if lr == 1 else np.nan), 10.0) == pytest.approx(
        [0.01, 0.001]
    )


def test_a_clearly_worse_rate_far_above_the_best_ends_the_way_up():
    assert search.wider(rows([0.001, 0.01, 0.1], lambda lr: {0.001: 1.5, 0.01: 0.1}.get(lr, 0.9)), 10.0) == []
    assert search.wider(rows([0.001, 0.01, 0.1], lambda lr: {0.001: 1.5, 0.01: 0.1}.get(lr, 0.2)), 10.0) == [1.0]


def test_the_next_rate_lies_where_a_parabola_has_its_bottom():
    final = bowl(10**-1.4, 1e9)
    assert search.finer(rows([0.001, 0.01, 0.1], final), 10**0.25) == pytest.approx([10**-1.5], rel=0.01)


def test_a_second_seed_goes_to_the_best_and_to_a_rival_that_is_as_good():
    noise = np.random.default_rng(0).normal(0, 0.1, (4, 100))
    ends = [1.0, 0.52, 0.5, 1.5]
    trials = [
        {"lr": lr, "final": end, "initial": 2.0, "loss": np.r_[2.0, end + each]}
        for lr, end, each in zip([0.001, 0.01, 0.1, 1.0], ends, noise, strict=True)
    ]
    assert search.contenders(trials) == [0.01, 0.1]
    assert search.contenders([trials[0] | {"final": 0.9}, *trials[2:]]) == [0.1]


def ranged(bottom, breaks, steps=100, seed=0):
    """A range test: the loss falls from 2 to its lowest at ``bottom``, rises, and is NaN from ``breaks`` on."""
    lr = np.logspace(-6, 1, steps)
    at = np.log10(lr / bottom)
    loss = 2 - 1.5 * np.exp(-(at**2)) + np.where(lr > bottom, at**2, 0)
    loss = loss + np.random.default_rng(seed).normal(0, 0.03, steps)
    return lr, np.where(lr < breaks, loss, np.nan)


@pytest.mark.parametrize("bottom", [1e-4, 1e-2, 0.3])
def test_a_range_test_says_where_to_begin_and_where_training_breaks(bottom):
    begin, top = search.centre(*ranged(bottom, np.inf))
    assert 0.4 <= begin / (bottom * search.BELOW) <= 2.5
    assert 2 * bottom < top < 30 * bottom
    lr, loss = ranged(bottom, 3 * bottom)
    assert search.centre(lr, loss)[1] == lr[np.flatnonzero(np.isnan(loss))[0]]


@given(st.floats(1e-6, 1e6), st.floats(-1e3, 1e3))
def test_scale_and_shift_of_the_loss_move_no_centre(scale, shift):
    lr, loss = ranged(1e-2, 0.5)
    assert search.centre(lr, scale * (loss + shift)) == pytest.approx(search.centre(lr, loss))


def test_a_loss_that_never_falls_or_ends_at_once_says_nothing():
    lr, loss = ranged(1e-2, np.inf)
    assert search.centre(lr, np.linspace(2, 3, len(lr))) is None
    assert search.centre(lr, np.where(np.arange(len(lr)) < 5, loss, np.inf)) is None
    assert search.centre([], []) is None


def test_rates_and_losses_of_different_steps_are_refused():
    with pytest.raises(ParameterError, match="2 rates and 3 losses"):
        search.centre([1, 2], [1, 2, 3])
