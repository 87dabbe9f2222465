import pytest
import torch
from torch.utils.data import Dataset

from workup.errors import WorkloadError
from workup.measure import data
from workup.measure.loader import BY_EXAMPLE, Feed, speeds, sweep, with_options

START = 0.1


@pytest.fixture
def steady(make_workload, clock):
    """Examples that take a millisecond each of the clock's time, from workers that take ``START`` to start."""

    class Steady(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            clock.sleep(0.001)
            return torch.ones(8) * i, i % 3

    clock.start = START
    return lambda **loader: make_workload(train_data=Steady(), batch_size=2, loader=loader)


def test_the_feed_gives_training_s_own_batches_and_marks_where_epochs_open(workload):
    feed = Feed(workload, 64, seed=3, device="cpu")
    expected = data.batches(workload, 64, seed=3, device="cpu")
    for _ in range(7):
        torch.testing.assert_close(feed.draw(), next(expected))
    assert [opens for _, opens in feed.waits] == [True, False, False, True, False, False, True]


def test_a_feed_without_a_full_batch_says_so(make_workload):
    class Few(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([torch.ones(8)])

    with pytest.raises(WorkloadError, match="no full batch of 4"):
        Feed(make_workload(train_data=Few(), batch_size=4), 4, seed=0, device="cpu").draw()


def test_the_three_speeds_are_interleaved_and_nothing_of_the_callers_changes(workload):
    state = torch.get_rng_state()
    table = speeds(workload, batch_size=16, rounds=3, seconds=0.09)
    assert table.what.tolist() == [
        *("loader", "step", "together"),
        *("step", "together", "loader"),
        *("together", "loader", "step"),
    ]
    assert (table.steps >= 2).all()
    assert (table.step_seconds > 0).all()
    assert table[table.what == "step"].data_seconds.eq(0).all()
    assert table[table.what == "step"].stall_seconds.isna().all()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_opens_an_epoch_is_kept_out_of_the_steady_step(steady):
    workload = steady(num_workers=1)
    row = sweep(workload, [workload.loader], batch_size=2, passes=1, seconds=0.3).iloc[0]
    assert row.status == "finished"
    assert row.first_batch_seconds == pytest.approx(START + 0.002, abs=1e-4)
    assert row.stall_seconds == pytest.approx(START, abs=1e-3)
    assert row.step_seconds == pytest.approx(0.002, abs=1e-4)
    assert row.epoch_step_seconds == pytest.approx(row.step_seconds + row.stall_seconds * 2 / 8)


def test_workers_that_persist_do_not_start_again(steady):
    kept, ended = {"num_workers": 1, "persistent_workers": True}, {"num_workers": 1}
    table = sweep(steady(), [kept, ended], batch_size=2, passes=1, seconds=0.3)
    assert table.stall_seconds[0] == pytest.approx(0, abs=1e-3)
    assert table.stall_seconds[1] == pytest.approx(START, abs=1e-3)


def test_real_workers_are_measured_too(make_workload):
    workload = make_workload(loader={"num_workers": 1})
    row = sweep(workload, [workload.loader], batch_size=16, passes=1, seconds=0.05).iloc[0]
    assert (row.status, row.num_workers, row.prefetch_factor) == ("finished", 1, 2)
    assert row.first_batch_seconds > 0


def test_options_that_need_workers_go_with_them_and_the_users_own_stay(make_workload):
    workload = make_workload(loader={"collate_fn": list, "timeout": 5, "num_workers": 2, "prefetch_factor": 4})
    assert dict(with_options(workload, {"num_workers": 0}).loader) == {"collate_fn": list, "num_workers": 0}
    more = with_options(workload, {"num_workers": 3})
    assert dict(more.loader) == {"collate_fn": list, "timeout": 5, "num_workers": 3, "prefetch_factor": 2}


def test_a_sweep_alternates_its_order_and_records_a_setting_that_fails(workload):
    settings = [{"num_workers": 0}, BY_EXAMPLE, {"num_workers": -1}]
    ticks = []
    table = sweep(workload, settings, batch_size=16, passes=2, seconds=0.02, advance=lambda: ticks.append(1))
    assert len(ticks) == len(table) == 6
    assert table.num_workers.tolist() == [0, 0, -1, -1, 0, 0]
    assert table.batching.tolist() == ["slices", "examples", "slices", "slices", "examples", "slices"]
    failed = table[table.status == "failed"]
    assert failed.num_workers.tolist() == [-1, -1]
    assert failed.reason.str.contains("num_workers").all()
