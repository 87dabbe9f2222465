from pathlib import Path

import pytest

from workup import start
from workup.errors import ParameterError
from workup.experiments import batch_size as experiment

FILE = Path(__file__).parents[1] / "measure" / "probe_workloads.py"


@pytest.fixture
def session(tmp_path):
    def make(name="plain", **knobs):
        fixed = {"study": str(tmp_path), "budget": "smoke", "device": "cpu"}
        return start("02_batch_size", {"workload": f"{FILE}:{name}", **fixed, **knobs})

    return make


def test_from_probe_to_a_recommendation_that_ran_again(session, monkeypatch):
    monkeypatch.setitem(experiment.BUDGET["smoke"], "slowest", 1e3)  # a busy machine ends no search
    notebook = session(max_batch_size=100)
    attempts = experiment.probe(notebook)
    assert attempts["status"].unique().tolist() == ["fits"]
    assert attempts["batch_size"].max() == 100
    stretches = experiment.sweep(notebook, attempts)
    assert sorted(stretches["batch_size"].unique()) == [2, 4, 8, 16, 32, 64]
    critical = experiment.critical(experiment.noise(notebook), experiment.to_goal(notebook))
    recommended, feasible, *_ = experiment.conclude(notebook, attempts, stretches, critical)
    assert feasible.value == 64
    assert feasible.evidence["limited_by"] == "the cap"
    assert recommended.value in (2, 4, 8, 16, 32, 64)
    assert recommended.evidence["verified_steps"] == experiment.VERIFY_STEPS
    assert recommended.evidence["evaluation_batch_size"] == 4 * recommended.value
    sizes = ("max_feasible", "saturation", "recommended", "critical")
    assert set(notebook.study.findings()) == {*(f"{name}_batch_size" for name in sizes), "input_bound"}
    costs = experiment.costs(notebook, critical, experiment.speeds(stretches, attempts))
    assert costs.set_index("batch_size").loc[8, "steps"] == pytest.approx(100)


@pytest.mark.parametrize(("exact", "found"), [(None, range(950, 1001)), (True, [1000])])
def test_the_exact_size_is_bisected_where_it_is_asked_for(session, monkeypatch, exact, found):
    class Prober:
        """A machine on which 1,000 examples fit into the gigabyte."""

        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def attempt(self, size):
            status = "fits" if size <= 1000 else "out_of_memory"
            return experiment.Attempt(batch_size=size, status=status, peak_bytes=min(size, 1000) * 10**6)

    monkeypatch.setattr(experiment, "Prober", Prober)
    attempts = experiment.probe(session(exact=exact, memory_limit_gb=1.0))
    assert attempts[attempts["status"] == "fits"]["batch_size"].max() in found


def test_the_data_set_is_the_roof_where_it_is_smaller_than_the_cap(session):
    assert experiment.roof(session()) == (4096, "the data set")
    assert experiment.roof(session(max_batch_size=10**6)) == (4096, "the data set")
    assert experiment.roof(session(max_batch_size=50)) == (50, "the cap")


def test_the_memory_limit_is_the_knob_in_gigabytes(session):
    assert experiment.limit(session(memory_limit_gb=1.5)).bytes == 1_500_000_000
    with pytest.raises(ParameterError, match="memory_limit_gb"):
        experiment.limit(session(memory_limit_gb=-1.0))


def test_where_nothing_fits_the_findings_say_so(session):
    notebook = session(memory_limit_gb=0.001)
    attempts = experiment.table(
        [experiment.Attempt(batch_size=1, status="out_of_memory", reason="DefaultCPUAllocator")]
    )
    stretches = experiment.sweep(notebook, attempts)
    critical = experiment.critical(experiment.noise(notebook), experiment.to_goal(notebook))
    found = experiment.conclude(notebook, attempts, stretches, critical)
    assert not any(finding.told for finding in found if finding.name != "critical_batch_size")


def test_batch_norm_layers_are_named(tmp_path):
    notebook = start("02_batch_size", {"workload": "digits-resnet", "study": str(tmp_path)})
    names = experiment.batch_norms(notebook)
    modules = dict(notebook.workload.build_model().named_modules())
    assert names
    assert all(type(modules[name]).__name__ == "BatchNorm2d" for name in names)


def test_steps_to_one_loss_are_taken_at_the_best_rate_of_each_size(session):
    reached = experiment.to_goal(session(), [4, 8, 16])
    assert reached.groupby("batch_size")["lr"].count().tolist() == [6, 6, 6]
    best = reached.groupby("batch_size")["steps"].min()
    assert best[8] <= 30
    assert best[4] > best[16]
