"""Processes that train a sweep's trials: one a GPU, or one a core of the CPU with a thread of its own."""

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from typing import Any

import pandas as pd
import torch

from workup.errors import ParameterError, WorkupError
from workup.measure import data, devices, ensemble, memory
from workup.measure.devices import places
from workup.measure.train import train
from workup.references import load
from workup.trace import COLUMNS, Trace, Trial
from workup.workload import Workload

Found = Iterator[tuple[int, Trace]]
#: Trials by index, and whether they train as one stack.
Job = tuple[list[int], bool]
#: Forked from a server that did the imports once: a process then starts in the time that finding the workload takes.
HOW = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
#: Seconds that those imports take, and until a process is there after them.
IMPORTS, THERE = 4.0, 0.5
_begun: list[float] = []


def begin() -> Any:
    """How processes start; the first call begins the imports that they share, and does not wait for them."""
    context: Any = multiprocessing.get_context(HOW)
    if HOW == "forkserver":
        from multiprocessing import forkserver

        context.set_forkserver_preload([__name__, "torch._dynamo"])  # the second: imported by any optimizer
        forkserver.ensure_running()
        _begun.append(time.monotonic())
    return context


def start_seconds() -> float:
    """How long a process is expected to take to be there, from now."""
    return max(THERE, IMPORTS - (time.monotonic() - _begun[0] if _begun else 0.0))


def recipe(workload: Workload, reference: str | None, executor: str = "processes") -> Any:
    """What a worker makes the workload from: its reference, or all of it pickled.

    Raises:
        ParameterError: a field cannot be pickled; the message names it.
    """
    for field in dataclasses.fields(workload) if reference is None else ():
        try:
            pickle.dumps(getattr(workload, field.name))
        except Exception as error:
            raise cannot_send(f"{field.name} of {workload.name!r}: {error}", executor) from error
    return reference or pickle.dumps(workload)


def cannot_send(why: str, executor: str = "processes") -> ParameterError:
    hint = "Give the workload's reference, 'path/to/file.py:name'."
    return ParameterError(f"executor '{executor}': the workload cannot be sent to a process ({why}). {hint}")


def job(
    workload: Workload,
    trials: Mapping[int, Trial],
    job: Job,
    *,
    device: str,
    save: Any,
    note: Callable,
    batch_cache: data.BatchCache | None = None,
) -> Found:
    """Train a job's trials, here; what its stack turns out not to hold, the plain loop trains.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the traces under way came out as ``interrupted``.
    """
    indices, stacked = job
    rest = list(indices)
    if stacked:
        keep = save and (lambda k, trace: save(indices[k], trace))
        try:
            for k, trace in ensemble.run(workload, [trials[i] for i in indices], device=device, save=keep):
                rest.remove(indices[k])
                yield indices[k], marked(trace, "ensemble")
        except ensemble.Unfit as error:
            note(f"{len(rest)} trials left their ensemble: {error}")
    for index in rest:
        trace = train(
            workload, trials[index], device=device, save=save and partial(save, index), batch_cache=batch_cache
        )
        yield index, marked(trace, "serial")
        if trace.status == "interrupted":
            raise KeyboardInterrupt


def marked(trace: Trace, executor: str) -> Trace:
    return dataclasses.replace(trace, versions={**trace.versions, "executor": executor})


def spread(
    recipe: Any, trials: Sequence[Trial], jobs: Sequence[Job], *, device: str, save: Any, note: Callable
) -> Found:
    """Train ``jobs`` in a worker a place. One lost costs its trial one retry, then a ``failed`` trace.

    A stack that is lost trains again one by one. Leaving early ends every worker.
    """
    waiting, retried = list(jobs), set()
    busy: list[Worker] = []
    room = places(device)[: len(jobs)]
    try:
        for place in room:
            busy.append(_start(recipe, *place, room=len(room)))
            busy[-1].send(trials, waiting.pop(0))
        while busy:
            ready = connection.wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                kind, index, answer = worker.receive()
                if kind == "error":
                    raise answer
                if kind == "note":
                    note(answer)
                    continue
                if kind == "save":
                    save and save(index, answer)
                    continue
                if kind == "trace":
                    worker.left.remove(index)
                    yield index, marked(answer, "processes") if answer.versions["executor"] == "serial" else answer
                    continue
                if kind == "lost":
                    busy.remove(worker)
                    again = [i for i in worker.left if i not in retried]
                    waiting[:0] = [([i], False) for i in again]
                    if again:
                        note(f"the process of trial {', '.join(map(str, again))} {answer}; it trains again")
                    for i in set(worker.left) - set(again):
                        yield i, failed(trials[i], f"its process {answer}, twice", worker.place[0])
                    # Of a stack, any trial may have been the cause: each has its own retry.
                    retried |= set(again) if len(again) == 1 else set()
                    if waiting:
                        worker = _start(recipe, *worker.place, room=len(room))
                        busy.append(worker)
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
    """A process, its device and environment, and the trials of its job that are still to come."""

    process: Any
    pipe: Any
    place: tuple[str, dict[str, str]]
    left: list[int] = dataclasses.field(default_factory=list)

    def send(self, trials: Sequence[Trial], job: Job) -> None:
        self.left = list(job[0])
        with contextlib.suppress(BrokenPipeError):  # its end is seen where its answer is awaited
            self.pipe.send(({index: trials[index] for index in job[0]}, job))

    def receive(self) -> tuple[str, int, Any]:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.pipe.close()
        code = self.process.exitcode
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return "lost", -1, f"ended ({name}{memory})"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _start(recipe: Any, device: str, pins: Mapping[str, str], *, room: int) -> Worker:
    context = begin()
    ours, theirs = context.Pipe()
    threads = max(1, len(places("cpu")) // room) if pins else 1
    about = (theirs, recipe, device, {**os.environ, **pins}, threads)
    process = context.Process(target=_serve, args=about, daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, (device, dict(pins)))


def failed(trial: Trial, reason: str, device: str) -> Trace:
    """The trace of a trial that nothing came back from."""
    steps = pd.DataFrame({name: [] for name in COLUMNS}).astype(COLUMNS)
    return Trace(trial=trial, steps=steps, status="failed", reason=reason, device=device, versions=devices.versions())


def _serve(pipe: Any, recipe: Any, device: str, environment: Mapping[str, str], threads: int) -> None:
    """A worker's whole life: find the workload, train what comes, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's, which then ends this process
    os.environ.update(environment)  # the server it was forked from may have an older one
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            workload = load(recipe) if isinstance(recipe, str) else pickle.loads(recipe)
        except Exception as error:
            return pipe.send(("error", -1, error if isinstance(error, WorkupError) else cannot_send(f"{error}")))
        batch_cache = memory.batch_cache(workload, [], device)
        while True:
            trials, work = pipe.recv()

            def save(index: int, unfinished: Trace) -> None:
                pipe.send(("save", index, unfinished))

            def note(sentence: str) -> None:
                pipe.send(("note", -1, sentence))

            try:
                found = job(workload, trials, work, device=device, save=save, note=note, batch_cache=batch_cache)
                for index, trace in found:
                    pipe.send(("trace", index, trace))
                pipe.send(("end", -1, None))
            except WorkupError as error:
                pipe.send(("error", -1, error))
