import math
import resource
from types import SimpleNamespace

import psutil
import pytest
import torch

from workup.errors import ParameterError, WorkloadError
from workup.measure import memory
from workup.measure.memory import Limit, attempt, memory_limit

MIB = 2**20
WIDE = Limit(2**40, "test")


def here(more_mib):
    """A limit of so many MiB above what this process holds now."""
    return Limit(psutil.Process().memory_info().rss + more_mib * MIB, "test")


def hold(mib):
    def loss(model, batch):
        held = torch.ones(mib, MIB // 4)
        return model(batch[0]).sum(1) + 0 * held[0, 0]

    return loss


def test_a_size_that_fits_reports_its_steps_time_and_peak(workload):
    one = attempt(workload, 16, limit=WIDE, steps=4)
    assert (one.status, one.batch_size, one.steps, one.reason) == ("fits", 16, 4, "")
    assert one.step_seconds > 0
    assert one.peak_bytes > 50 * MIB


def test_the_peak_counts_what_was_held_only_for_a_moment(make_workload):
    small = attempt(make_workload(loss=hold(1)), 4, limit=WIDE)
    large = attempt(make_workload(loss=hold(300)), 4, limit=WIDE)
    assert large.peak_bytes - small.peak_bytes == pytest.approx(299 * MIB, rel=0.1)


def test_too_little_memory_for_the_trace_itself_is_a_size_that_does_not_fit(workload, monkeypatch):
    def train(*_, **__):
        raise MemoryError("malloc of size 128 failed")

    monkeypatch.setattr(memory, "train", train)
    one = attempt(workload, 4, limit=WIDE)
    assert (one.status, one.steps, one.reason) == ("out_of_memory", 0, "MemoryError: malloc of size 128 failed")


def test_the_limit_is_real_and_its_fault_leaves_nothing_behind_ten_times_over(make_workload):
    greedy = make_workload(loss=hold(600))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    attempt(greedy, 4, limit=here(200))
    rss = psutil.Process().memory_info().rss
    for _ in range(10):
        one = attempt(greedy, 4, limit=here(200))
        assert (one.status, one.steps) == ("out_of_memory", 0)
        assert "DefaultCPUAllocator" in one.reason
    assert psutil.Process().memory_info().rss - rss < 20 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert attempt(make_workload(loss=hold(100)), 4, limit=here(300)).fits


def test_a_peak_past_the_limit_does_not_fit_even_where_the_system_let_it_pass(workload, monkeypatch):
    monkeypatch.setattr(memory, "_status_bytes", lambda name: None)  # not Linux: no limit on the data segment
    one = attempt(workload, 4, limit=Limit(MIB, "test"))
    assert one.status == "out_of_memory"
    assert "past the limit" in one.reason


def test_a_size_that_made_the_allocator_free_its_cache_to_go_on_is_past_the_limit(workload, monkeypatch):
    monkeypatch.setattr(memory, "_peak", lambda device: (MIB, MIB, 3))
    one = attempt(workload, 4, limit=WIDE)
    assert (one.status, one.retries) == ("out_of_memory", 3)
    assert "3 times" in one.reason


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RuntimeError("shapes cannot be multiplied"), "failed", "shapes cannot be multiplied"),
        (ValueError("out of memory."), "failed", "ValueError"),
        (RuntimeError("CUDA error: device-side assert triggered"), "failed", "only a new process helps"),
        (RuntimeError("CUDA error: invalid configuration argument"), "launch_limit", "invalid configuration"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "out_of_memory", "CUDNN"),
        (MemoryError("no more"), "out_of_memory", "no more"),
    ],
)
def test_what_a_step_raises_decides_how_the_attempt_ended(make_workload, error, status, says):
    def raises(model, batch):
        raise error

    for training in (True, False):
        one = attempt(make_workload(loss=raises), 4, limit=WIDE, training=training)
        assert one.status == status
        assert says in one.reason


def test_an_evaluation_that_runs_out_of_memory_is_part_of_the_attempt(make_workload):
    def greedy_in_evaluation(model, batch):
        if not model.training:
            torch.empty(2**50)
        return model(batch[0]).sum(1)

    workload = make_workload(loss=greedy_in_evaluation)
    assert attempt(workload, 4, limit=WIDE).status == "out_of_memory"
    assert attempt(workload, 4, limit=WIDE, training=False).status == "out_of_memory"


def test_an_attempt_leaves_model_random_state_and_modes_as_they_were(make_workload):
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    for training in (True, False):
        attempt(make_workload(model=model), 16, limit=WIDE, training=training)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_size_beyond_the_data_is_refused_by_name(workload):
    with pytest.raises(WorkloadError, match="batch size 201 is larger than train_data"):
        attempt(workload, 201, limit=WIDE)


def test_the_limit_asked_for_is_the_limit():
    assert memory_limit(asked_bytes=5e8) == Limit(500_000_000, "the limit you set")
    for bad in (0, -1, math.nan, math.inf, "4GB"):
        with pytest.raises(ParameterError, match="positive number of bytes"):
            memory_limit(asked_bytes=bad)


def test_the_machines_limit_leaves_a_margin_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_room", dict)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))
    assert memory_limit() == Limit(900 * MIB, "free physical memory")


def test_the_processs_own_limit_counts(monkeypatch):
    real = resource.getrlimit
    soft = {resource.RLIMIT_AS: 10 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft.get(which, real(which)[0]), real(which)[1]))
    assert memory_limit() == Limit(9 * MIB, "RLIMIT_AS")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_control_groups_limit_is_the_tightest_on_the_way_up(tmp_path, version):
    proc, root = tmp_path / "cgroup", tmp_path / "sys"
    if version == 2:
        proc.write_text("0::/a/b\n")
        write(root / "a", memory__max=1000, memory__current=300)
        write(root / "a/b", memory__max="max", memory__current=200)
    else:
        proc.write_text("5:cpu:/x\n4:memory:/a/b\n0::/\n")
        write(root / "memory/a", memory__limit_in_bytes=1000, memory__usage_in_bytes=300)
        write(root / "memory/a/b", memory__limit_in_bytes=5000, memory__usage_in_bytes=200)
    assert list(memory._cgroup_room(proc, root).values()) == [700]


def test_no_control_group_is_no_limit(tmp_path):
    assert memory._cgroup_room(tmp_path / "none", tmp_path) == {}
