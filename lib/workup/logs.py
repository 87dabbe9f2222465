"""Other people's training logs, read as they are: each quantity by step, and what had to be mended.

A cell is blank (nothing was logged), a number, or a word for one (nan, null, inf, Infinity, …). Of the loss and the
gradient norm a NaN stays, as it was seen; elsewhere it means that nothing was logged.
"""

import contextlib
import io
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError, nearest
from workup.tfevents import scalars
from workup.trace import COLUMNS

_T, _E = "(?:train(?:ing|er)?_)?", "(?:eval|evaluation|val|valid|validation|test|dev)"
#: What logs call a trace's columns and a few more, the likelier first. Compared in lower case, any signs but letters
#: and digits as one "_", and of "run - train/loss" (a W&B export) what follows the dash.
NAMES = {
    "step": (f"{_T}global_step", f"{_T}steps?", f"{_T}(iter(ation)?s?|num_updates|updates?)"),
    "loss": (f"{_T}loss_step", "loss", f"{_T}loss|loss_train(ing)?", "train(ing)?_(?!.*(min|max)$).*loss.*", "value"),
    "eval_loss": (f"{_E}_loss(_epoch)?", f"loss_{_E}", f"{_E}_(?!.*(min|max)$).*loss"),
    "lr": (f"{_T}(lr|learning_rate)(_\\d+)?", "lr_.*", "(.+_)?(lr|learning_rate)(_.*)?"),
    "grad_norm": (f"{_T}(global_)?grad(ient)?_norm(_total)?", "grad_[0-9_]+norm_total", "gnorm|(total|global)_norm"),
    "clipped": ("(grad(ient)?s?_)?clipped",),
    "seconds": (f"{_T}(seconds|(step|iter|iteration|batch)_(time|seconds)|(time|seconds)_per_\\w+|dt)(_m?s)?",),
    "data_seconds": (f"{_T}(data|load|loader|dataload(er|ing)?|fetch)(_wait)?_(time|seconds|wait)(_m?s)?",),
    "examples": (f"{_T}(examples|examples_per_step|batch_size)",),
    "throughput": (f"{_T}(examples|samples|imgs?|images|sequences)_(per_)?s(ec|econd)?", "throughput"),
    "time": ("timestamp|wall_time", "time|runtime|elapsed|elapsed_time"),
}
_NAN, _ABSENT = {"nan", "-nan", "+nan"}, {"null", "none", "na", "n/a", "<na>"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Log:
    """One run as its log tells it.

    Args:
        path, format: where it was read from, and as what.
        columns: our name to the file's.
        series: our name to what was logged, indexed by step, steps increasing.
        notes: what was missing, ambiguous or mended, a sentence each.
    """

    path: str
    format: str
    columns: Mapping[str, str]
    series: Mapping[str, pd.Series]
    notes: tuple[str, ...]

    def table(self) -> pd.DataFrame:
        """The known columns of a trace, a row a step at which any was logged, NaN where one was not."""
        known = {name: self.series[name] for name in COLUMNS if name in self.series}
        return pd.concat(known, axis=1).sort_index().rename_axis("step").reset_index()


def read(path: str | Path, *, columns: Mapping[str, str] | None = None) -> Log:
    """A training log: transformers' trainer_state.json, Lightning's metrics.csv, TensorBoard events, a W&B export,
    CSV, JSON lines, or a study's trace (parquet); or a folder that holds one of them.

    Args:
        columns: our name (of ``NAMES``) to the file's, for those that are not found by their name.

    Raises:
        ParameterError: no such file, not a log, or no training loss in it.
    """
    files = _find(Path(path))
    try:
        frame, kind, notes = _load(files)
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path}: cannot be read as a log ({str(error).partition(chr(10))[0]}).") from None
    chosen, doubts = _columns(list(frame.columns), columns or {}, str(path))
    cells = {known: _numbers(frame[name], known) for known, name in chosen.items()}
    bad = {known: count for known, (_, count) in cells.items() if count}
    notes += [] if "step" in cells else ["No column counts steps: lines are counted."]
    steps, _ = cells.pop("step", (pd.Series(np.arange(len(frame)), frame.index), 0))
    steps = steps[steps.abs() < 2**53].astype("int64")
    evaluated = cells["eval_loss"][0].index if "eval_loss" in cells else frame.index[:0]
    series: dict[str, pd.Series] = {}
    for known, (values, _) in cells.items():
        # A NaN beside an evaluation loss is how some write a blank.
        values = values[values.index.isin(steps.index) & ~(values.isna() & values.index.isin(evaluated))]
        ordered, mended = _in_order(values.set_axis(steps[values.index]))
        series |= {known: ordered} if len(ordered) else {}
        notes += [f"{known}: {mended}"] if mended else []
    if "loss" not in series:
        seen = [str(name)[:40] for name in frame.columns[:20]]
        raise ParameterError(f"{path}: no training loss found among the columns {seen}. Give --column loss=NAME.")
    notes += [f"{known}: {count} cells are no such number, and left out." for known, count in bad.items()] + doubts
    lacking = ", ".join(name for name in ("lr", "grad_norm", "eval_loss") if name not in series)
    notes += [f"Not logged: {lacking}."] if lacking else []
    return Log(path=str(path), format=kind, columns=chosen, series=series, notes=tuple(notes))


def follow(path: str | Path, *, wait: Callable[[], Any] = lambda: time.sleep(2), **options: Any) -> Iterator[Log]:
    """The log now and at each later look, without end; ``wait`` is called between two. Options are those of ``read``.

    Raises:
        ParameterError: it cannot be read at first. A file caught half-written later is read at the next look.
    """
    yield read(path, **options)
    while True:
        wait()
        with contextlib.suppress(ParameterError):
            yield read(path, **options)


def _find(path: Path) -> list[Path]:
    """The files of one log: itself, or what a folder holds."""
    if path.is_file():
        return [path]
    kinds = ("trainer_state.json", "metrics.csv", "*tfevents*")
    for pattern in (*kinds, *(f"**/{kind}" for kind in kinds)):
        if found := sorted(path.glob(pattern)):
            folders = sorted({str(file.parent) for file in found})
            if len(folders) > 1:
                raise ParameterError(f"{path}: holds {len(folders)} logs. Name one of {', '.join(folders)}.")
            return found
    raise ParameterError(f"{path}: no such file, nor a folder that holds one of {', '.join(kinds)}.")


def _load(files: list[Path]) -> tuple[pd.DataFrame, str, list[str]]:
    """The log's cells as text, NaN or "" where blank; the format; and notes."""
    data, bad = files[0].read_bytes(), 0
    if "tfevents" in files[0].name:
        rows, damaged = zip(*(scalars(file.read_bytes()) for file in files), strict=True)
        frame = pd.DataFrame([_words(row) for part in rows for row in part])
        bad, kind = sum(damaged), "TensorBoard events"
    elif data[:4] == b"PAR1":
        frame, kind = pd.read_parquet(files[0]).map(str), "parquet"
    elif data.lstrip()[:1] in (b"{", b"["):
        frame, bad, kind = _json(data.decode("utf-8-sig", "replace"))
    else:
        frame, bad = _csv(data.decode("utf-8-sig", "replace").replace("\0", ""))
        kind = "Lightning metrics.csv" if files[0].name == "metrics.csv" else "CSV"
    return frame, kind, [f"{bad} malformed or cut lines are left out."] if bad else []


def _csv(text: str) -> tuple[pd.DataFrame, int]:
    text = text.replace('"', "") if text.count('"') % 2 else text  # one that never closes
    head = text.lstrip().partition("\n")[0]
    separator = next((s for s in "\t;" if s in head and "," not in head), ",")
    options: Any = {"sep": separator, "dtype": str, "keep_default_na": False, "on_bad_lines": "skip"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # a separator at each line's end
        frame = pd.read_csv(io.StringIO(text), index_col=False, **options)
    bad = sum(1 for line in text.splitlines() if line.strip()) - 1 - len(frame)
    return frame.rename(columns=str.strip), max(bad, 0)


def _json(text: str) -> tuple[pd.DataFrame, int, str]:
    """Cells as text, nested names joined by "/"; how many lines could not be read; the format."""
    body, bad = [], 0
    try:
        body = json.loads(text, object_hook=_words)
    except ValueError:
        for line in filter(str.strip, text.splitlines()):
            try:
                body.append(json.loads(line, object_hook=_words))
            except ValueError:
                bad += 1
    if isinstance(body, dict) and isinstance(body.get("log_history"), list):
        return pd.DataFrame(body["log_history"]), bad, "transformers trainer_state.json"
    rows = [row for row in (body if isinstance(body, list) else [body]) if isinstance(row, dict)]
    return pd.json_normalize(rows, sep="/"), bad, "JSON lines"


def _words(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, (dict, list)) else str(value) for key, value in row.items()}


def _columns(found: list[str], given: Mapping[str, str], path: str) -> tuple[dict[str, str], list[str]]:
    """Our names to the file's: as given, else by ``NAMES``; and a note where several would do."""
    for known, name in given.items():
        if known not in NAMES:
            raise ParameterError(f"--column {known}={name}: '{known}' is no name of ours. {nearest(known, NAMES)}")
        if name not in found:
            raise ParameterError(f"--column {known}={name}: {path} has no such column. {nearest(name, found)}")
    plain = {n: re.sub(r"[^a-z0-9]+", "_", n.rpartition(" - ")[2].lower()).strip("_") for n in found}
    chosen: dict[str, str] = {}
    notes: list[str] = []
    for known, patterns in NAMES.items():
        fits = ([n for n in found if re.fullmatch(p, plain[n]) and n not in given.values()] for p in patterns)
        hits = [given[known]] if known in given else next(filter(None, fits), [])
        chosen |= {known: hits[0]} if hits else {}
        notes += [f"{known} is read from '{hits[0]}'; as likely: {', '.join(hits[1:4])}."] if hits[1:] else []
    return chosen, notes


def _numbers(cells: pd.Series, known: str) -> tuple[pd.Series, int]:
    """The logged cells of a column as float64 on their rows; and how many cells are no such number at all."""
    words = cells.dropna().astype(str).str.strip().str.lower()
    words = words[~words.isin({""} if known == "loss" else {"", *_ABSENT})]
    values = pd.to_numeric(words.replace({"true": "1", "false": "0"}), errors="coerce").astype("float64")
    bad = (values.isna() & ~words.isin(_NAN | _ABSENT)) | ((values < 0) & (known == "grad_norm"))
    kept = values[~bad & (values.notna() | (known in ("loss", "grad_norm")))]
    return kept / 1000 if re.search(r"[^a-z]ms$", str(cells.name).lower()) else kept, int(bad.sum())


def _in_order(values: pd.Series) -> tuple[pd.Series, str]:
    """``values``, indexed by step in the order written, with steps increasing; and what that took, in words.

    Where a run goes back to a step it had passed, as after a resume, what comes later stands; a single line that
    goes back is no resume.
    """
    steps = values.index.to_numpy()
    if np.all(np.diff(steps) > 0):
        return values, ""
    if values.index.is_unique:
        return values.sort_index(), "steps are out of order; sorted."
    top = np.maximum.accumulate(steps)
    stray = np.r_[False, (steps[1:] < top[:-1]) & np.r_[steps[2:] > top[:-2], True]]
    kept = values[~stray]
    steps = kept.index.to_numpy()
    stands = np.r_[steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:], True]
    back = int(np.sum(np.diff(steps) < 0))
    how = f"goes back {back} times, as after a resume" if back else "steps repeat"
    return kept[stands], f"{how}; the later lines stand, {len(values) - int(stands.sum())} are left out."
