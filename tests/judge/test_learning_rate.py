import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.judge import learning_rate
from workup.judge.sweep import stuck

NAN = float("nan")


def sweep(finals, *, first=-3, step=0.5, start=2.3, **columns):
    rows = [
        {"lr": 10 ** (first + step * i), "seed": 0, "final": f, "best": min(f, start) if f == f else start}
        for i, f in enumerate(finals)
    ]
    table = pd.DataFrame(rows)
    table["status"] = ["finished" if f == f else "diverged" for f in finals]
    return table.assign(**columns)


BOWL = [2.0, 1.2, 0.5, 0.2, 0.4, NAN, NAN]


def test_the_lowest_final_loss_wins_and_the_edge_is_not_near():
    found = learning_rate.judge(sweep(BOWL))
    assert found.value == pytest.approx(10**-1.5)
    assert found.evidence["unstable_lr"] == pytest.approx(10**-0.5)
    assert found.evidence["lr_at_edge"] is False
    assert found.interval[0] < found.value < found.interval[1]


def test_the_last_rate_that_trains_is_at_the_edge():
    found = learning_rate.edge(sweep([2.0, 1.0, 0.4, NAN]))
    assert found.value is True
    assert learning_rate.edge(sweep([2.0, 1.0, 0.4, NAN], step=1.0)).value is None


def test_the_unstable_rate_is_bracketed():
    found = learning_rate.unstable(sweep(BOWL))
    assert found.interval == pytest.approx((0.1, 10**-0.5))
    assert not learning_rate.unstable(sweep([2.0, 1.0, 1.5])).is_conclusive


def test_a_trial_that_diverges_late_is_infeasible_however_good_its_best():
    table = sweep([2.0, 1.0, 0.5, 2.2])
    table.loc[3, "best"] = 0.1
    found = learning_rate.judge(table)
    assert found.value == pytest.approx(0.01)
    assert found.evidence["infeasible"] == pytest.approx([10**-1.5])


def test_a_late_divergence_is_seen_in_the_curve_alone():
    fall = 2.3 - 1.8 * (1 - np.exp(-np.arange(200) / 20))
    late = np.where(np.arange(200) < 150, fall - 0.3, 2.2)
    rows = [{"lr": lr, "final": c[-20:].mean(), "loss": c} for lr, c in [(0.01, fall + 0.5), (0.1, fall), (0.05, late)]]
    assert learning_rate.judge(rows).evidence["infeasible"] == [0.05]


def test_an_uncharacteristically_high_loss_above_the_best_is_infeasible_and_below_it_is_slow():
    found = learning_rate.judge(sweep([2.2, 1.0, 0.5, 2.1]))
    assert found.evidence["infeasible"] == pytest.approx([10**-1.5])
    assert found.evidence["feasible"][0] == pytest.approx(1e-3)


def test_one_bad_seed_makes_a_rate_infeasible():
    table = pd.concat([sweep(BOWL), sweep([2.0, 1.2, 0.5, NAN, NAN, NAN, NAN]).assign(seed=1)])
    assert learning_rate.judge(table).value == pytest.approx(0.01)


def test_the_region_is_as_wide_as_the_seeds_say():
    tables = [sweep([2.0, 1.0, 0.50 + d, 0.50 - d, 1.0]).assign(seed=i) for i, d in enumerate([0.02, -0.02, 0.01])]
    found = learning_rate.judge(pd.concat(tables))
    assert found.evidence["region"] == pytest.approx([0.01, 10**-1.5])
    assert found.evidence["noise_from"] == "seeds"
    tight = [sweep([2.0, 1.0, 0.6 + d, 0.5 + d, 1.0]).assign(seed=i) for i, d in enumerate([0.001, -0.001, 0.0])]
    assert learning_rate.judge(pd.concat(tight)).evidence["region"] == pytest.approx([10**-1.5])


def test_the_grid_asks_for_more_where_the_best_is_at_its_end():
    def extend(finals):
        return learning_rate.judge(sweep(finals)).evidence["extend"]

    assert extend([2.0, 1.0, 0.5]) == pytest.approx((10**-1.5, 0.1))
    assert extend([0.5, 1.0, 2.0]) == pytest.approx((10**-3.5, 1e-4))
    assert extend(BOWL) == ()
    assert extend([NAN, NAN]) == pytest.approx((10**-3.5, 1e-4))


@pytest.mark.parametrize(
    "table",
    [[], sweep([NAN, NAN, NAN]), sweep([0.5]), sweep([0.5, 0.5, 0.5]), [{"lr": 0.1, "final": 1.0, "status": "failed"}]],
    ids=["empty", "all diverged", "one trial", "equal losses", "no trial says anything"],
)
def test_what_cannot_be_told_is_not_guessed(table):
    for question in (learning_rate.judge, learning_rate.edge):
        found = question(table)
        assert not found.is_conclusive
        assert found.settle
    learning_rate.unstable(table)
    learning_rate.summary(table)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_trials_of_a_step_or_two_tell_nothing_without_a_warning(n):
    trials = [{"lr": lr, "final": 2.0 + lr, "loss": np.full(n, 2.0 + lr)} for lr in (1e-3, 1e-2, 1e-1, 1.0)]
    for question in (learning_rate.judge, learning_rate.edge, learning_rate.unstable):
        assert "few steps" in question(trials).settle or question is learning_rate.edge
        assert not question(trials).is_conclusive
    assert learning_rate.summary(trials).empty


def test_a_loss_without_a_floor_is_no_best_rate_without_a_caveat():
    falling = [{"lr": 10.0**k, "final": -(10.0**k), "initial": 0.0} for k in range(-3, 7)]
    burst = [*falling, {"lr": 1e7, "final": NAN, "status": "diverged"}]
    for trials in (falling, burst):
        found = learning_rate.judge(trials)
        assert any("no lowest value" in c for c in found.caveats)
        assert found.confidence == "low"
    assert not any("no lowest value" in c for c in learning_rate.judge(sweep(BOWL)).caveats)


@pytest.mark.parametrize("form", [list, pd.DataFrame, lambda rows: pd.DataFrame(rows)[::-1].set_index("seed")])
def test_rows_tables_and_any_order_are_one_sweep(form):
    rows = [{"lr": lr, "seed": 0, "final": f} for lr, f in [(0.01, 0.8), (0.1, 0.2), (0.03, 0.4), (1.0, NAN)]]
    assert learning_rate.judge(form(rows)) == learning_rate.judge(rows)
    rows[-1]["status"] = "diverged"  # the others', not given, is "finished"
    assert learning_rate.judge(form(rows)).value == 0.1


@pytest.mark.parametrize("lr", [0.0, -0.1, NAN, float("inf")])
def test_a_rate_that_is_none_is_named(lr):
    with pytest.raises(ParameterError, match="positive"):
        learning_rate.judge([{"lr": lr, "final": 1.0}])


def test_a_missing_column_is_named():
    with pytest.raises(ParameterError, match="final"):
        learning_rate.judge([{"lr": 0.1}])


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.one_of(st.floats(0.1, 10), st.just(NAN)), min_size=3, max_size=9),
    st.floats(0.01, 100),
    st.floats(-100, 100),
    st.randoms(use_true_random=False),
)
def test_scale_shift_and_order_change_nothing(finals, factor, shift, random):
    finals = [round(f, 2) for f in finals]
    table = sweep(finals, start=11)
    other = table.assign(final=table["final"] * factor + shift, best=table["best"] * factor + shift)
    order = list(range(len(table)))
    random.shuffle(order)
    a, b = learning_rate.judge(table), learning_rate.judge(other.iloc[order])
    assert a.value == b.value
    assert a.evidence["infeasible"] == b.evidence["infeasible"]


def falling(*floors, n=300, noise=0.1):
    """A trial a decade whose loss falls from 5.7 to its floor at its pace: (floor, steps to fall by a factor e)."""
    rng, rows = np.random.default_rng(0), []
    for i, (floor, pace) in enumerate(floors):
        loss = floor + (5.7 - floor) * np.exp(-np.arange(n) / pace) + noise * rng.standard_normal(n)
        rows.append({"lr": 10.0 ** (i - 4), "loss": loss, "final": loss[-30:].mean()})
    return rows


STUCK = [(2.6, 200), (2.6, 80), (3.1, 15)]  # the post-norm transformer's plateau: the rate above lr* sits at 3.1


def test_a_higher_rate_that_gets_nowhere_while_a_lower_one_goes_on_is_an_edge():
    found, trials = learning_rate.judge(falling(*STUCK)), falling(*STUCK)
    assert (found.value, found.evidence["stalled"], found.evidence["lr_at_edge"]) == (1e-3, (0.01,), None)
    edge = learning_rate.unstable(trials)
    assert (edge.value, edge.evidence["stalled"]) == (0.01, (0.01,))
    assert "no progress" in edge.summary
    other = [{**t, "loss": 7 * t["loss"] - 90, "final": 7 * t["final"] - 90} for t in trials]
    assert learning_rate.judge(other).evidence["stalled"] == (0.01,)


@pytest.mark.parametrize(
    "floors",
    [
        [(2.6, 40), (2.6, 20), (2.6, 10)],  # all converged
        [(2.6, 40), (2.6, 20), (3.1, 10)],  # the best has converged too: no lower rate goes on
        [(2.6, 200), (2.6, 80), (2.7, 15)],  # a plateau that the best hardly leaves behind
        [(2.6, 200), (2.6, 80), (2.9, 90)],  # higher, but still falling
        [(3.1, 15), (2.6, 80), (2.5, 70)],  # stuck below lr*: slow, not an edge
    ],
)
def test_converged_curves_and_slower_ones_are_not_stalled(floors):
    assert learning_rate.judge(falling(*floors)).evidence["stalled"] == ()


def test_curves_of_different_lengths_are_compared_by_their_ends_alone():
    trials = falling(*STUCK)
    trials[2]["loss"] = trials[2]["loss"][:150]
    found = learning_rate.judge(trials)
    assert (found.value, found.evidence["stalled"]) == (1e-3, ())


def test_a_plateau_among_noisy_losses_is_told_by_what_medians_of_quarters_can_tell():
    t, found = np.arange(120), []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        best = 0.6 + 0.4 * np.exp(-t / 60)
        plateau, slow = np.full(120, 0.95), 0.65 + 0.4 * np.exp(-t / 70)
        noise = 0.1 * rng.standard_normal((3, 120))
        found.append(
            [stuck(c + n, best + noise[0], 0.4, 0.25) for c, n in zip((plateau, slow), noise[1:], strict=True)]
        )
    assert np.mean(found, axis=0)[0] >= 0.3
    assert not np.any(found, axis=0)[1]


BAD_TABLES = [
    (3, "no table"),
    ("rates.csv", "no table"),
    ({"lr": 0.1, "final": 1.0}, "no table"),
    (pd.DataFrame([[0.1, 0.2, 1.0]], columns=["lr", "lr", "final"]), "lr twice"),
    ([{"lr": "fast", "final": 1.0}], "'fast'"),
    ([{"lr": 0.1, "final": "low"}], "'low'"),
    ([{"lr": 0.1, "final": 1.0, "status": "done"}], "'done' is none of finished"),
    ([{"lr": 0.1, "final": 1.0, "loss": ["a"] * 20}], "loss of row 0"),
    ([{"lr": 0.1, "final": 1.0, "loss": np.ones((2, 20))}], "shape"),
]


@pytest.mark.parametrize(("table", "words"), BAD_TABLES)
def test_a_table_that_is_none_is_refused_by_name(table, words):
    for question in (learning_rate.judge, learning_rate.unstable, learning_rate.edge, learning_rate.summary):
        with pytest.raises(ParameterError, match=words):
            question(table)


def test_text_small_floats_and_missing_values_are_read_as_numbers():
    rows = [{"lr": lr, "final": f} for lr, f in [(0.01, 0.75), (0.1, 0.25), (1.0, NAN)]]
    found = learning_rate.judge(rows)
    assert learning_rate.judge([{k: str(v) for k, v in r.items()} for r in rows]) == found
    assert learning_rate.judge(pd.DataFrame(rows).astype("Float64")) == found
    assert learning_rate.judge(pd.DataFrame(rows).astype(np.float16)).value == pytest.approx(0.1, rel=1e-3)


def test_a_trial_told_twice_is_no_second_seed():
    assert learning_rate.judge(pd.concat([sweep(BOWL)] * 2)) == learning_rate.judge(sweep(BOWL))


@settings(deadline=None, max_examples=30)
@given(st.integers(-300, 300), st.integers(0, 5), st.booleans())
def test_noisy_curves_scaled_by_any_power_of_two_or_shifted_keep_their_verdict(power, seed, shift):
    def trials(factor, constant=0.0):
        rng, rows = np.random.default_rng(seed), []
        for i, (floor, pace) in enumerate(STUCK):
            loss = floor + (5.7 - floor) * np.exp(-np.arange(300) / pace) + 0.1 * rng.standard_normal(300)
            loss = factor * loss + constant
            rows.append({"lr": 10.0 ** (i - 4), "loss": loss, "final": loss[-30:].mean()})
        return learning_rate.judge(rows)

    plain, other = trials(1.0), trials(1.0, 64.0) if shift else trials(2.0 ** (3 * power))
    assert (other.value, other.interval) == (plain.value, plain.interval)
    for name in ("region", "infeasible", "stalled", "lr_at_edge", "extend"):
        assert other.evidence[name] == plain.evidence[name]


def test_infinite_losses_on_the_way_raise_no_warning():
    trials = falling((2.6, 40), (2.4, 40), (2.6, 40))
    for cells in (np.inf, -np.inf, 1e300):
        spiked = [{**t, "loss": np.where(np.arange(300) == 295, cells, t["loss"])} for t in trials]
        assert learning_rate.judge(spiked).is_conclusive
    assert not learning_rate.judge([{"lr": lr, "final": f} for lr, f in [(1, 1.7e308), (2, -1.7e308)]]).is_conclusive


def test_what_cannot_be_told_of_the_edge_is_of_low_confidence():
    assert learning_rate.edge([]).confidence == "low"


def test_the_spread_is_of_all_seeds_of_the_rates_near_the_best_not_of_those_that_did_well():
    rows = [{"lr": 0.1, "seed": i, "final": f} for i, f in enumerate([0.5, 0.6, 0.55, 0.5])]
    found = learning_rate.judge([{"lr": 0.01, "final": 0.9}, *rows, {"lr": 1.0, "final": NAN}])
    assert found.evidence["error"] == pytest.approx(np.std([0.5, 0.6, 0.55, 0.5], ddof=1) / 2)
