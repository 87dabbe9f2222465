import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.finding import Finding
from workup.judge import batch_size as judge

SIZES = [2**k for k in range(3, 13)]


def stretches(rate, *, sizes=SIZES, rounds=5, noise=0.0, share=0.0, seed=0):
    """Stretches on a machine of throughput ``rate(size)``, each off by a factor of relative width ``noise``."""
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        for round_ in range(rounds):
            speed = rate(size) * math.exp(rng.normal(0, noise))
            rows.append([size, round_, 100, size / speed, share * size / speed, speed])
    names = ["batch_size", "seed", "steps", "step_seconds", "data_seconds", "examples_per_second"]
    return pd.DataFrame(rows, columns=names)


def kernel(overhead_examples):
    """Throughput of steps that take a fixed overhead and then a time per example."""
    return lambda size: 1e4 * size / (overhead_examples + size)


def attempts(*rows):
    table = pd.DataFrame(rows, columns=["batch_size", "status"])
    return table.assign(peak_bytes=2**28, reason="")


UNTOLD = Finding(name="critical_batch_size", value=None, rule="", summary="", settle="x")
TOLD = dataclasses.replace(UNTOLD, value=100)
SATURATED = Finding(name="saturation_batch_size", value=512, interval=(512, 512), rule="", summary="")


# -- speeds and saturation --------------------------------------------------------------------


def test_the_table_of_speeds_holds_medians_and_the_rules_arithmetic():
    table = judge.speeds(stretches(kernel(100), share=0.25))
    assert table["batch_size"].tolist() == SIZES
    assert table["examples_per_second"].tolist() == pytest.approx([kernel(100)(size) for size in SIZES])
    assert table["step_seconds"].tolist() == pytest.approx([size / kernel(100)(size) for size in SIZES])
    assert table["data_share"].tolist() == pytest.approx([0.25] * len(SIZES))
    assert table.loc[1, "gain"] == pytest.approx(kernel(100)(16) / kernel(100)(8))
    assert (table["low"] < table["examples_per_second"]).all()
    assert (table["high"] > table["examples_per_second"]).all()
    assert table["rounds"].tolist() == [5] * len(SIZES)


@pytest.mark.parametrize(("overhead", "expected"), [(1, 16), (20, 256), (60, 512)])
def test_saturation_is_the_smallest_size_no_larger_one_outruns_by_ten_percent(overhead, expected):
    found = judge.saturation(stretches(kernel(overhead)))
    best = max(kernel(overhead)(size) for size in SIZES)
    assert found.value == expected == min(size for size in SIZES if kernel(overhead)(size) >= 0.9 * best)
    assert found.interval[0] <= expected <= found.interval[1]


def test_a_throughput_that_falls_again_saturates_at_its_peak():
    peaked = {8: 100, 16: 200, 32: 390, 64: 600, 128: 400, 256: 300}
    assert judge.saturation(stretches(peaked.get, sizes=list(peaked))).value == 64


def test_a_throughput_that_still_grows_is_not_called_saturated():
    found = judge.saturation(stretches(kernel(1e6)))
    assert found.value is None
    assert "still grows at 4096" in found.summary
    assert "× 2.00" in found.summary


def test_noise_that_hides_the_saturation_is_said_and_rounds_settle_it():
    noisy = judge.saturation(stretches(kernel(60), noise=0.9, rounds=2))
    assert noisy.value is None
    assert "Noise hides" in noisy.summary
    assert noisy.interval[1] > 4 * noisy.interval[0]
    quiet = judge.saturation(stretches(kernel(60), noise=0.05, rounds=9))
    assert quiet.interval[0] <= 512 <= quiet.interval[1] <= 2 * quiet.interval[0]


def test_the_truth_lies_in_the_interval_in_nine_of_ten_noisy_measurements():
    held = 0
    for seed in range(40):
        low, high = judge.saturation(stretches(kernel(60), noise=0.06, rounds=3, seed=seed)).interval
        held += low <= 512 <= high
    assert held >= 36


def test_stretches_that_did_not_finish_are_no_measurements():
    table = stretches(kernel(60))
    table.loc[table["batch_size"] >= 2048, ["examples_per_second", "step_seconds"]] = np.nan
    assert judge.saturation(table).evidence["gains"].keys() == {f"{a} to {2 * a}" for a in SIZES[:7]}
    speeds = judge.speeds(table)
    assert speeds.loc[speeds["batch_size"] >= 2048, "examples_per_second"].isna().all()
    assert speeds["rounds"].tolist()[-2:] == [0, 0]


@pytest.mark.parametrize("sizes", [[], [64]])
def test_fewer_than_two_sizes_cannot_tell(sizes):
    assert not judge.saturation(stretches(kernel(10), sizes=sizes)).told
    assert len(judge.speeds(stretches(kernel(10), sizes=sizes))) == len(sizes)


# -- feasible ---------------------------------------------------------------------------------


def feasible(table, most=1437, source="the data set"):
    return judge.max_feasible(table, most=most, most_source=source, limit_bytes=2**30, limit_source="test")


def test_the_data_set_that_ends_the_search_is_named_and_a_power_of_two_reported():
    found = feasible(attempts((64, "fits"), (256, "fits"), (1437, "fits")))
    assert (found.value, found.evidence["largest_tried"], found.evidence["limited_by"]) == (1024, 1437, "the data set")
    assert found.confidence == "high"


def test_a_data_set_of_50_examples_never_gives_64():
    assert feasible(attempts((50, "fits")), most=50).value == 32


def test_memory_gives_the_interval_between_what_ran_and_what_did_not():
    found = feasible(attempts((64, "fits"), (300, "out_of_memory"), (290, "fits")))
    assert (found.value, found.interval, found.evidence["limited_by"]) == (256, (290, 299), "memory")
    assert "300 does not fit in 1.00 GiB (test)" in found.summary


@pytest.mark.parametrize(
    ("rows", "by"),
    [
        ([(64, "fits"), (128, "launch_limit")], "a limit of the kernel launch"),
        ([(64, "fits"), (128, "too_slow")], "time"),
        ([(64, "fits"), (256, "fits")], "time"),
    ],
)
def test_what_ended_the_search_is_told_apart(rows, by):
    assert feasible(attempts(*rows)).evidence["limited_by"] == by


def test_where_nothing_fits_there_is_no_size_and_the_reason_is_kept():
    table = attempts((64, "out_of_memory"), (1, "out_of_memory")).assign(reason="CUDA out of memory")
    found = feasible(table)
    assert found.value is None
    assert found.summary == "Not even 1 examples fit in 1.00 GiB (test)."
    assert found.evidence["reason"] == "CUDA out of memory"


# -- input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "bound"), [(0.01, False), (0.4, True)])
def test_a_step_that_waits_for_data_is_input_bound(share, bound):
    found = judge.input_bound(stretches(kernel(10), share=share), batch_size=64)
    assert found.value is bound
    assert found.evidence["waiting_share"] == pytest.approx(share)


def test_waits_on_both_sides_of_the_mark_cannot_tell():
    table = stretches(kernel(10), share=0.05)
    table.loc[table["seed"] == 0, "data_seconds"] *= 10
    assert not judge.input_bound(table, batch_size=64).told
    assert not judge.input_bound(table, batch_size=7).told


# -- steps, time, resources -------------------------------------------------------------------


def test_costs_follow_the_papers_law_and_meet_todays_run():
    table = judge.costs(judge.speeds(stretches(kernel(60))), 128, present=64, steps=3000)
    at = table.set_index("batch_size")
    assert at.loc[64, "steps"] == pytest.approx(3000)
    assert at.loc[128, "steps"] == pytest.approx(2 * 3000 / 3)
    assert at.loc[4096, "steps"] == pytest.approx(3000 / 3 * (1 + 128 / 4096))
    assert at["examples"].tolist() == pytest.approx((at.index * at["steps"]).tolist())
    assert at.loc[64, "seconds"] == pytest.approx(3000 * 64 / kernel(60)(64))


@settings(max_examples=50, deadline=None)
@given(critical=st.floats(0, 1e6), present=st.sampled_from(SIZES))
def test_a_larger_batch_never_needs_more_steps_nor_fewer_examples(critical, present):
    speeds = pd.DataFrame({"batch_size": SIZES, "examples_per_second": 1.0, "step_seconds": SIZES})
    table = judge.costs(speeds, critical, present=present, steps=1000)
    assert (table["steps"].diff().dropna() <= 1e-6).all()
    assert (table["examples"].diff().dropna() >= -1e-6).all()


def test_no_size_beyond_saturation_is_chosen():
    speeds = judge.speeds(stretches(kernel(60)))
    chosen = judge.choose(speeds, SATURATED, UNTOLD, present=64, steps=1000)
    assert [size for size, _ in chosen] == [512, 256, 128, 64, 32, 16, 8]
    assert chosen[0][1] == "the smallest size at full throughput"


def test_a_small_critical_size_ends_the_growth_before_saturation_does():
    speeds = judge.speeds(stretches(kernel(60)))
    small = dataclasses.replace(TOLD, value=2)
    large = dataclasses.replace(TOLD, value=5000)
    assert judge.choose(speeds, SATURATED, small, present=64, steps=1000)[0][0] < 64
    assert judge.choose(speeds, SATURATED, large, present=64, steps=1000)[0][0] == 512


def test_a_rough_critical_size_never_shrinks_the_size_in_use():
    speeds = judge.speeds(stretches(kernel(60)))
    rough = dataclasses.replace(TOLD, value=2, confidence="low")
    assert judge.choose(speeds, SATURATED, rough, present=64, steps=1000)[0][0] == 64


def test_a_size_that_is_no_power_of_two_competes_only_where_it_is_todays():
    speeds = judge.speeds(stretches(kernel(60), sizes=[64, 100, 128]))
    assert [size for size, _ in judge.choose(speeds, SATURATED, UNTOLD, present=64, steps=10)] == [128, 64]
    assert [size for size, _ in judge.choose(speeds, SATURATED, UNTOLD, present=100, steps=10)] == [128, 100, 64]
    most = judge.speeds(stretches(kernel(60), sizes=[64, 128, 240]))
    assert judge.choose(most, SATURATED, UNTOLD, present=240, steps=10)[0][0] == 240


def noise_rows(trace, length, *, small=32, large=512, population=0, draws=50, spread=0.0, steps=(0, 100), seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for step in steps:
        for draw in range(draws):
            off = rng.normal(0, spread, 2)
            norms = [length + trace / small + off[0], length + trace / large + off[1]]
            rows.append([step, draw, small, large, population, *norms])
    names = ["step", "draw", "small", "large", "population", "small_norm2", "large_norm2"]
    return pd.DataFrame(rows, columns=names)


def test_the_critical_size_is_that_of_the_law_summed_over_a_trainings_steps():
    both = pd.concat([noise_rows(100.0, 1.0, steps=[0]), noise_rows(300.0, 1.0, steps=[100])])
    found = judge.critical(both)
    assert found.evidence["noise_scale_by_step"] == pytest.approx({"0": 100, "100": 300})
    fewest = 1 / (1 + 100 / 32) + 1 / (1 + 300 / 32)  # what two steps at 32 are worth without noise
    examples = 32 * (2 - fewest)
    assert found.value == round(examples / fewest)
    assert found.evidence["noise_scale_interval"] == pytest.approx((examples / fewest,) * 2)
    assert found.interval == pytest.approx((judge.ROUGH * examples / fewest, examples / fewest))


def test_steps_that_noise_makes_endless_are_no_part_of_the_fewest():
    lost = pd.concat([noise_rows(100.0, 1.0, steps=[0]), noise_rows(100.0, -10.0, steps=[100])])
    found = judge.critical(lost)
    assert found.evidence["noise_scale_by_step"]["100"] == float("inf")
    assert found.value == round(32 * (2 * (1 + 100 / 32) - 1))


def test_a_gradient_lost_in_its_noise_cannot_tell():
    found = judge.critical(noise_rows(1000.0, 0.01, spread=2.0, draws=6))
    assert found.value is None
    assert "lost in its noise" in found.summary
    assert not judge.critical(noise_rows(100.0, -10.0)).told


# -- the recommendation -----------------------------------------------------------------------


def test_the_recommendation_carries_peak_margin_and_every_caveat():
    speeds = judge.speeds(stretches(kernel(60)))
    verified = {"peak_bytes": 2**28, "steps": 20, "evaluation_batch_size": 2048}
    norms = ["bn1", "bn2", "bn3", "bn4"]
    found = judge.recommend(
        512, why="because", table=speeds, verified=verified, limit_bytes=2**30, present=64, norms=norms
    )
    assert found.value == 512
    assert found.evidence["margin"] == 0.75
    assert found.evidence["gain"] == pytest.approx(kernel(60)(512) / kernel(60)(64))
    assert found.evidence["evaluation_batch_size"] == 2048
    text = " ".join(found.caveats)
    assert all(rule in text for rule in ("B1)", "B6", "B7", "B11", "B12"))
    assert f"Accumulating 4 such batches takes {4 * 512 / kernel(60)(512) * 1000:.3g} ms" in text
    assert "bn1, bn2, bn3 and 1 more" in text


def test_a_model_without_batch_norm_gets_no_word_of_it():
    speeds = judge.speeds(stretches(kernel(60)))
    found = judge.recommend(
        64, why="x", table=speeds, verified={"peak_bytes": 1, "steps": 20}, limit_bytes=2, present=64
    )
    assert "Batch norm" not in " ".join(found.caveats)
    assert "×" not in found.summary


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
    assert not found.told
    assert "lies outside" in found.summary


def test_a_goal_reached_at_two_sizes_only_cannot_tell():
    assert not judge.measured_critical(goal_rows(lambda n: 10, sizes=(8, 16))).told
    assert not judge.measured_critical(pd.DataFrame(columns=["batch_size", "lr", "steps"])).told
