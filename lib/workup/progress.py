"""How far a stage has come: a bar in JupyterLab, a readable line everywhere else."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Without a bar a stage is silent for so long, and then speaks at most so often [s].
SILENT_SECONDS, EVERY_SECONDS = 10.0, 15.0


class Progress:
    """A stage under way: call :meth:`advance` as each part of it is done."""

    def __init__(self, total: int, label: str, unit: str, clock: Callable[[], float]) -> None:
        self.total, self.label, self.unit, self.done = total, label, unit, 0
        self._clock, self._begin = clock, clock()
        self._spoken = self._begin + SILENT_SECONDS - EVERY_SECONDS
        self._bar = _Bar(total, label) if "JPY_SESSION_NAME" in os.environ else None

    def advance(self, n: int = 1, note: str = "") -> None:
        """``n`` more parts are done; ``note`` says what the last one was."""
        self.done += n
        now, left = self._clock(), self.total - self.done
        wait = f", about {spell((now - self._begin) / self.done * left)} left" if self.done and left > 0 else ""
        line = f"{self.label}: {self.done} of {self.total} {self.unit}{wait}" + (f" ({note})" if note else "")
        if self._bar:
            self._bar.show(self.done, line)
        elif now - self._spoken >= EVERY_SECONDS and left > 0:
            self._spoken = now
            print(line, flush=True)

    def close(self) -> None:
        """The stage's one line: it takes the bar's place, so that a saved notebook holds text."""
        unit = self.unit.removesuffix("s") if self.total == 1 else self.unit
        stopped = f"stopped after {self.done} of " if self.done < self.total else ""
        counted = f"{stopped}{self.total} {unit}"
        line = f"{self.label}: {counted} in {spell(self._clock() - self._begin)}"
        if self._bar:
            self._bar.replace(line)
        else:
            print(line, flush=True)


class _Bar:
    """ipywidgets' bar under a display id, so that text can replace it."""

    def __init__(self, total: int, label: str) -> None:
        import ipywidgets
        from IPython.display import display

        self._bar = ipywidgets.IntProgress(max=max(total, 1))
        self._text = ipywidgets.Label(value=label)
        self._box = ipywidgets.HBox([self._bar, self._text])
        self._handle: Any = display(self._box, display_id=True)

    def show(self, done: int, line: str) -> None:
        self._bar.value, self._text.value = done, line

    def replace(self, line: str) -> None:
        self._handle.update({"text/plain": line}, raw=True)
        for widget in (self._box, self._bar, self._text):
            widget.close()


@contextmanager
def progress(
    total: int, label: str, *, unit: str = "trials", clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """Show how a stage of ``total`` parts goes on, and at its end (also an early one) how long it took.

    Example:
        >>> with progress(2, "sweep", clock=lambda: 0.0) as stage:
        ...     stage.advance(2)
        sweep: 2 trials in 0.0 s
    """
    stage = Progress(total, label, unit, clock)
    try:
        yield stage
    finally:
        stage.close()


def spell(seconds: float) -> str:
    """A duration in words.

    >>> [spell(s) for s in (12.34, 59.97, 75, 7260)]
    ['12.3 s', '1 min 0 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
