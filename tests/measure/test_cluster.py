"""The Ray executor: its errors everywhere, its cluster where Ray is installed."""

import functools
import os
import sys
import types

import numpy as np
import pytest

from workup import ParameterError, Trial, load
from workup.measure import cluster
from workup.measure.executors import execute

HERE = os.path.join(os.path.dirname(__file__), "executor_workloads.py")
TRIALS = [Trial(lr=lr, steps=6, batch_size=16) for lr in (0.01, 0.03, 0.1)]


def fake(gpus):
    return types.SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"GPU": float(n)}} for n in gpus])


def test_without_ray_it_says_what_to_install(workload, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ParameterError, match=r"Ray is not installed. pip install 'workup\[ray\]'"):
        next(execute(workload, TRIALS, executor="ray", reference=f"{HERE}:plain"))


@pytest.mark.parametrize(("given", "device", "gpus"), [(None, "cpu", 0), (None, "cuda:0", 1), ("0.25", "cuda:0", 0.25)])
def test_a_trial_takes_a_gpu_or_the_share_of_one_that_was_asked_for(given, device, gpus, monkeypatch):
    if given:
        monkeypatch.setenv("WORKUP_GPUS_PER_TRIAL", given)
    assert cluster._gpus(fake([0, 2]), device) == gpus


@pytest.mark.parametrize(
    ("given", "device", "why"),
    [
        ("3", "cuda:0", "the cluster's nodes have 2 GPUs each at most"),
        ("1.5", "cuda:0", "a whole number, or a fraction of one"),
        ("-1", "cuda:0", "a whole number, or a fraction of one"),
        ("many", "cuda:0", "a whole number, or a fraction of one"),
        ("1", "cpu", "GPUs go with --device cuda:0 alone"),
        ("0", "cuda:0", "GPUs go with --device cuda:0 alone"),
    ],
)
def test_gpus_that_no_node_has_or_that_make_no_sense_are_refused(given, device, why, monkeypatch):
    monkeypatch.setenv("WORKUP_GPUS_PER_TRIAL", given)
    with pytest.raises(ParameterError, match=why):
        cluster._gpus(fake([0, 2]), device)


class FakeRay:
    """As much of Ray as the executor asks for; a task runs when its answer is asked for, or is lost."""

    def __init__(self, losses=0):
        self.losses, self.cancelled = losses, []
        names = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")
        self.exceptions = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})

    def nodes(self):
        return []

    def remote(self, **options):
        assert options == {"num_cpus": 1, "num_gpus": 0.0, "max_retries": 0}
        return lambda task: types.SimpleNamespace(remote=lambda *args: functools.partial(task, *args))

    def wait(self, refs):
        return refs[:1], refs[1:]

    def get(self, ref):
        if self.losses:
            self.losses -= 1
            raise self.exceptions.OutOfMemoryError("the node ran low on memory")
        return ref()

    def cancel(self, ref, force):
        self.cancelled.append(ref)


@pytest.fixture
def sweep(monkeypatch, workload):
    """The small sweep on a fake cluster, and what it noted."""
    notes, place = [], f"{HERE}:plain"

    def run(fake):
        monkeypatch.setattr(cluster, "_connected", lambda: fake)
        return execute(load(place), TRIALS, executor="ray", reference=place, note=notes.append), notes

    return run


def test_a_lost_worker_costs_its_trial_nothing_but_time(sweep):
    found, notes = sweep(FakeRay(losses=2))
    found = dict(found)
    assert [(i, t.status, t.versions["executor"]) for i, t in sorted(found.items())] == [
        (i, "finished", "ray") for i in range(3)
    ]
    why = "was lost (OutOfMemoryError: the node ran low on memory); it runs again"
    assert notes == [f"the worker of task 0 {why}", f"the worker of task 1 {why}"]


def test_a_trial_larger_than_every_workers_memory_fails_with_the_reason(sweep):
    fake = FakeRay(losses=10**6)
    found, _ = sweep(fake)
    statuses = {i: (t.status, t.reason) for i, t in found}
    why = "its worker was lost 4 times (OutOfMemoryError: the node ran low on memory)"
    assert statuses == dict.fromkeys(range(3), ("failed", why))


def test_what_has_come_back_stays_and_what_runs_is_cancelled_where_the_driver_stops(sweep):
    fake = FakeRay()
    found, _ = sweep(fake)
    assert next(found)[1].status == "finished"
    found.close()
    assert len(fake.cancelled) == 2


@pytest.fixture
def two_nodes(monkeypatch, tmp_path):
    """A head without room for trials, and two nodes with a core each."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    # Ray gives up on a node whose agents take over 15 s to start (its issue 65983), and most of that time is one
    # format of jsonschema, which compiles a grammar at import; jsonschema does without it where it is not there.
    (tmp_path / "rfc3987_syntax.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mark").touch()
    monkeypatch.setenv("EXECUTOR_TEST_MARK", str(tmp_path / "mark"))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield
    ray.shutdown()
    made.shutdown()


def test_a_node_killed_in_mid_sweep_costs_no_trial(two_nodes):
    trials, notes = [Trial(lr=0.01 * k, steps=20, batch_size=16) for k in range(1, 5)], []
    place = f"{HERE}:node_killer"
    found = dict(execute(load(place), trials, executor="ray", reference=place, note=notes.append))
    assert len(notes) == 1
    assert "was lost" in notes[0]
    assert {(t.status, t.versions["executor"]) for t in found.values()} == {("finished", "ray")}
    for index, trace in execute(load(f"{HERE}:plain"), trials):
        assert found[index].trial == trace.trial
        np.testing.assert_allclose(found[index].steps.loss, trace.steps.loss, rtol=1e-5)


def test_a_whole_workbook_takes_the_cores_of_a_node(two_nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = cluster.workbooks(os.path.join, [("a", "b"), ("c", "d")], device="cpu", note=print)
    assert sorted(found) == [(0, "a/b", ""), (1, "c/d", "")]


def test_without_a_cluster_at_the_address_it_says_how_to_start_one(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ParameterError, match=r"no cluster answers at address 'auto' .*ray start --head"):
        next(execute(load(f"{HERE}:plain"), TRIALS, executor="ray", reference=f"{HERE}:plain"))
