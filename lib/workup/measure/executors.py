"""Where a sweep's trials train: one after another, in processes, or stacked; each gives the plain loop's traces."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from multiprocessing import connection
from typing import Any

import pandas as pd
import torch

from workup.errors import ParameterError, WorkupError, nearest
from workup.measure import devices, ensemble
from workup.measure.ensemble import Unfit
from workup.measure.train import train
from workup.notebooks import EXECUTORS
from workup.trace import COLUMNS, Trace, Trial
from workup.workload import Workload, load

DEFAULT = "serial"
#: What a stack must gain for ``auto`` to take it, and the seconds left to train from which processes pay.
GAIN, LONG = 1.1, 30.0

Found = Iterator[tuple[int, Trace]]
Note = Callable[[str], Any]


def execute(
    workload: Workload,
    trials: Sequence[Trial],
    *,
    device: str = "cpu",
    executor: str = "serial",
    save: Callable[[int, Trace], Any] | None = None,
    reference: str | None = None,
    note: Note = lambda _: None,
) -> Generator[tuple[int, Trace], None, None]:
    """Train ``trials``; each one's index and trace as it ends, in any order.

    Args:
        executor: ``serial``, the plain loop; ``processes``, one a core or a GPU; ``ensemble``, trials
            stacked in one vectorised pass, the plain loop where that is not the same; or ``auto``.
        save: called now and then with the index and unfinished trace of a trial.
        reference: what a worker finds the workload by; without one it is sent pickled.
        note: called with a sentence for each choice made.

    Raises:
        ParameterError: an unknown executor, or a workload that cannot be sent to a process.
        KeyboardInterrupt: Ctrl-C, after the traces under way came out as ``interrupted``, or, with processes,
            were last given to ``save``; no process is left.
    """
    if executor not in EXECUTORS:
        raise ParameterError(f"executor {executor!r}: {nearest(executor, EXECUTORS)}")
    if executor == "processes":
        yield from _processes(_recipe(workload, reference), trials, device, save, note)
        return
    left = set(range(len(trials)))
    if executor in ("ensemble", "auto"):
        for index, trace in _stacked(workload, trials, device, save, note, GAIN if executor == "auto" else 0.0):
            left.discard(index)
            yield index, trace
    rest = [index for index in range(len(trials)) if index in left]
    if executor == "auto" and len(rest) > 1 and (why := _long(workload, [trials[i] for i in rest], device)):
        with contextlib.suppress(ParameterError):
            recipe = _recipe(workload, reference)
            note(why)
            chosen = _processes(recipe, [trials[i] for i in rest], device, save and _renumbered(save, rest), note)
            yield from ((rest[index], trace) for index, trace in chosen)
            return
    yield from _serial(workload, trials, rest, device, save)


def _renumbered(save: Callable[[int, Trace], Any], indices: Sequence[int]) -> Callable[[int, Trace], Any]:
    return lambda index, trace: save(indices[index], trace)


def _marked(trace: Trace, executor: str) -> Trace:
    return dataclasses.replace(trace, versions={**trace.versions, "executor": executor})


def _serial(workload: Workload, trials: Sequence[Trial], indices: Sequence[int], device: str, save: Any) -> Found:
    for index in indices:
        trace = train(workload, trials[index], device=device, save=save and partial(save, index))
        yield index, _marked(trace, "serial")
        if trace.status == "interrupted":
            raise KeyboardInterrupt


def _stacked(workload: Workload, trials: Sequence[Trial], device: str, save: Any, note: Note, gain: float) -> Found:
    """Each group of alike trials that trains as the plain loop does; tried by seed where seeds do not mix."""
    queue = [(indices, False) for indices in ensemble.groups(trials)]
    while queue:
        indices, one_seed = queue.pop(0)
        if len(indices) < 2:
            continue
        own = [trials[index] for index in indices]
        try:
            took = ensemble.compare(workload, own, device=device)
            plain, stack = 1000 * took.plain_seconds, 1000 * took.stack_seconds
            said = f"a step of {len(own)} trials takes {stack:.3g} ms, one by one {plain:.3g} ms"
            if not plain >= gain * stack:
                raise Unfit(said)
            note(f"ensemble: {said}")
            found = ensemble.run(workload, own, device=device, save=save and _renumbered(save, indices))
            for index, trace in found:
                yield indices[index], _marked(trace, "ensemble")
        except Unfit as error:
            parts = [] if one_seed else ensemble.groups(own, by_seed=True)
            if len(parts) > 1:
                queue = [([indices[i] for i in part], True) for part in parts] + queue
            else:
                note(f"no ensemble of {len(own)} trials: {error}")


def _long(workload: Workload, trials: Sequence[Trial], device: str) -> str:
    """Why processes pay: more than one device, and enough to train; else ""."""
    count = len(_devices(device))
    pace = train(workload, trials[0], device=device, first=4).steps.seconds[1:].median() if count > 1 else 0.0
    seconds = pace * sum(trial.steps for trial in trials)
    return f"processes: about {seconds:.0f} s to train on {count} devices" if seconds > LONG else ""


def _devices(device: str) -> list[str]:
    """A process's device each: every GPU, or the CPU once a core this process may use."""
    if device.startswith("cuda"):
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [device] * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _recipe(workload: Workload, reference: str | None) -> Any:
    if reference is not None:
        return reference
    for field in dataclasses.fields(workload):
        try:
            pickle.dumps(getattr(workload, field.name))
        except Exception as error:
            raise ParameterError(
                f"executor 'processes': {field.name} of workload {workload.name!r} cannot be sent to a process "
                f"({error}). Give the workload's reference, 'path/to/file.py:name'."
            ) from error
    return pickle.dumps(workload)


@dataclasses.dataclass
class Worker:
    """A process and the trial it trains."""

    process: Any
    pipe: Any
    device: str
    index: int


def _processes(recipe: Any, trials: Sequence[Trial], device: str, save: Any, note: Note) -> Found:
    """A worker lost costs its trial one retry, then a ``failed`` trace; leaving early ends every worker."""
    waiting, tries = list(range(len(trials))), [0] * len(trials)
    workers: list[Worker] = []
    try:
        for place in _devices(device)[: len(trials)]:
            workers.append(_start(recipe, place))
            _send(workers[-1], trials, waiting)
        while busy := [worker for worker in workers if worker.index >= 0]:
            ready = connection.wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                index = worker.index
                try:
                    kind, answer = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    kind, answer = "lost", _ending(worker)
                    workers[workers.index(worker)] = worker = _start(recipe, worker.device)
                if kind == "error":
                    raise answer
                if kind == "save":
                    save and save(index, answer)
                    continue
                tries[index] += kind == "lost"
                if kind == "lost" and tries[index] == 1:
                    note(f"the process of trial {index} {answer}; it trains again")
                    waiting.insert(0, index)
                elif kind == "lost":
                    yield (
                        index,
                        _marked(_failed(trials[index], f"its process {answer}, twice", worker.device), "processes"),
                    )
                else:
                    yield index, _marked(answer, "processes")
                _send(worker, trials, waiting)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


def _start(recipe: Any, device: str) -> Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, recipe, device), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, device, -1)


def _send(worker: Worker, trials: Sequence[Trial], waiting: list[int]) -> None:
    worker.index = waiting.pop(0) if waiting else -1
    if worker.index >= 0:
        with contextlib.suppress(BrokenPipeError):  # its end is then seen where its answer is awaited
            worker.pipe.send(trials[worker.index])


def _ending(worker: Worker) -> str:
    worker.process.join()
    worker.pipe.close()
    code = worker.process.exitcode
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"was killed ({name}), as the system does when memory runs out" if name == "SIGKILL" else f"died ({name})"


def _failed(trial: Trial, reason: str, device: str) -> Trace:
    steps = pd.DataFrame({name: [] for name in COLUMNS}).astype(COLUMNS)
    return Trace(trial=trial, steps=steps, status="failed", reason=reason, device=device, versions=devices.versions())


def _serve(pipe: Any, recipe: Any, device: str) -> None:
    """A worker's whole life: find the workload, train what comes, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's, which then ends this process
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            workload = load(recipe) if isinstance(recipe, str) else pickle.loads(recipe)
            while True:
                trial = pipe.recv()
                trace = train(workload, trial, device=device, save=lambda unfinished: pipe.send(("save", unfinished)))
                pipe.send(("trace", trace))
        except WorkupError as error:
            pipe.send(("error", error))
