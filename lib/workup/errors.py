"""What a user's mistake raises: one class per kind, each message saying what, where and what to do."""

import difflib
from collections.abc import Iterable


class WorkupError(Exception):
    """A mistake in what was asked. The command line prints the message and no traceback."""


class WorkloadError(WorkupError):
    """The workload cannot be found, imported, built or trained for one step."""


class ParameterError(WorkupError):
    """A setting has the wrong name, type or value."""


class StudyError(WorkupError):
    """The study folder cannot be used, or belongs to something else."""


class DeviceError(WorkupError):
    """The device or the Jupyter kernel asked for is not there."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known one, then all of them.

    >>> nearest("standrad", ["smoke", "standard", "thorough"])
    "Did you mean 'standard'? Known: smoke, standard, thorough."
    >>> nearest("x", [])
    'None is known.'
    """
    names = sorted(known)
    if not names:
        return "None is known."
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(names)}."
