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
    rest = list(range(len(trials)))
    if executor in ("ensemble", "auto"):
        gain = GAIN if executor == "auto" else 0.0
        for index, trace in _stacked(workload, trials, device, save, note, gain):
            rest.remove(index)
            yield index, _marked(trace, "ensemble")
    recipe = _recipe(workload, reference) if executor == "processes" else reference
    if executor == "processes" or (executor == "auto" and recipe and _pays(workload, trials, rest, device, note)):
        for index, trace in _processes(recipe, trials, rest, device, save, note):
            yield index, _marked(trace, "processes")
        return
    for index in rest:
        trace = train(workload, trials[index], device=device, save=save and partial(save, index))
        yield index, _marked(trace, "serial")
        if trace.status == "interrupted":
            raise KeyboardInterrupt


def _marked(trace: Trace, executor: str) -> Trace:
    return dataclasses.replace(trace, versions={**trace.versions, "executor": executor})


def _stacked(workload: Workload, trials: Sequence[Trial], device: str, save: Any, note: Note, gain: float) -> Found:
    """Each group of alike trials that trains as the plain loop does; tried by seed where seeds do not mix."""
    queue = [(indices, False) for indices in ensemble.groups(trials) if len(indices) > 1]
    while queue:
        indices, one_seed = queue.pop(0)
        own = [trials[index] for index in indices]
        keep = save and (lambda k, trace, indices=indices: save(indices[k], trace))
        try:
            took = ensemble.compare(workload, own, device=device)
            plain, stack = 1000 * took.plain_seconds, 1000 * took.stack_seconds
            said = f"a step of {len(own)} trials takes {stack:.3g} ms, one by one {plain:.3g} ms"
            if plain < gain * stack:
                raise Unfit(said)
            note(f"ensemble: {said}")
            for k, trace in ensemble.run(workload, own, device=device, save=keep):
                yield indices[k], trace
        except Unfit as error:
            parts = [] if one_seed else ensemble.groups(own, by_seed=True)
            if len(parts) < 2:
                note(f"no ensemble of {len(own)} trials: {error}")
            queue[:0] = [([indices[k] for k in part], True) for part in parts if 1 < len(part) < len(own)]


def _pays(workload: Workload, trials: Sequence[Trial], rest: Sequence[int], device: str, note: Note) -> bool:
    """Whether to spread ``rest``: there is more than one device, and long to train."""
    count = len(_devices(device))
    if min(count, len(rest)) < 2:
        return False
    pace = train(workload, trials[rest[0]], device=device, first=4).steps.seconds[1:].median()
    seconds = pace * sum(trials[index].steps for index in rest)
    note(f"{len(rest)} trials, about {seconds:.0f} s one by one; {count} processes pay from {LONG:.0f} s")
    return bool(seconds > LONG)


def _devices(device: str) -> list[str]:
    """A process's device each: every GPU, or the CPU once a core this process may use."""
    if device.startswith("cuda"):
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [device] * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _recipe(workload: Workload, reference: str | None) -> Any:
    for field in dataclasses.fields(workload) if reference is None else ():
        try:
            pickle.dumps(getattr(workload, field.name))
        except Exception as error:
            raise _unsent(f"{field.name} of {workload.name!r}: {error}") from error
    return reference or pickle.dumps(workload)


def _unsent(why: str) -> ParameterError:
    hint = "Give the workload's reference, 'path/to/file.py:name'."
    return ParameterError(f"executor 'processes': the workload cannot be sent to a process ({why}). {hint}")


def _processes(
    recipe: Any, trials: Sequence[Trial], indices: Sequence[int], device: str, save: Any, note: Note
) -> Found:
    """A worker lost costs its trial one retry, then a ``failed`` trace; leaving early ends every worker."""
    waiting, retried = list(indices), set()
    busy: list[Worker] = []
    try:
        for place in _devices(device)[: len(indices)]:
            busy.append(_start(recipe, place))
            busy[-1].send(trials, waiting.pop(0))
        while busy:
            ready = connection.wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                index, (kind, answer) = worker.index, worker.receive()
                if kind == "error":
                    raise answer
                if kind == "save":
                    save and save(index, answer)
                    continue
                if kind == "lost":
                    busy.remove(worker)
                    if index not in retried:
                        retried.add(index)
                        waiting.insert(0, index)
                        note(f"the process of trial {index} {answer}; it trains again")
                    else:
                        yield index, _failed(trials[index], f"its process {answer}, twice", worker.device)
                    if waiting:
                        worker = _start(recipe, worker.device)
                        busy.append(worker)
                else:
                    yield index, answer
                if waiting:
                    worker.send(trials, waiting.pop(0))
                elif worker in busy:
                    busy.remove(worker)
                    worker.end()
    finally:
        for worker in busy:
            worker.end()


@dataclasses.dataclass(eq=False)
class Worker:
    """A process and the trial it trains."""

    process: Any
    pipe: Any
    device: str
    index: int = -1

    def send(self, trials: Sequence[Trial], index: int) -> None:
        self.index = index
        with contextlib.suppress(BrokenPipeError):  # its end is seen where its answer is awaited
            self.pipe.send(trials[index])

    def receive(self) -> tuple[str, Any]:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.pipe.close()
        code = self.process.exitcode
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return "lost", f"ended ({name}{memory})"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _start(recipe: Any, device: str) -> Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, recipe, device), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, device)


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
        except Exception as error:
            return pipe.send(("error", error if isinstance(error, WorkupError) else _unsent(f"{error}")))
        while True:
            trial = pipe.recv()
            try:
                trace = train(workload, trial, device=device, save=lambda unfinished: pipe.send(("save", unfinished)))
                pipe.send(("trace", trace))
            except WorkupError as error:
                pipe.send(("error", error))
