"""What judging functions are given, checked: rows of numbers, single numbers, tables."""

from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError


def curve(values: Any, name: str, length: int | None = None) -> np.ndarray:
    """``values`` as a float64 array of shape [n]; None and other missing ones are NaN, numbers given as text are read.

    Raises:
        ParameterError: not numbers, not one row, or not ``length`` long.
    """
    try:
        given = np.asarray(values)
        if given.dtype.kind not in "biufOUST":
            raise TypeError(f"{given.dtype} is no real number")
        array = (np.where(pd.isna(given), np.nan, given) if given.dtype.kind == "O" else given).astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(
            f"{name}: expected a row of numbers, got {type(values).__name__} ({error}). Give a list, array or Series."
        ) from None
    if array.ndim != 1:
        raise ParameterError(f"{name}: expected a row of numbers, got shape {list(array.shape)}. Give one row of them.")
    if length is not None and len(array) != length:
        raise ParameterError(f"{name} has {len(array)} values and loss has {length}: give one for each.")
    return array


def number(value: Any, name: str, *, least: float = -np.inf) -> float:
    """``value``, or the number its text says, as a float.

    Raises:
        ParameterError: no finite number, or below ``least``.
    """
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = np.nan
    if not (np.isfinite(found) and found >= least):
        floor = f" of at least {least:g}" if np.isfinite(least) else ""
        raise ParameterError(f"{name}={value!r:.50}: give a finite number{floor}.")
    return found


def frame(trials: Any, call: str) -> pd.DataFrame:
    """A copy of ``trials``, a row a trial, numbered from 0.

    Raises:
        ParameterError: no table, or a column twice.
    """
    try:
        table = pd.DataFrame(trials).reset_index(drop=True)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"{call}: no table can be made of {type(trials).__name__} ({error}). Give a DataFrame or a list of dicts."
        ) from None
    if twice := sorted(map(str, table.columns[table.columns.duplicated()])):
        raise ParameterError(f"{call}: the table has column {twice[0]} twice. Drop or rename one.")
    return table
