"""Where a sweep's trials train: one after another, in processes, stacked; each gives the plain loop's traces."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from workup.errors import ParameterError, nearest
from workup.measure import cluster, ensemble, memory, workers
from workup.measure.ensemble import Comparison, Unfit
from workup.measure.train import train
from workup.measure.workers import Job
from workup.notebooks import EXECUTORS
from workup.trace import Trace, Trial
from workup.workload import Workload

DEFAULT = "serial"
#: ``auto`` compares nothing where that would take more than this share of the plain loop's time,
COMPARING = 0.1
#: takes another way than the plain loop where it expects to be so many times as fast,
GAIN = 1.1
#: thinks of processes where this one takes so many times as long as their start (which would disturb what is
#: measured, so it does not begin before), and expects each to be so much slower beside the others.
LONG, BESIDE = 2.0, 1.2

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
            stacked in one vectorised pass, the plain loop where that is not the same; ``auto``, what a few
            measured steps promise most of, stacks in processes included; or ``ray``, a cluster that is already there.
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
    everything = list(range(len(trials)))
    here: list[Job] = []
    away: list[Job] = []
    if executor == "serial":
        here = _singly(everything)
    elif executor == "processes":
        away = _singly(everything)
    elif executor == "ray":
        yield from cluster.run(workers.recipe(workload, reference, "ray"), trials, device=device, note=note)
    else:
        here, away = (_stack if executor == "ensemble" else _auto)(workload, trials, device, reference, note)
    recipe = workers.recipe(workload, reference) if away else None
    if away:
        yield from workers.spread(recipe, trials, away, device=device, save=save, note=note)
    batch_cache = memory.batch_cache(workload, trials, device)
    for job in here:
        yield from workers.job(
            workload, dict(enumerate(trials)), job, device=device, save=save, note=note, batch_cache=batch_cache
        )


def _singly(indices: Sequence[int]) -> list[Job]:
    return [([index], False) for index in indices]


def _stack(workload: Workload, trials: Sequence[Trial], device: str, _: Any, note: Note) -> tuple[list, list]:
    stacks, loose = _stacks(workload, trials, device, note)
    for indices, took in stacks:
        note(f"ensemble: {_said(len(indices), took)}")
    return [(indices, True) for indices, _ in stacks] + _singly(loose), []


def _stacks(
    workload: Workload, trials: Sequence[Trial], device: str, note: Note
) -> tuple[list[tuple[list[int], Comparison]], list[int]]:
    """Groups that train as the plain loop does, tried by seed where seeds do not mix; and the indices left over."""
    groups = ensemble.groups(trials)
    loose = [indices[0] for indices in groups if len(indices) == 1]
    queue, found = [(indices, False) for indices in groups if len(indices) > 1], []
    while queue:
        indices, one_seed = queue.pop(0)
        own = [trials[index] for index in indices]
        try:
            found.append((indices, ensemble.compare(workload, own, device=device)))
        except Unfit as error:
            parts = [] if one_seed else ensemble.groups(own, by_seed=True)
            if len(parts) < 2:
                note(f"no ensemble of {len(own)} trials: {error}")
                parts = [[k] for k in range(len(own))]
            loose += [indices[part[0]] for part in parts if len(part) == 1]
            queue[:0] = [([indices[k] for k in part], True) for part in parts if len(part) > 1]
    return found, sorted(loose)


def _said(count: int, took: Comparison) -> str:
    stack, plain = 1000 * took.stack_seconds, 1000 * took.plain_seconds
    return f"a step of {count} trials takes {stack:.3g} ms, one by one {plain:.3g} ms"


def _auto(
    workload: Workload, trials: Sequence[Trial], device: str, reference: str | None, note: Note
) -> tuple[list[Job], list[Job]]:
    """What trains here and what in processes: the way that a few steps of each promise to be done first."""
    pace, steps = _pace(workload, trials[0], device), sum(trial.steps for trial in trials)
    if 2 * ensemble.CHECKED * len(trials) > COMPARING * steps or len(trials) == 1:
        note(f"auto: plain loop, about {pace * steps:.2g} s; comparing ways would take too much of it")
        return _singly(range(len(trials))), []
    room = min(len(workers.places(device)), len(trials)) if _sendable(workload, reference) else 1
    stacks, loose = _stacks(workload, trials, device, note)
    here: list[Job] = []
    away: list[Job] = []
    for indices, took in stacks:
        way = _quickest(workload, [trials[i] for i in indices], device, took, room, note)
        jobs = _singly(indices) if way in ("plain loop", "processes") else [(indices, True)]
        if way == "ensembles in processes":
            jobs = [(indices[part::room], True) for part in range(min(room, len(indices)))]
        (away if "processes" in way else here).extend(jobs)
    if loose:
        own = [trials[i] for i in loose]
        pays = bool(away) or _processes_pay(workload, own, device, pace, room, note)
        (away if pays else here).extend(_singly(loose))
    return here, away


def _quickest(workload: Workload, trials: Sequence[Trial], device: str, took: Comparison, room: int, note: Note) -> str:
    """Of the ways to train one group; the plain loop where nothing is clearly faster."""
    steps = _mean_steps(trials, range(len(trials)))
    seconds = {"plain loop": took.plain_seconds * steps, "ensemble": took.stack_seconds * steps}
    said = _said(len(trials), took)
    part = trials[::room]
    start = workers.start_seconds()
    with contextlib.suppress(Unfit), _one_thread(device):  # a part may be unfit where the whole is not
        if room > 1 and min(seconds.values()) > LONG * start:
            share = ensemble.compare(workload, part, device=device)
            seconds["processes"] = start + BESIDE * share.plain_seconds * steps
            seconds["ensembles in processes"] = start + BESIDE * share.stack_seconds * steps
            said += f"; in one of {room} processes, {_said(len(part), share)}"
    way = min(seconds, key=seconds.__getitem__)
    way = way if seconds["plain loop"] > GAIN * seconds[way] else "plain loop"
    expected = ", ".join(f"{name} {each:.2g} s" for name, each in seconds.items())
    note(f"auto: {way} for {len(trials)} trials ({said}; expected: {expected})")
    return way


def _processes_pay(
    workload: Workload, trials: Sequence[Trial], device: str, pace: float, room: int, note: Note
) -> bool:
    """Whether to spread trials that do not stack."""
    here, start = pace * sum(trial.steps for trial in trials), workers.start_seconds()
    if room < 2 or here < LONG * start:
        return False
    with _one_thread(device):
        alone = _pace(workload, trials[0], device)
    away = start + BESIDE * here * alone / pace / min(room, len(trials))
    pays = here > GAIN * away
    way = f"{room} processes" if pays else "plain loop"
    note(f"auto: {way} for {len(trials)} trials (expected: plain loop {here:.2g} s, processes {away:.2g} s)")
    return pays


def _pace(workload: Workload, trial: Trial, device: str) -> float:
    """Seconds of a plain step."""
    trace = train(workload, trial, device=device, first=ensemble.CHECKED)
    if trace.status == "interrupted":
        raise KeyboardInterrupt
    return float(trace.steps.seconds[1:].median())


def _mean_steps(trials: Sequence[Trial], indices: Sequence[int]) -> float:
    return sum(trials[i].steps for i in indices) / len(indices)


def _sendable(workload: Workload, reference: str | None) -> bool:
    with contextlib.suppress(ParameterError):
        return workers.recipe(workload, reference) is not None
    return False


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """As a process among others on a CPU has; beside a GPU threads decide little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
