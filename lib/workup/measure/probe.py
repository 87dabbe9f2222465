"""The largest batch size that trains: few attempts, a memory model between them, each in a child process."""

import contextlib
import math
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from typing import Any

from workup.errors import ParameterError, WorkloadError, WorkupError
from workup.measure import faults
from workup.measure.memory import Attempt, Limit, attempt
from workup.references import load
from workup.workload import Workload

#: Seconds a child may take to start, and to be given on top of a step's own time.
PATIENCE = 120.0
#: A child whose attempts differed by more than this part of the room they had serves no further one: the memory
#: that it gave back lies ready as it would in no new process, and sizes seem to fit that do not.
WORN = 0.2


class Prober:
    """Makes attempts in a child process, in a new one after each that does not fit or that came near the limit.

    Use it as a context manager. An out-of-memory kill by the system, a poisoned CUDA context
    or an abort ends the child; what it reports or how it died is the attempt's result.

    Args:
        workload: a reference as for :func:`workup.load` (the child loads it afresh), or a
            Workload, which is sent pickled.
        device, limit: where, and what one process may use.
        patience: seconds an attempt may take before it is ``too_slow``.

    Raises:
        ParameterError: the Workload cannot be pickled.
    """

    def __init__(self, workload: str | Workload, *, device: str = "cpu", limit: Limit, patience: float = PATIENCE):
        self.recipe: Any = workload
        if not isinstance(workload, str):
            try:
                self.recipe = pickle.dumps(workload)
            except Exception as error:
                raise ParameterError(
                    f"Prober(workload={workload.name!r}): it cannot be sent to a child process ({error}). "
                    "Give its reference, 'path/to/file.py:name', or probe in this process with memory.attempt."
                ) from error
        self.device, self.limit, self.patience = device, limit, patience
        self.process: Any = None
        self.pipe: Any = None
        self.least = math.inf  # the smallest peak among the child's attempts

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attempt(self, batch_size: int, *, steps: int = 3, training: bool = True) -> Attempt:
        """As :func:`workup.measure.memory.attempt`, in the child.

        Raises:
            WorkupError: as the child raised it.
        """
        if self.process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # it is gone already: the answer tells
            self.pipe.send({"batch_size": batch_size, "steps": steps, "training": training})
        result = self._answer()
        if isinstance(result, tuple):
            result = Attempt(batch_size=batch_size, status=result[0], reason=result[1], training=training)
        if isinstance(result, WorkupError):
            self.close()
            raise result
        self.least = min(self.least, result.peak_bytes)
        if not result.fits or result.peak_bytes - self.least > WORN * (self.limit.bytes - self.least):
            self.close()
        return result

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def _start(self) -> None:
        spawn = get_context("spawn")
        self.least = math.inf
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, self.recipe, self.device, self.limit))
        self.process.start()
        theirs.close()

    def _answer(self) -> Any:
        """What the child reports, or the status and reason of one that ended without a word."""
        ready = connection.wait([self.pipe, self.process.sentinel], timeout=self.patience)
        if not ready:
            return "too_slow", f"no answer within {self.patience:.0f} s"
        if self.pipe in ready:
            with contextlib.suppress(EOFError, OSError):
                return self.pipe.recv()
        self.process.join()
        code = self.process.exitcode
        if code >= 0:  # left by its own will, or an error while it started: neither is memory
            return "failed", f"the child process ended with exit code {code}; what it printed says why"
        if code == -signal.SIGKILL:
            return "out_of_memory", "the child process was killed (SIGKILL), as the system does when memory runs out"
        return "out_of_memory", f"the child process died ({signal.Signals(-code).name})"


def _serve(pipe: Any, recipe: Any, device: str, limit: Limit) -> None:
    """The child's whole life: build the workload, answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle, which then ends this process
    try:
        workload = load(recipe) if isinstance(recipe, str) else pickle.loads(recipe)
    except WorkupError as error:
        workload = error
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            request = pipe.recv()
            try:
                if isinstance(workload, WorkupError):
                    raise workload
                pipe.send(attempt(workload, device=device, limit=limit, **request))
            except WorkupError as error:
                pipe.send(error)


def search(
    tried_at: Callable[[int], Attempt],
    *,
    first: int,
    most: int,
    limit_bytes: float,
    slowest_seconds: float = math.inf,
    within: float = 0.05,
    tries: int = 6,
) -> Iterator[Attempt]:
    """Attempts, as they are made, until the largest size that fits is known ``within`` 5%.

    Args:
        tried_at: makes one attempt, for example ``Prober(...).attempt``.
        first: where to begin, the size in use today; most: never beyond (data set, cap).
        limit_bytes: what the memory model extrapolates to.
        slowest_seconds: sizes whose step would take longer are not tried.
        within: 0 bisects to the exact size; tries: at most so many attempts.

    Raises:
        WorkloadError: a step failed for another reason than its size (playbook: B2).
    """
    tried: list[Attempt] = []
    while len(tried) < tries:
        guess = next_size(
            tried, first=first, most=most, limit_bytes=limit_bytes, slowest=slowest_seconds, within=within
        )
        if guess is None:
            break
        one = tried_at(guess)
        if one.status == "failed":
            raise WorkloadError(
                f"a training step at batch size {guess} fails, and not for want of memory: {one.reason}"
            )
        tried.append(one)
        yield one
    last = tried[-1]
    if not any(one.fits for one in tried) and faults.kind(last.reason) == "ambiguous":
        raise WorkloadError(f"no size runs, down to {last.batch_size}, and it may not be memory: {last.reason}")


def next_size(
    tried: Sequence[Attempt], *, first: int, most: int, limit_bytes: float, slowest: float = math.inf, within: float
) -> int | None:
    """The size to try next, None when the answer is known: linear models of memory and time, then closing in."""
    good = max((one for one in tried if one.fits), key=lambda one: one.batch_size, default=None)
    bad = min((one.batch_size for one in tried if not one.fits), default=None)
    if good is None:
        return min(first, most) if bad is None else bad // 4 or (1 if bad > 1 else None)
    low, roof = good.batch_size, bad or most + 1
    if roof - low <= max(1, int(low * within)) and (bad or low == most):
        return None
    # A line through two near sizes would follow their noise.
    below = [one for one in tried if one.fits and one.batch_size <= low / 1.5]
    over = [one for one in tried if one.batch_size == bad and one.peak_bytes > limit_bytes]  # it ran, past the limit
    fits = [good, *over] if over else [*sorted(below, key=lambda one: one.batch_size)[-1:], good]
    in_time = math.inf
    if len(fits) == 2:
        in_time = _reach([one.step_seconds for one in fits], fits, slowest)
        guess = _reach([one.peak_bytes for one in fits], fits, limit_bytes)
        # Peak memory is convex in the size: what leads at small sizes need not at large ones. So far
        # beyond the last measurement its line is only half believed, and measured again on the way.
        far = guess > 2 * low and guess < roof
        guess = min((0.8 if far else 1 - 0.4 * within) * guess, in_time, 16 * low)
    elif bad and low >= 4 and within:
        return low // 4  # a second point for the line, below since above did not fit
    else:
        guess = math.sqrt(low * bad) if bad else 4 * low
    guess = max(guess, low * (1 + (within or 0.01)), low + 1)
    if bad is None and guess > in_time:
        return None
    if bad and guess * (1 + within / 2) >= bad:  # the line is proven wrong, or this would prove little
        middle = (low + bad) / 2 if bad < 20 * low else math.sqrt(low * bad)
        close = bad < 1.2 * low or guess <= bad * (1 + within)  # it was wrong by little
        guess = bad / (1 + within) if within and close else middle
    return max(low + 1, min(int(guess), roof - 1))


def _reach(values: Sequence[float], fits: Sequence[Attempt], limit: float) -> float:
    """The size at which a straight line through two measurements meets ``limit``."""
    (x0, x1), (y0, y1) = [one.batch_size for one in fits], values
    slope = (y1 - y0) / (x1 - x0)
    return x1 + (limit - y1) / slope if slope > 0 and math.isfinite(limit) else math.inf
