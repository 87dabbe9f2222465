import math

import numpy as np
import pandas as pd
import pytest

from workup import Trace, Trial
from workup.measure import throughput


def trace(size, seconds, data_seconds=0.0, *, seed=0, status="finished"):
    steps = len(seconds)
    table = pd.DataFrame({"seconds": seconds, "data_seconds": data_seconds, "examples": size}, index=range(steps))
    return Trace(trial=Trial(lr=0.1, steps=steps, batch_size=size, seed=seed), steps=table, status=status)


def test_a_round_holds_every_size_once_in_an_order_of_its_own():
    known = {2**k: 0.001 for k in range(10)}
    rounds = [throughput.stretches(known, lr=0.1, seed=seed, seconds=0.1) for seed in range(3)]
    orders = [[trial.batch_size for trial in one] for one in rounds]
    assert all(sorted(order) == sorted(known) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert {trial.seed for trial in rounds[2]} == {2}


def test_a_stretch_lasts_about_the_time_asked_within_its_bounds():
    known = {1: 0.01, 2: 10.0, 4: 1e-9}
    trials = throughput.stretches(known, lr=0.1, seed=0, seconds=0.5, least=4, most=200)
    steps = {trial.batch_size: trial.steps - throughput.WARM_UP for trial in trials}
    assert steps == {1: 50, 2: 4, 4: 200}


def test_throughput_is_examples_over_time_without_the_warm_up():
    rows = throughput.table([trace(8, [9.0, 9.0, 9.0, 0.1, 0.1, 0.4], 0.05)])
    assert rows.loc[0, "steps"] == 3
    assert rows.loc[0, "step_seconds"] == pytest.approx(0.2)
    assert rows.loc[0, "examples_per_second"] == pytest.approx(24 / 0.6)
    assert rows.loc[0, "data_seconds"] == pytest.approx(0.05)


def test_a_loader_that_delivers_in_bursts_is_not_hidden_by_its_fine_median():
    bursts = [1.0] * throughput.WARM_UP + [0.01, 0.01, 0.01, 0.97] * 5
    assert throughput.table([trace(10, bursts)]).loc[0, "examples_per_second"] == pytest.approx(40)


def test_a_stretch_that_did_not_finish_has_no_throughput():
    rows = throughput.table([trace(8, [0.1] * 6, status="out_of_memory"), trace(4, [0.1] * 6)])
    assert rows["batch_size"].tolist() == [4, 8]
    assert math.isnan(rows.loc[1, "examples_per_second"])
    assert np.isfinite(rows.loc[0, "examples_per_second"])


def test_no_trace_is_an_empty_table():
    assert len(throughput.table([])) == 0
