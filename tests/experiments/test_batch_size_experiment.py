import dataclasses
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
    assert not any(finding.is_conclusive for finding in found if finding.name != "critical_batch_size")


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


# -- as far as it takes, and once ---------------------------------------------------------------


def sized(step_seconds, sizes, rounds=range(2), share=0.0):
    """Stretches on a machine whose step takes ``step_seconds(size)``."""
    rows = [[n, r, 10, step_seconds(n), share * step_seconds(n), n / step_seconds(n)] for n in sizes for r in rounds]
    names = ["batch_size", "seed", "steps", "step_seconds", "data_seconds", "examples_per_second"]
    return experiment.pd.DataFrame(rows, columns=names)


def fits(*sizes):
    return experiment.table([experiment.Attempt(batch_size=n, status="fits", peak_bytes=n * 10**4) for n in sizes])


ALL = [2**k for k in range(13)]


def test_past_the_data_set_sizes_are_timed_while_throughput_grows_and_memory_and_time_allow(session):
    notebook, whole = session(), fits(64, 4096)
    quick = sized(lambda n: 1e-3 + 1e-7 * n, ALL)
    assert experiment._larger(notebook, whole, quick) == {8192: pytest.approx(2 * (1e-3 + 4096e-7))}
    assert not experiment._larger(notebook, whole, sized(lambda n: 1e-6 * n, ALL))  # it grows no more
    assert not experiment._larger(notebook, whole, sized(lambda n: 1 + 1e-6 * n, ALL))  # too slow
    assert not experiment._larger(notebook, fits(64, 2048), quick)  # memory ended the search, not the data
    assert not experiment._larger(session(memory_limit_gb=0.05), whole, quick)
    assert not experiment._larger(session(max_batch_size=100), whole, quick)


def test_rounds_go_on_for_the_sizes_in_doubt_alone_and_end_with_their_time(session):
    notebook, whole = session(), fits(64, 4096)
    least, most, _ = experiment.BUDGET["smoke"]["rounds"]
    clear = sized(lambda n: 1e-3 + 1e-5 * n, ALL)
    assert experiment._again(notebook, whole, clear, done=least - 1).keys() == set(ALL)
    assert not experiment._again(notebook, whole, clear, done=most)
    waits = clear.assign(data_seconds=clear["step_seconds"] * (0.02 + 0.4 * clear["seed"]))
    assert experiment._again(notebook, whole, waits, done=most).keys() == {notebook.workload.batch_size}
    spent = waits.assign(seed=waits["seed"] + most, steps=10**6)
    assert not experiment._again(notebook, whole, spent, done=most + 2)


def test_sizes_past_a_small_data_set_are_measured_and_never_recommended(session, monkeypatch):
    monkeypatch.setitem(experiment.BUDGET["smoke"], "slowest", 1e3)
    monkeypatch.setitem(experiment.BUDGET["smoke"], "stretch", 0.1)
    notebook = session("few")
    attempts = experiment.probe(notebook)
    stretches = experiment.sweep(notebook, attempts)
    assert stretches["batch_size"].max() > 100
    critical = experiment.critical(experiment.noise(notebook), experiment.to_goal(notebook))
    recommended, feasible, saturated, *_ = experiment.conclude(notebook, attempts, stretches, critical)
    assert feasible.value == 64
    assert recommended.value <= 64
    assert not saturated.is_conclusive or saturated.value == "does not matter" or saturated.value > 0
    assert experiment.costs(notebook, critical, experiment.speeds(stretches, attempts))["batch_size"].max() <= 100


def test_a_second_run_into_the_study_measures_nothing_again(session, monkeypatch):
    def run(notebook):
        attempts = experiment.probe(notebook)
        stretches = experiment.sweep(notebook, attempts)
        critical = experiment.critical(experiment.noise(notebook), experiment.to_goal(notebook))
        return experiment.conclude(notebook, attempts, stretches, critical)

    fixed = {"max_batch_size": 32, "memory_limit_gb": 8.0}
    first = run(session(**fixed))

    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(experiment, "Prober", refuse)
    monkeypatch.setattr(experiment.noise_scale, "measure", refuse)
    monkeypatch.setattr("workup.measure.executors.train", refuse)
    assert run(session(**fixed)) == first
    with pytest.raises(AssertionError, match="measured again"):
        experiment.probe(session(**fixed | {"max_batch_size": 16}))
    with pytest.raises(AssertionError, match="measured again"):
        experiment.noise(dataclasses.replace(session(**fixed), fingerprint="another"))


def test_attempts_are_kept_only_while_they_fit_what_is_free_now(session, monkeypatch):
    notebook, made = session(), []

    @experiment.once
    def attempted(_):
        made.append(1)
        return fits(64)

    for n_bytes, times in ((10**6, 1), (2 * 10**6, 1), (640_000, 2)):
        monkeypatch.setattr(experiment, "limit", lambda _, n=n_bytes: experiment.Limit(n, "free memory"))
        attempted(notebook)
        assert len(made) == times


def test_a_size_that_failed_past_the_data_is_not_tried_for_ever(session):
    quick = sized(lambda n: 1e-3 + 1e-7 * n, ALL)
    failed = sized(lambda n: 1.0, [8192]).assign(examples_per_second=float("nan"), step_seconds=float("nan"))
    assert not experiment._larger(session(), fits(64, 4096), experiment.pd.concat([quick, failed]))
