import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from workup import Trace, Trial
from workup.measure import data, throughput
from workup.measure.train import train


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


# -- past the data set ------------------------------------------------------------------------


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((8,), float(range(10)[index])), index % 3


@pytest.mark.parametrize("collated", [False, True])
def test_examples_are_repeated_until_a_batch_is_full_and_each_comes_as_often(make_workload, collated):
    own = make_workload(train_data=Squares(), batch_size=4) if collated else make_workload()
    count, wanted = len(own.train_data), 2 * len(own.train_data)
    wider = throughput.wrapped(own, wanted)
    assert len(wider.train_data) >= throughput.EPOCH * wanted
    batches = data.batches(wider, wanted, seed=0, device="cpu")
    seen = [tuple(x.tolist()) for _ in range(throughput.EPOCH) for x in next(batches)[0]]
    assert set(Counter(seen).values()) == {len(seen) // count}
    assert len(own.train_data) == count
    assert train(wider, Trial(lr=0.1, steps=3, batch_size=wanted)).status == "finished"


def test_only_examples_with_an_index_can_be_repeated(make_workload):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from ()

        def __len__(self):
            return 10

    assert throughput.repeatable(make_workload())
    assert not throughput.repeatable(make_workload(train_data=Stream(), batch_size=4))
