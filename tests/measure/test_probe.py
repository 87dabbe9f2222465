import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError, WorkloadError
from workup.measure.memory import Attempt, Limit
from workup.measure.probe import Prober, search

FILE = Path(__file__).with_name("probe_workloads.py")
MIB = 2**20


def machine(capacity, *, slope=1000, base=50_000, reason="CUDA out of memory", seconds=0.0):
    """Attempts on a machine that holds ``capacity`` examples; its memory grows in a straight line."""
    limit = base + slope * capacity

    def tried_at(size):
        if size > capacity:
            return Attempt(batch_size=size, status="out_of_memory", reason=reason)
        return Attempt(batch_size=size, status="fits", peak_bytes=base + slope * size, step_seconds=seconds * size)

    return tried_at, limit


def found(tried):
    return max((one.batch_size for one in tried if one.fits), default=0)


@pytest.mark.parametrize("capacity", [4096, 5000])
def test_the_size_found_was_tried_and_is_within_5_percent(capacity):
    tried_at, limit = machine(capacity)
    tried = list(search(tried_at, first=32, most=10**6, limit_bytes=limit))
    assert len(tried) <= 6
    assert capacity / 1.05 <= found(tried) <= capacity


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(8, 20_000),
    first=st.integers(1, 512),
    most=st.integers(1, 50_000),
    base=st.integers(0, 10**7),
)
def test_no_attempt_goes_beyond_the_data_or_is_made_twice_or_past_six(capacity, first, most, base):
    tried_at, limit = machine(capacity, base=base)
    tried = list(search(tried_at, first=first, most=most, limit_bytes=limit))
    sizes = [one.batch_size for one in tried]
    assert all(1 <= size <= most for size in sizes)
    assert len(set(sizes)) == len(sizes) <= 6
    best = min(capacity, most)
    if 2 * first <= capacity and 16**2 * first >= best:
        assert found(tried) * 1.06 + 1 >= best


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(0, 3000), first=st.integers(1, 4000), most=st.integers(1, 5000))
def test_the_exact_size_is_found_on_request(capacity, first, most):
    tried_at, limit = machine(capacity, slope=7, base=13)
    tried = list(search(tried_at, first=first, most=most, limit_bytes=limit, within=0, tries=100))
    assert found(tried) == min(capacity, most)


def test_memory_that_bends_upward_is_measured_on_the_way():
    limit = 700 * MIB

    def tried_at(size):
        peak = max(600 * MIB + size * 20_000, 400 * MIB + size * 160_000)
        status = "fits" if peak <= limit else "out_of_memory"
        return Attempt(batch_size=size, status=status, peak_bytes=min(peak, limit), step_seconds=0.01)

    tried = list(search(tried_at, first=32, most=10**6, limit_bytes=limit))
    true = 300 * MIB // 160_000
    assert len(tried) <= 6
    assert true / 1.1 <= found(tried) <= true


def test_a_line_that_was_wrong_by_little_is_followed_just_below_its_end():
    """As measured on a residual network, whose workspaces ask for more than the line says."""
    peaks = {64: 394.8, 256: 401.9, 3232: 465.4, 5404: 502.8}

    def tried_at(size):
        if size > 7191:
            return Attempt(batch_size=size, status="out_of_memory", reason="could not create a primitive")
        known = sorted(peaks)
        return Attempt(
            batch_size=size, status="fits", peak_bytes=int(np.interp(size, known, [peaks[n] for n in known]))
        )

    tried = list(search(tried_at, first=64, most=17244, limit_bytes=540))
    assert len(tried) <= 6
    assert 7191 / 1.05 <= found(tried) <= 7191


def test_a_capacity_far_below_todays_size_is_found():
    tried_at, limit = machine(3)
    tried = list(search(tried_at, first=64, most=4096, limit_bytes=limit, tries=8))
    assert found(tried) == 3


def test_today_s_size_is_itself_tried_first():
    tried_at, limit = machine(10**9)
    assert next(search(tried_at, first=64, most=100, limit_bytes=limit)).batch_size == 64


@pytest.mark.parametrize("most", [50, 100])
def test_the_data_set_or_the_cap_is_the_end(most):
    tried_at, limit = machine(10**9)
    assert found(list(search(tried_at, first=64, most=most, limit_bytes=limit))) == most


def test_where_nothing_fits_one_example_was_tried():
    tried_at, limit = machine(0)
    tried = list(search(tried_at, first=64, most=4096, limit_bytes=limit))
    assert (found(tried), tried[-1].batch_size) == (0, 1)


def test_sizes_too_slow_for_the_budget_are_not_tried():
    tried_at, limit = machine(10**9, seconds=0.001)
    tried = list(search(tried_at, first=16, most=10**6, limit_bytes=limit, slowest_seconds=1.0))
    assert 900 <= found(tried) <= 1000


def test_an_error_that_is_not_memory_is_never_swallowed():
    def tried_at(size):
        return Attempt(batch_size=size, status="failed", reason="ValueError: labels out of range")

    with pytest.raises(WorkloadError, match=r"batch size 8 fails, and not for want of memory: .*labels"):
        list(search(tried_at, first=8, most=64, limit_bytes=1))


def test_an_ambiguous_fault_is_memory_once_a_smaller_size_runs_and_an_error_if_none_does():
    reason = "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"
    tried_at, limit = machine(10, reason=reason)
    assert found(list(search(tried_at, first=64, most=4096, limit_bytes=limit))) in (9, 10)
    tried_at, limit = machine(0, reason=reason)
    with pytest.raises(WorkloadError, match=r"no size runs, down to 1, and it may not be memory"):
        list(search(tried_at, first=64, most=4096, limit_bytes=limit))


def test_a_real_limit_on_real_allocations_in_a_child_process():
    """Each example holds 1 MiB, each size is thus the MiB it needs, less what two children's own memory differs by."""
    with Prober(f"{FILE}:plain", limit=Limit(2**40, "test")) as prober:
        held = prober.attempt(8).peak_bytes
    limit = Limit(held + 400 * MIB, "test")
    with Prober(f"{FILE}:hungry", limit=limit) as prober:
        tried = list(search(prober.attempt, first=16, most=4096, limit_bytes=limit.bytes))
    assert len(tried) <= 6
    assert 0.85 * 400 <= found(tried) <= 1.05 * 400
    least_bad = min(one.batch_size for one in tried if not one.fits)
    assert least_bad <= 1.06 * found(tried)
    assert all(one.peak_bytes <= limit.bytes for one in tried if one.fits)


def test_a_child_that_is_killed_is_a_result_and_the_next_attempt_has_a_new_one():
    with Prober(f"{FILE}:killed", limit=Limit(2**40, "test")) as prober:
        one = prober.attempt(32)
        again = prober.attempt(8)
    assert (one.status, again.status) == ("out_of_memory", "fits")
    assert "SIGKILL" in one.reason


def test_a_child_that_aborts_may_have_lacked_memory_or_not():
    with (
        Prober(f"{FILE}:aborted", limit=Limit(2**40, "test")) as prober,
        pytest.raises(WorkloadError, match=r"no size runs, down to 32, and it may not be memory: .*SIGABRT"),
    ):
        list(search(prober.attempt, first=32, most=32, limit_bytes=1, tries=1))


def test_a_child_that_leaves_with_an_exit_code_did_not_lack_memory():
    with (
        Prober(f"{FILE}:exited", limit=Limit(2**40, "test")) as prober,
        pytest.raises(WorkloadError, match=r"batch size 32 fails, and not for want of memory: .*exit code 3"),
    ):
        list(search(prober.attempt, first=32, most=4096, limit_bytes=1))


def test_a_child_that_held_much_more_than_before_serves_no_further_attempt():
    """What it gave back lies ready for its next attempt; a new process, as the real run is one, has no such reserve."""
    with Prober(f"{FILE}:hungry", limit=Limit(2**40, "test")) as prober:
        least = prober.attempt(1).peak_bytes
        assert prober.process is not None
        prober.limit = Limit(least + 400 * MIB, "test")
        assert prober.attempt(250).fits
        assert prober.process is None


def test_a_child_that_does_not_answer_is_too_slow():
    with Prober(f"{FILE}:sleepy", limit=Limit(2**40, "test"), patience=300) as prober:
        assert prober.attempt(8).fits
        prober.patience = 0.5
        one = prober.attempt(32)
        assert prober.process is None
    assert (one.status, math.isnan(one.step_seconds)) == ("too_slow", True)


def test_a_users_mistake_in_the_child_is_raised_here():
    with (
        Prober(f"{FILE}:nothing", limit=Limit(2**40, "test")) as prober,
        pytest.raises(WorkloadError, match="nothing"),
    ):
        prober.attempt(8)


def test_a_workload_that_cannot_be_sent_is_refused_with_the_remedy(workload):
    with pytest.raises(ParameterError, match=r"cannot be sent to a child process .*Give its reference"):
        Prober(workload, limit=Limit(2**40, "test"))
