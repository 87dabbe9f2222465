"""The paths of an accelerator, on one that is emulated (``tests/emulated``): no machine here has a real one."""

import gc
import inspect

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from workup import Trial
from workup.measure import devices, memory
from workup.measure.executors import execute
from workup.measure.memory import Limit, attempt
from workup.measure.probe import search
from workup.measure.state import preserved
from workup.measure.syncs import find_syncs
from workup.measure.train import CHECK_EVERY, train

TRIAL = Trial(lr=0.05, steps=60, batch_size=16, eval_every=20, eval_examples=50)
WAY = Trial(lr=0.05, steps=60, batch_size=16, clip_percentile=90, clip_from=5)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_takes_the_accelerator_that_torch_sees(emulated, kind):
    with emulated(kind):
        first = kind if kind == "mps" else f"{kind}:0"
        assert devices.resolve("auto") == devices.resolve(kind) == first
        assert devices.name(first) == ("mps" if kind == "mps" else f"emulated {kind.upper()}")
        assert devices.resolve("cpu") == "cpu"
        assert devices.tells_syncs(first) == (kind == "cuda")


@pytest.mark.parametrize("trial", [TRIAL, WAY], ids=["evaluated", "clipped"])
@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_trial_trains_as_on_the_cpu_timed_by_events_with_its_peak(emulated, workload, kind, trial):
    here = train(workload, trial)
    with emulated(kind) as chip:
        there = train(workload, trial, device=devices.resolve("auto"))
        assert there.status == here.status == "finished", there.reason
        for column in ("loss", "grad_norm", "eval_loss", "lr"):
            np.testing.assert_allclose(there.steps[column], here.steps[column], rtol=1e-4)
        assert chip.events == 2 * trial.steps
        assert (there.steps.seconds > 0).all()
        assert (there.peak_bytes or 0) == (0 if kind == "mps" else chip.allocated_peak)
        assert there.peak_bytes is None if kind == "mps" else there.peak_bytes > 4000


def test_a_trial_waits_for_the_device_only_now_and_then(emulated, workload):
    with emulated() as chip:
        train(workload, WAY, device="cuda:0")
        assert chip.synchronizations == 1
        rows = 3  # of the trace, each brought to the host when the trial is over
        assert chip.waits == WAY.steps // CHECK_EVERY + 1 + rows


def test_a_stack_of_trials_waits_no_more_often_than_they_do(emulated, workload):
    trials = [Trial(lr=lr, steps=60, batch_size=16, clip_norm=1.0) for lr in (0.01, 0.03)]
    here = dict(execute(workload, trials, executor="ensemble"))
    with emulated() as chip:
        sent = []
        real = torch.tensor
        torch.tensor = lambda *args, **kwargs: sent.append(1) or real(*args, **kwargs)
        try:
            there = dict(execute(workload, trials, device="cuda:0", executor="ensemble"))
        finally:
            torch.tensor = real
        assert {trace.versions["executor"] for trace in there.values()} == {"ensemble"}
        for index, trace in here.items():
            np.testing.assert_allclose(there[index].steps.loss, trace.steps.loss, rtol=1e-4)
        assert len(sent) < 60
        assert chip.waits < 60


def greedy(numbers):
    def loss(model, batch):
        held = batch[0].new_ones(numbers)
        return model(batch[0]).sum(1) + 0 * held[0]

    return loss


def test_memory_that_runs_out_is_a_status_and_comes_back_fifty_times_over(emulated, make_workload):
    short, plenty = Trial(lr=0.05, steps=5, batch_size=16), make_workload()
    with emulated(total=2**22) as chip:
        train(plenty, short, device="cuda:0")
        gc.collect()
        base = chip.allocated
        for _ in range(50):
            trace = train(make_workload(loss=greedy(2**20)), short, device="cuda:0")
            assert (trace.status, len(trace.steps)) == ("out_of_memory", 0)
            assert "CUDA out of memory. Tried to allocate 4.00 MiB" in trace.reason
            assert "test_accelerator.py" in trace.reason
            assert chip.allocated == base
        assert train(plenty, short, device="cuda:0").status == "finished"


def test_memory_held_by_the_exception_that_another_one_hides_comes_back_too(emulated, make_workload):
    def loss(model, batch):
        kept = batch[0].new_ones(2**18)
        try:
            return model(batch[0]).sum(1) + 0 * torch.cat([kept] * 4)[0]
        except torch.OutOfMemoryError:
            raise RuntimeError("CUDA out of memory, once more") from None

    with emulated(total=2**22) as chip:
        trace = train(make_workload(loss=loss), Trial(lr=0.05, steps=5, batch_size=16), device="cuda:0")
        assert (trace.status, chip.allocated) == ("out_of_memory", 0)


def test_too_little_memory_for_the_recording_itself_is_a_status(emulated, workload):
    with emulated(total=2**12) as chip:
        trace = train(workload, Trial(lr=0.05, steps=5000, batch_size=16), device="cuda:0")
        assert (trace.status, len(trace.steps), chip.allocated) == ("out_of_memory", 0, 0)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_limit_is_set_and_lifted_and_what_is_free_is_the_machines(emulated, workload, kind):
    with emulated(kind, total=2**22) as chip:
        device = devices.resolve("auto")
        limit = memory.memory_limit(device)
        assert limit == Limit(int(0.95 * 2**22), f"free memory of {device}")
        one = attempt(workload, 16, device=device, limit=limit)
        assert (one.status, one.retries) == ("fits", 0), one.reason
        assert (one.allocated_bytes > 0) == (kind != "mps")
        assert one.allocated_bytes <= one.peak_bytes < 2**20
        if kind != "mps":
            assert attempt(workload, 200, device=device, limit=Limit(2**14, "test")).status == "out_of_memory"
            assert chip.limit == 2**22


def test_the_probe_finds_the_exact_size_that_fits(emulated, make_workload):
    wide = make_workload(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Linear(256, 3)))
    with emulated(total=2**24):

        def tried(size):
            return attempt(wide, size, device="cuda:0", limit=limit)

        limit = Limit(2**24, "test")
        limit = Limit(tried(77).peak_bytes + 700, "test")
        found = list(search(tried, first=16, most=200, limit_bytes=limit.bytes, within=0, tries=40))
        largest = max(one.batch_size for one in found if one.fits)
        near = range(largest - 3, largest + 5)
        assert [size for size in near if tried(size).fits] == list(near[:4])
        assert 77 <= largest < 90


def test_a_line_that_waits_is_named_by_torchs_own_warning(emulated, make_workload):
    def loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        losses.mean().item()  # the planted wait
        return losses

    lines, start = inspect.getsourcelines(loss)
    planted = start + next(i for i, line in enumerate(lines) if "planted" in line)
    for kind in ("cuda", "xpu"):
        with emulated(kind):
            found = find_syncs(make_workload(loss=loss), batch_size=16, device=f"{kind}:0")
        assert found[["file", "line", "per_step"]].values.tolist() == [[__file__, planted, 1.0]]


def test_tensors_left_on_the_host_are_met_with_torchs_error(emulated, make_workload):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * torch.ones(16)

    with emulated():
        trace = train(make_workload(loss=loss), Trial(lr=0.05, steps=5, batch_size=16), device="cuda:0")
        assert trace.status == "failed"
        assert "Expected all tensors to be on the same device" in trace.reason


def test_an_accelerator_first_used_inside_is_left_seeded_as_its_first_use_would_have(emulated, monkeypatch):
    seeds = []
    with emulated():
        started = iter([False, True])
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(started))
        torch.manual_seed(7)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        with preserved():
            torch.manual_seed(3)
        monkeypatch.undo()
    assert seeds == [3, 7]


@pytest.mark.parametrize(
    ("kind", "places"),
    [("xpu", [("xpu:0", {"ZE_AFFINITY_MASK": str(i)}) for i in range(2)]), ("mps", [("mps", {})])],
)
def test_processes_side_by_side_have_an_accelerator_each(emulated, kind, places):
    with emulated(kind, count=2):
        assert devices.places(devices.resolve("auto")) == places
