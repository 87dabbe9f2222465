import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from workup.finding import NO_MATTER, Finding
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


INCONCLUSIVE = Finding(name="critical_batch_size", value=None, rule="", summary="", settle="x")
CONCLUSIVE = dataclasses.replace(INCONCLUSIVE, value=100)
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
    assert found.settle
    assert judge.saturation(stretches(kernel(1e6)), settle="workup run x").settle == "workup run x"


@pytest.mark.parametrize(("by", "most"), [("memory", 4096), ("the data set", 5000), ("the data set", 1437)])
def test_growth_up_to_all_that_can_be_used_does_not_matter(by, most):
    found = judge.saturation(stretches(kernel(1e6)), most=most, limited_by=by)
    assert (found.value, found.confidence, found.interval) == (NO_MATTER, "high", None)
    assert f"{by} allows no batch above {most}" in found.summary
    speeds = judge.speeds(stretches(kernel(1e6), sizes=[size for size in SIZES if size <= most]))
    assert judge.choose(speeds, found, INCONCLUSIVE, present=64)[0][0] == max(s for s in SIZES if s <= most)


def test_growth_that_memory_does_not_end_within_doubt_of_its_last_sizes_cannot_tell():
    """The last size may or may not be the one where it stops, and another that can be used is in question."""
    rates = {8: 100, 16: 200, 32: 300, 64: 333}
    found = judge.saturation(stretches(rates.get, sizes=list(rates), noise=0.05), most=64, limited_by="memory")
    assert found.interval == (32, 64)
    assert found.value in (None, 32)


def test_sizes_past_the_data_show_where_growth_stops_and_are_said_to_be_repeated():
    found = judge.saturation(stretches(kernel(60)), most=300, limited_by="the data set")
    assert found.value == 512
    assert "The data set holds 300; beyond it examples are repeated" in found.summary
    inside = judge.saturation(stretches(kernel(20)), most=300, limited_by="the data set")
    assert inside.value == 256
    assert "repeated" not in inside.summary


def test_noise_that_hides_the_saturation_is_said_and_rounds_settle_it():
    noisy = judge.saturation(stretches(kernel(60), noise=0.9, rounds=2))
    assert noisy.value is None
    assert "Noise hides" in noisy.summary
    assert noisy.interval[1] > 4 * noisy.interval[0]
    quiet = judge.saturation(stretches(kernel(60), noise=0.05, rounds=9))
    assert quiet.interval[0] <= 512 <= quiet.interval[1] <= 2 * quiet.interval[0]


def test_noise_about_sizes_above_the_recommended_one_does_not_matter():
    noisy = dataclasses.replace(SATURATED, value=None, interval=(64, 512), summary="Noise.", settle="x")
    found = judge.unless_above(noisy, 16)
    assert (found.value, found.settle) == (NO_MATTER, "")
    assert "from 64 on, 16 is recommended" in found.summary
    assert judge.unless_above(noisy, 64) == noisy  # it may be saturation that keeps a larger one away
    assert judge.unless_above(noisy, None) == noisy
    assert judge.unless_above(SATURATED, 16) == SATURATED


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
    assert not judge.saturation(stretches(kernel(10), sizes=sizes)).is_conclusive
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
    assert not judge.input_bound(table, batch_size=64).is_conclusive
    assert not judge.input_bound(table, batch_size=7).is_conclusive


def test_a_wait_that_hardly_costs_anything_does_not_matter_on_which_side_of_the_mark_it_lies():
    table = stretches(kernel(10), share=0.085)
    table.loc[table["seed"] == 0, "data_seconds"] *= 1.5
    found = judge.input_bound(table, batch_size=64)
    assert found.value == NO_MATTER
    assert "at most 13% of a step" in found.summary


def test_a_device_that_works_through_a_queue_may_be_busy_while_its_loop_waits():
    table = stretches(kernel(10), share=0.4)
    found = judge.input_bound(table, batch_size=64, queued=True, settle="workup run x --notebooks 03")
    assert (found.value, found.confidence, found.settle) == (True, "low", "workup run x --notebooks 03")
    assert judge.input_bound(table, batch_size=64).confidence == "high"
    idle = judge.input_bound(stretches(kernel(10), share=0.01), batch_size=64, queued=True)
    assert (idle.value, idle.confidence) == (False, "high")


# -- the choice --------------------------------------------------------------------------------


def test_no_size_beyond_saturation_is_chosen():
    speeds = judge.speeds(stretches(kernel(60)))
    chosen = judge.choose(speeds, SATURATED, INCONCLUSIVE, present=64)
    assert [size for size, _ in chosen] == [512, 256, 128, 64, 32, 16, 8]
    assert chosen[0][1] == "the smallest size at full throughput"


def test_a_small_critical_size_ends_the_growth_before_saturation_does():
    speeds = judge.speeds(stretches(kernel(60)))
    small = dataclasses.replace(CONCLUSIVE, value=2)
    large = dataclasses.replace(CONCLUSIVE, value=5000)
    assert judge.choose(speeds, SATURATED, small, present=64)[0][0] < 64
    assert judge.choose(speeds, SATURATED, large, present=64)[0][0] == 512


def test_a_rough_critical_size_never_shrinks_the_size_in_use():
    speeds = judge.speeds(stretches(kernel(60)))
    rough = dataclasses.replace(CONCLUSIVE, value=2, confidence="low")
    assert judge.choose(speeds, SATURATED, rough, present=64)[0][0] == 64


def test_an_interval_of_the_critical_size_gives_the_size_that_loses_least_wherever_it_lies():
    speeds = judge.speeds(stretches(kernel(60)))
    wide = dataclasses.replace(CONCLUSIVE, interval=(20, 500))
    ends = [
        judge.choose(speeds, SATURATED, dataclasses.replace(CONCLUSIVE, value=n), present=8)[0][0] for n in (20, 500)
    ]
    chosen = judge.choose(speeds, SATURATED, wide, present=8)[0][0]
    assert ends[0] < chosen < ends[1]
    endless = dataclasses.replace(INCONCLUSIVE, interval=(1e5, math.inf))
    assert judge.choose(speeds, SATURATED, endless, present=8)[0][0] == 512


def test_a_size_that_is_no_power_of_two_competes_only_where_it_is_todays():
    speeds = judge.speeds(stretches(kernel(60), sizes=[64, 100, 128]))
    assert [size for size, _ in judge.choose(speeds, SATURATED, INCONCLUSIVE, present=64)] == [128, 64]
    assert [size for size, _ in judge.choose(speeds, SATURATED, INCONCLUSIVE, present=100)] == [128, 100, 64]
    most = judge.speeds(stretches(kernel(60), sizes=[64, 128, 240]))
    assert judge.choose(most, SATURATED, INCONCLUSIVE, present=240)[0][0] == 240


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
