"""Planted causes of a step that waits for its data, each found by name, each with a healthy twin.

Sleeps of a clock of our own stand in for disks and for work, so that a busy machine changes nothing: what measures
and judges is the real code, and only a DataLoader's workers are simulated.
"""

import dataclasses
import itertools
import json

import pandas as pd
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from workup.experiments import input_pipeline
from workup.experiments.session import Session
from workup.judge import pipeline
from workup.measure import loader, stages, syncs
from workup.study import Study

BATCH = 4
STEP = 0.02


class Blur:
    def __init__(self, sleep):
        self.sleep = sleep

    def __call__(self, x):
        self.sleep(STEP)
        return x


class Planted(Dataset):
    """read: seconds for one example; burst: seconds more for every 16th; raw: floats nobody needs."""

    def __init__(self, sleep, *, read=1e-4, burst=0.0, raw=0, transform=None):
        self.sleep, self.read, self.burst, self.raw, self.transform = sleep, read, burst, raw, transform
        self.count = itertools.count(1)

    def __len__(self):
        return 4000

    def __getitem__(self, i):
        self.sleep(self.read + self.burst * (next(self.count) % (4 * BATCH) == 0))
        x = torch.randn(8)
        example = {"x": self.transform(x) if self.transform else x, "y": i % 3}
        return example | {"raw": torch.zeros(self.raw)} if self.raw else example


def diagnose(workload, *others, seconds=0.4):
    """The causes named, from measurements of a second or two of the clock's time."""
    settings = [dict(workload.loader), *others]
    speeds = loader.speeds(workload, batch_size=BATCH, rounds=2, seconds=seconds)
    bound = pipeline.input_bound(speeds, batch_size=BATCH)
    return pipeline.causes(
        bound,
        stages=stages.stages(workload, batch_size=BATCH, batches=2),
        sweep=loader.sweep(workload, settings, batch_size=BATCH, passes=1, seconds=seconds / 3),
        fields=stages.fields(workload, batch_size=BATCH),
        syncs=syncs.find_syncs(workload, batch_size=BATCH, steps=1),
    )


@pytest.fixture
def plant(make_workload, clock):
    def make(*, workers=0, prefetch=None, step=STEP, log=False, **planted):
        def loss(model, batch):
            clock.sleep(step)
            losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
            if log:
                losses.mean().item()
            return losses

        options = {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
        return make_workload(train_data=Planted(clock.sleep, **planted), loss=loss, batch_size=BATCH, loader=options)

    return make


def test_a_healthy_pipeline_has_no_cause(plant):
    assert diagnose(plant(raw=8)).value == "none"


def test_a_slow_disk_is_found(plant):
    found = diagnose(plant(read=STEP))
    assert found.value == ["slow_read"]
    assert found.evidence["slow_read"]["saves_seconds"] == pytest.approx(BATCH * STEP, rel=0.01)


def test_an_expensive_transform_is_found_by_its_name(plant, clock):
    found = diagnose(plant(transform=Blur(clock.sleep)))
    assert found.value == ["expensive_transform"]
    assert found.evidence["expensive_transform"]["where"] == "Blur"


#: A simulated worker needs no core, which torch cannot know.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MORE = {"num_workers": 4, "prefetch_factor": 2, "persistent_workers": True}


def test_one_worker_where_four_would_do_is_found(plant):
    found = diagnose(plant(read=1.5 * STEP, workers=1, prefetch=2, step=3 * STEP), MORE)
    assert set(found.value) == {"slow_read", "too_few_workers"}


def test_four_workers_on_the_same_data_are_enough(plant):
    slow = plant(read=1.5 * STEP, workers=4, prefetch=2, step=3 * STEP)
    assert diagnose(slow, {**MORE, "num_workers": 5}).value == "none"


@pytest.mark.parametrize(("prefetch", "small"), [(1, True), (8, False)])
def test_a_prefetch_too_small_to_ride_out_slow_batches_is_found(plant, prefetch, small):
    deep = {"num_workers": 1, "prefetch_factor": 8, "persistent_workers": True}
    found = diagnose(plant(burst=3 * STEP, workers=1, prefetch=prefetch), deep, seconds=1.2)
    assert ("small_prefetch" in found.value) is small
    assert small or found.value == "none"


def test_a_large_field_nobody_reads_is_found_by_its_name(plant):
    found = diagnose(plant(raw=1 << 16))
    assert found.value == ["unused_field"]
    assert found.evidence["unused_field"]["where"] == "raw"


def test_a_value_fetched_each_step_is_found_at_its_line(plant):
    found = diagnose(plant(log=True))
    assert found.value == ["synchronisation"]
    assert found.evidence["synchronisation"]["where"].startswith(f"{__file__}:")


@pytest.fixture
def session(tmp_path):
    def make(workload, **knobs):
        return Session(
            notebook="03_input_pipeline",
            workload=workload,
            reference="",
            study=Study.open(tmp_path / "study", workload=workload.name, fingerprint={}),
            device="cpu",
            seed=0,
            budget="smoke",
            knobs=knobs,
            fingerprint="",
        )

    return make


def test_the_plan_starts_with_the_users_own_setting_and_repeats_none(session, plant, workload):
    own = plant(workers=2, prefetch=4)
    settings = input_pipeline.plan(dataclasses.replace(session(own, max_workers=5), budget="standard"))
    assert settings[0] == own.loader
    filled = [tuple({**loader.DEFAULTS, **setting}.items()) for setting in settings]
    assert len(set(filled)) == len(filled)
    assert {setting.get("num_workers", 0) for setting in settings} == {0, 1, 2, 4, 5}
    assert {**own.loader, "prefetch_factor": 8} in settings
    assert loader.BY_EXAMPLE in input_pipeline.plan(session(workload))
    assert loader.BY_EXAMPLE not in settings


def test_the_experiment_records_three_findings_and_a_trace(session, workload):
    here = session(workload, batch_size=32, max_workers=1)
    speeds = input_pipeline.speeds(here)
    sweep = input_pipeline.sweep(here, input_pipeline.plan(here))
    inside = input_pipeline.look_inside(here)
    summary = input_pipeline.profile(here)
    found = input_pipeline.conclude(here, speeds, sweep, inside)
    assert [f.name for f in found] == ["input_bound", "input_causes", "loader_settings"]
    assert here.study.findings()["loader_settings"].value == found[2].value
    assert inside[2].empty
    assert "data" in set(summary.name)
    assert json.loads((here.study.folder / input_pipeline.TRACE).read_text())["traceEvents"]
    assert isinstance(sweep, pd.DataFrame)
