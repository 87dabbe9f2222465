"""Trials, or whole workbooks, on a Ray cluster that is there: SLURM, Kubernetes or ``ray start`` began it, we connect.

Every node needs this package and, for a workload given by reference, the same files at the same place. Finished
traces come back one by one, so what was kept of them stays where the driver dies; what was under way trains again.
"""

import functools
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from workup.errors import ParameterError
from workup.measure import devices
from workup.measure.train import train
from workup.measure.workers import Found, failed, marked
from workup.notebooks import project_root
from workup.references import load
from workup.trace import Trace, Trial
from workup.workload import Workload

#: The environment's GPUs of one trial.
GPUS = "WORKUP_GPUS_PER_TRIAL"
#: How often a trial whose worker or node was lost trains again.
RETRIES = 3
#: By Ray's names: what becomes of a trial whose worker or node is gone, the system's memory included.
LOST = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")


def run(recipe: Any, trials: Sequence[Trial], *, device: str, note: Callable[[str], Any]) -> Found:
    """Train ``trials``, each a task of one core and its share of a GPU; each index and trace as it ends.

    The environment says where and with what: RAY_ADDRESS (``auto``: the cluster of this machine) and
    WORKUP_GPUS_PER_TRIAL (a fraction shares one; 1 on a GPU, else 0).

    Args:
        recipe: as from :func:`workup.measure.workers.recipe`.

    Raises:
        ParameterError: Ray is not installed, no cluster answers, or no node has the GPUs that a trial asks for.
    """
    ray = _connected()
    gpus = _gpus(ray, device)
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_task)
    calls = [(devices.alone(device) if gpus else device, str(project_root()), recipe, trial) for trial in trials]
    for index, trace, why in _spread(ray, task, calls, note):
        yield index, failed(trials[index], why, device) if trace is None else trace


def workbooks(
    function: Callable, calls: Sequence[tuple], *, device: str, note: Callable[[str], Any]
) -> Iterator[tuple]:
    """Call ``function`` with each of ``calls``, in the folder we are in: index, answer (None where lost), why.

    A workbook times its machine, so on a CPU it takes all cores of a node, and otherwise its share of a GPU.

    Raises:
        ParameterError: as :func:`run`.
    """
    ray = _connected()
    gpus = _gpus(ray, device)
    whole = min((n for node in ray.nodes() if node["Alive"] and (n := node["Resources"].get("CPU"))), default=1)
    task = ray.remote(num_cpus=1 if gpus else whole, num_gpus=gpus, max_retries=0)(_inside)
    yield from _spread(ray, task, [(os.getcwd(), function, *call) for call in calls], note)


def _spread(ray: Any, task: Any, calls: Sequence[tuple], note: Callable[[str], Any]) -> Iterator[tuple[int, Any, str]]:
    """Each call's index and answer as it ends; None and why where its worker or node was lost too often."""
    running, again = {task.remote(*call): index for index, call in enumerate(calls)}, Counter[int]()
    lost = tuple(getattr(ray.exceptions, name) for name in LOST)
    try:
        while running:
            ref = ray.wait(list(running))[0][0]
            index = running.pop(ref)
            try:
                yield index, ray.get(ref), ""
            except lost as error:
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                again[index] += 1
                if again[index] > RETRIES:
                    yield index, None, f"its worker was lost {again[index]} times ({why})"
                else:
                    note(f"the worker of task {index} was lost ({why}); it runs again")
                    running[task.remote(*calls[index])] = index
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def check(device: str) -> None:
    """Raise what :func:`run` would, before anything is trained."""
    ray = _connected()
    try:
        _gpus(ray, device)
    finally:
        ray.shutdown()


def _connected() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ParameterError("executor 'ray': Ray is not installed. pip install 'workup[ray]'") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            hint = "`ray start --head` starts one here; --ray-address names another."
            raise ParameterError(
                f"executor 'ray': no cluster answers at address '{address}' ({why}). {hint}"
            ) from error
    return ray


def _gpus(ray: Any, device: str) -> float:
    """GPUs of one trial, checked against what the nodes have."""
    given = os.environ.get(GPUS) or ("1" if devices.numbered(device) else "0")
    try:
        asked = float(given)
        if asked < 0 or not (asked < 1 or asked.is_integer()):
            raise ValueError
    except ValueError:
        raise ParameterError(f"--gpus-per-trial {given}: a whole number, or a fraction of one, is needed.") from None
    if bool(asked) != devices.numbered(device):
        raise ParameterError(f"--gpus-per-trial {given} with device '{device}': GPUs go with --device cuda:0 alone.")
    most = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    if asked > most:
        raise ParameterError(f"--gpus-per-trial {given}: the cluster's nodes have {most:g} GPUs each at most.")
    return asked


def _task(device: str, root: str, recipe: Any, trial: Trial) -> Trace:
    if os.path.isdir(root):
        os.chdir(root)  # relative references start there
    if device == "cpu":
        torch.set_num_threads(1)
    return marked(train(_workload(recipe), trial, device=device), "ray")


def _inside(root: str, function: Callable, *call: Any) -> Any:
    os.chdir(root)
    return function(*call)


@functools.lru_cache(maxsize=1)
def _workload(recipe: Any) -> Workload:
    return load(recipe) if isinstance(recipe, str) else pickle.loads(recipe)
