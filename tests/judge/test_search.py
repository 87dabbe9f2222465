"""Which rates a search tries next; what it spends and finds on real sweeps: tests/benchmarks/spending.py."""

import numpy as np
import pytest

from workup.judge import learning_rate, search


def rows(rates, final, initial=2.0):
    return [{"lr": lr, "final": final(lr), "initial": initial} for lr in rates]


def bowl(best, edge):
    """Final loss by rate: lowest at ``best``, the start's far from it; none from ``edge`` times that."""
    return lambda lr: 2 - 1.9 * np.exp(-(np.log10(lr / best) ** 2) / 2) if lr < edge * best else np.nan


def searched(final, start, coarse, fine):
    """Every rate that the search tries, in order."""
    rates = [start / coarse, start, start * coarse]
    for step, factor in ((search.wider, coarse), (search.finer, fine)):
        for _ in range(20):
            more = step(rows(rates, final), factor)
            if not more:
                break
            assert not set(np.round(np.log(more), 6)) & set(np.round(np.log(rates), 6))
            rates += more
    return rates


@pytest.mark.parametrize("steps", [(0.5, 0.25), (0.6, 0.2)])
@pytest.mark.parametrize(
    ("start", "best", "edge"), [(-2, -2.1, 0.5), (-3, -1.2, 1.0), (0.3, -1.4, 0.35), (-1, -2.9, 1.6)]
)
def test_it_ends_a_fine_step_from_the_best_rate_and_from_where_training_breaks(start, best, edge, steps):
    coarse, fine = (10**k for k in steps)
    final = bowl(10**best, 10**edge)
    tried = rows(searched(final, 10**start, coarse, fine), final)
    found, breaks = learning_rate.judge(tried), learning_rate.unstable(tried)
    assert abs(np.log10(found.value) - best) <= steps[1]
    assert breaks.interval[1] / breaks.interval[0] <= 1.01 * fine
    assert len(tried) < 16


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


def test_other_seeds_go_to_the_best_and_its_neighbours_that_train():
    assert search.contenders(rows([0.001, 0.01, 0.1, 1.0], bowl(0.1, 5))) == [0.01, 0.1]
