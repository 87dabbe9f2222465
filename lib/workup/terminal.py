"""What the command line says of errors and paths."""

import os
from pathlib import Path

import click

from workup.errors import WorkupError


def exit_code(error: Exception) -> int:
    """Say what stopped a command; its exit code: 2 a user's mistake, 1 what nobody expected.

    Raises:
        Exception: the unexpected one, where WORKUP_TRACEBACK=1 asks for it.
    """
    if isinstance(error, WorkupError):
        click.echo(f"Error: {error}", err=True)
        return 2
    if os.environ.get("WORKUP_TRACEBACK") == "1":
        raise error
    kind = type(error).__name__
    click.echo(f"Error: {kind}: {error}\nNot expected: WORKUP_TRACEBACK=1 shows where it happened.", err=True)
    return 1


def typed(path: Path) -> str:
    """A path as a reader would type it: relative to the current folder where it lies below."""
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)
