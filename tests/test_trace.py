import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup import ParameterError, Trace, Trial
from workup.trace import COLUMNS

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=0, max_size=20)


def trace_of(losses, **header):
    steps = len(losses)
    table = pd.DataFrame({name: np.zeros(steps) for name in COLUMNS}).assign(loss=losses).astype(COLUMNS)
    return Trace(trial=Trial(lr=0.1, steps=max(steps, 1), batch_size=4), steps=table, **header)


@settings(deadline=None, max_examples=30)
@given(VALUES)
def test_a_trace_comes_back_from_its_bytes_as_it_was_nan_and_inf_included(losses):
    trace = trace_of(losses, status="diverged", reason="step 3: …", peak_bytes=7, versions={"torch": "2"})
    back = Trace.from_bytes(trace.to_bytes())
    pd.testing.assert_frame_equal(back.steps, trace.steps, check_exact=True)
    fields = [f.name for f in dataclasses.fields(Trace) if f.name != "steps"]
    assert [getattr(back, f) for f in fields] == [getattr(trace, f) for f in fields]


def test_only_an_interrupted_trace_is_run_again():
    assert not trace_of([1.0], status="interrupted").done
    assert all(trace_of([1.0], status=s).done for s in ("finished", "diverged", "out_of_memory", "failed"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive, finite number"),
        ({"lr": float("nan")}, "lr must be a positive, finite number"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"warmup_steps": 11}, r"warmup_steps must be at most steps \(10\)"),
        ({"shape": "cosine"}, "shape must be 'constant', 'workload' or 'rising'"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"clip_percentile": 100}, "clip_percentile must be between 0 and 100"),
        ({"clip_percentile": 90, "clip_norm": 1.0}, "clip_percentile must be None where clip_norm is given"),
        ({"clip_from": -1}, "clip_from"),
        ({"eval_every": -1}, "eval_every"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(setting, message):
    with pytest.raises(ParameterError, match=message):
        Trial(**{"lr": 0.1, "steps": 10, "batch_size": 4, **setting})


def test_a_rising_rate_goes_through_six_decades_by_equal_factors():
    rates = Trial(lr=10.0, steps=7, batch_size=1, shape="rising").learning_rates()
    assert rates == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])


def test_warmup_ramps_linearly_to_the_peak_and_the_schedule_follows():
    trial = Trial(lr=2.0, steps=8, batch_size=1, warmup_steps=4, shape="workload")
    rates = trial.learning_rates(lambda fraction: 1 - fraction)
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5])
    constant = dataclasses.replace(trial, shape="constant").learning_rates(lambda fraction: 0.0)
    np.testing.assert_allclose(constant[4:], 2.0)


def test_an_id_changes_with_every_setting_and_with_the_workload():
    base = Trial(lr=0.1, steps=10, batch_size=4)
    others = [
        dataclasses.replace(base, **{name: value})
        for name, value in [
            ("lr", 0.2),
            ("steps", 11),
            ("batch_size", 5),
            ("warmup_steps", 1),
            ("shape", "workload"),
            ("clip_norm", 1.0),
            ("clip_percentile", 90),
            ("clip_from", 1),
            ("change", "weight=0"),
            ("optimizer", "adam"),
            ("seed", 1),
            ("eval_every", 1),
            ("eval_examples", 5),
        ]
    ]
    assert len(others) == len(dataclasses.fields(Trial))
    ids = {trial.id("w") for trial in [base, *others]} | {base.id("other workload")}
    assert len(ids) == len(others) + 2
    assert base.id("w") == Trial(lr=0.1, steps=10, batch_size=4).id("w")
