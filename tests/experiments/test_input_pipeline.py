"""Planted causes of a step that waits for its data, each found by name, each with a healthy twin.

Sleeps stand in for disks and for work: they are the same on a busy machine.
"""

import dataclasses
import itertools
import json
import time

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
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, x):
        time.sleep(self.seconds)
        return x


class Planted(Dataset):
    """read: seconds for one example; burst: seconds more for every 16th; raw: floats nobody needs."""

    def __init__(self, *, read=0.0, burst=0.0, raw=0, transform=None):
        self.read, self.burst, self.raw, self.transform = read, burst, raw, transform
        self.count = itertools.count(1)

    def __len__(self):
        return 4000

    def __getitem__(self, i):
        if wait := self.read + self.burst * (next(self.count) % (4 * BATCH) == 0):
            time.sleep(wait)
        x = torch.randn(8)
        example = {"x": self.transform(x) if self.transform else x, "y": i % 3}
        return example | {"raw": torch.zeros(self.raw)} if self.raw else example


def loss(model, batch, *, seconds=STEP, log=False):
    time.sleep(seconds)
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    if log:
        losses.mean().item()
    return losses


def logging_loss(model, batch):
    return loss(model, batch, log=True)


def long_loss(model, batch):
    return loss(model, batch, seconds=3 * STEP)


def diagnose(workload, *others, seconds=0.4):
    """The causes named, from real measurements of a second or two."""
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


def named(found):
    """The names of a finding's causes; none also where a busy machine lets it tell nothing."""
    return [] if found.value in (None, "none") else found.value


@pytest.fixture
def plant(make_workload):
    torch.set_num_threads(1)

    def make(*, workers=0, prefetch=None, loss=loss, **planted):
        options = {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
        return make_workload(train_data=Planted(**planted), loss=loss, batch_size=BATCH, loader=options)

    return make


def test_a_healthy_pipeline_has_no_cause(plant):
    assert named(diagnose(plant(raw=8, transform=Blur(0.0)))) == []


def test_a_slow_disk_is_found(plant):
    found = diagnose(plant(read=STEP))
    assert named(found) == ["slow_read"]


def test_an_expensive_transform_is_found_by_its_name(plant):
    found = diagnose(plant(transform=Blur(STEP)))
    assert named(found) == ["expensive_transform"]
    assert found.evidence["expensive_transform"]["where"] == "Blur"


#: A sleeping worker needs no core of its own, which torch cannot know.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MORE = {"num_workers": 4, "prefetch_factor": 2, "persistent_workers": True}


def test_one_worker_where_four_would_do_is_found(plant):
    assert "too_few_workers" in named(diagnose(plant(read=1.5 * STEP, workers=1, prefetch=2, loss=long_loss), MORE))


def test_four_workers_on_the_same_data_are_enough(plant):
    found = diagnose(plant(read=1.5 * STEP, workers=4, prefetch=2, loss=long_loss), {**MORE, "num_workers": 5})
    assert "too_few_workers" not in named(found)


@pytest.mark.parametrize(("prefetch", "expected"), [(1, ["small_prefetch"]), (8, [])])
def test_a_prefetch_too_small_to_ride_out_slow_batches_is_found(plant, prefetch, expected):
    deep = {"num_workers": 1, "prefetch_factor": 8, "persistent_workers": True}
    found = diagnose(plant(burst=3 * STEP, workers=1, prefetch=prefetch), deep, seconds=1.2)
    assert named(found) == expected


def test_a_large_field_nobody_reads_is_found_by_its_name(plant):
    found = diagnose(plant(raw=1 << 16))
    assert "unused_field" in named(found)
    assert found.evidence["unused_field"]["where"] == "raw"


def test_a_value_fetched_each_step_is_found_at_its_line(plant):
    found = diagnose(plant(loss=logging_loss))
    assert named(found) == ["synchronisation"]
    assert found.evidence["synchronisation"]["where"].startswith(f"{__file__}:")


@pytest.fixture
def session(plant, tmp_path):
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
