"""The study folder: the only module that writes results to disk.

    study.json                    which workload, which version of it, when
    traces/<trial id>.parquet     one file a trial
    tables/<name>-<hash>.parquet  what was measured and is no trial, by all that it depends on
    findings/<notebook>.json      what each notebook concluded
    notebooks/*.ipynb             executed copies
    prescription.json, report.html

Each file appears whole or not at all, so a killed run loses at most the seconds since the
last save of the trial under way, and two processes may work on one study.
"""

import contextlib
import datetime
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workup.errors import StudyError
from workup.finding import Finding, Prescription, plain
from workup.notebooks import project_root
from workup.trace import Trace


@dataclass(frozen=True)
class Study:
    """One workload's experiments in one folder.

    Use :meth:`open` to write to it and :meth:`read` to look at one.

    Args:
        folder: absolute path.
        about: what ``study.json`` says: workload, fingerprint (its parts), created, version.
    """

    folder: Path
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path, *, workload: str, fingerprint: Mapping[str, str]) -> "Study":
        """The study at ``folder``, made if it is not there.

        Raises:
            StudyError: the folder is a file, cannot be written, is no study but holds
                something else, or belongs to another workload or another version of it.
        """
        path = _absolute(folder)
        if path.is_file():
            raise StudyError(f"study '{folder}': {path} is a file. Name a folder.")
        if not (path / "study.json").exists():
            if path.is_dir() and any(path.iterdir()) and not (path / "notebooks").is_dir():
                raise StudyError(f"study '{folder}': {path} holds other files and no study.json. Name an empty folder.")
            about = {
                "workload": workload,
                "fingerprint": dict(fingerprint),
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            try:
                (path / "traces").mkdir(parents=True, exist_ok=True)
                (path / "findings").mkdir(exist_ok=True)
                (path / "notebooks").mkdir(exist_ok=True)
                write_whole(path / "study.json", json.dumps(about, indent=2).encode())
            except OSError as error:
                raise StudyError(f"study '{folder}': cannot write to {path} ({error.strerror or error}).") from error
        if not os.access(path, os.W_OK):
            raise StudyError(f"study '{folder}': {path} is not writable.")
        study = cls.read(path)
        study._must_match(workload, fingerprint)
        return study

    @classmethod
    def read(cls, folder: str | Path) -> "Study":
        """An existing study, to look at.

        Raises:
            StudyError: there is none, or its study.json is damaged.
        """
        path = _absolute(folder)
        if not path.exists():
            raise StudyError(f"study '{folder}': no folder at {path}.")
        if path.is_file():
            raise StudyError(f"study '{folder}': {path} is a file. Name a study's folder.")
        try:
            about = json.loads((path / "study.json").read_text())
            if not isinstance(about["workload"], str) or not isinstance(about["fingerprint"], dict):
                raise ValueError("fields of the wrong type")
        except FileNotFoundError:
            raise StudyError(f"study '{folder}': {path} holds no study.json, so it is not a study.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise StudyError(f"study '{folder}': {path / 'study.json'} is damaged ({error}).") from error
        return cls(path, about)

    def _must_match(self, workload: str, fingerprint: Mapping[str, str]) -> None:
        theirs = self.about["workload"]
        if theirs != workload:
            raise StudyError(f"study '{self.folder}' belongs to workload '{theirs}', not '{workload}'. Name another.")
        changed = [part for part, value in fingerprint.items() if self.about["fingerprint"].get(part) != value]
        if changed:
            drawn = any(part.endswith("data") or part == "model" for part in changed)
            hint = " Data or weights drawn without a seed are others every time." if drawn else ""
            raise StudyError(
                f"study '{self.folder}' belongs to another version of '{workload}': "
                f"changed since: {', '.join(changed)}. Name another folder, or remove this one.{hint}"
            )

    # -- traces ---------------------------------------------------------------------------

    def _trace_path(self, trial_id: str) -> Path:
        return self.folder / "traces" / f"{trial_id}.parquet"

    def _rescue_path(self, trial_id: str) -> Path:
        return Path(tempfile.gettempdir()) / "workup-rescue" / self.folder.name / f"{trial_id}.parquet"

    def load_trace(self, trial_id: str) -> Trace | None:
        """The trace of a trial, or None where it was never run or its file is damaged.

        One that a full disk kept out of the study is taken from where it was kept.
        """
        path, rescue = self._trace_path(trial_id), self._rescue_path(trial_id)
        try:
            return Trace.from_bytes((path if path.exists() else rescue).read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            warnings.warn(f"trace {trial_id} is damaged ({error}); its trial runs again.", stacklevel=2)
            return None

    def save_trace(self, trial_id: str, trace: Trace) -> Path:
        """Keep a trace; where the study's disk refuses, in the temporary folder, with a warning that says where."""
        path, data = self._trace_path(trial_id), trace.to_bytes()
        try:
            write_whole(path, data)
        except OSError as error:
            rescue = self._rescue_path(trial_id)
            with contextlib.suppress(OSError):
                rescue.parent.mkdir(parents=True, exist_ok=True)
                write_whole(rescue, data)
                warnings.warn(f"could not write {path} ({error.strerror}); kept at {rescue}.", stacklevel=2)
                return rescue
            warnings.warn(f"could not write {path} ({error.strerror}); kept in memory only.", stacklevel=2)
        return path

    def traces(self) -> Iterator[tuple[str, Trace]]:
        """Every readable trace with its trial id, in the order of the ids."""
        for path in sorted((self.folder / "traces").glob("*.parquet")):
            if (trace := self.load_trace(path.stem)) is not None:
                yield path.stem, trace

    def table(
        self,
        name: str,
        about: Mapping[str, Any],
        measure: Callable[[], pd.DataFrame],
        *,
        holds: Callable[[pd.DataFrame], bool] = lambda _: True,
    ) -> pd.DataFrame:
        """A table from ``tables/`` if it was measured for the same ``about`` and still ``holds``; else measured now."""
        key = hashlib.sha256(json.dumps(plain(about), sort_keys=True).encode()).hexdigest()[:12]
        path = self.folder / "tables" / f"{name}-{key}.parquet"
        if path.exists():
            try:
                if holds(kept := pd.read_parquet(path)):
                    return kept
            except Exception as error:
                warnings.warn(f"{path} is damaged ({error}); it is measured again.", stacklevel=2)
        measured = measure()
        with contextlib.suppress(OSError):  # a full disk costs measuring again, no more
            path.parent.mkdir(exist_ok=True)
            write_whole(path, measured.to_parquet())
        return measured

    # -- findings -------------------------------------------------------------------------

    def record(self, experiment: str, findings: Iterable[Finding], **about: Any) -> None:
        """What the notebook ``experiment`` concluded; replaces what it concluded before."""
        body = {"experiment": experiment, **about, "findings": [f.to_dict() for f in findings]}
        self._write(f"findings/{experiment}.json", json.dumps(body, indent=2, allow_nan=False))

    def records(self, *, before: str | None = None) -> list[dict[str, Any]]:
        """What each notebook recorded, in the workbook's order: ``experiment, findings`` and what it ran with.

        Args:
            before: a notebook; only what those before it in the workbook recorded.

        Raises:
            StudyError: a file is damaged.
        """
        bodies = []
        for path in sorted((self.folder / "findings").glob("*.json")):
            if before is not None and path.stem >= before:
                continue
            try:
                body = dict(json.loads(path.read_text()))
                named = [{**values, "experiment": body["experiment"]} for values in body["findings"]]
                bodies.append({**body, "findings": [Finding.from_dict(values) for values in named]})
            except (ValueError, KeyError, TypeError) as error:
                raise StudyError(
                    f"study '{self.folder}': {path} is damaged ({error}). Run its notebook again."
                ) from error
        return bodies

    def findings(self, *, before: str | None = None) -> dict[str, Finding]:
        """By name; where several notebooks speak of one name, the last in the workbook's order that can tell.

        Args:
            before: a notebook; only what those before it in the workbook found.
        """
        found: dict[str, Finding] = {}
        for finding in (f for body in self.records(before=before) for f in body["findings"]):
            earlier = found.get(finding.name)
            if finding.is_conclusive or earlier is None or not earlier.is_conclusive:
                found[finding.name] = finding
        return found

    def save_prescription(self, prescription: Prescription) -> None:
        """Write ``prescription.json``: the settings, and the lines to paste."""
        lines = {
            "pytorch": prescription.as_torch(),
            "lightning": prescription.as_lightning(),
            "transformers": prescription.as_transformers(),
        }
        body = {**prescription.to_dict(), "lines": lines}
        self._write("prescription.json", json.dumps(body, indent=2, allow_nan=False))

    def prescription(self) -> dict[str, Any] | None:
        """What ``prescription.json`` says, or None before there is one."""
        path = self.folder / "prescription.json"
        try:
            return dict(json.loads(path.read_text())) if path.exists() else None
        except (ValueError, TypeError) as error:
            raise StudyError(
                f"study '{self.folder}': {path} is damaged ({error}). Remove it; the next notebook writes it again."
            ) from error

    def write(self, name: str, text: str) -> Path:
        """Write ``report.html`` or another text file of the study, whole."""
        return self._write(name, text)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, text.encode())
        except OSError as error:
            kept = self._rescue_path("").parent
            more = f" Traces are kept in {kept}; the same command goes on from there." if kept.is_dir() else ""
            raise StudyError(f"could not write {path} ({error.strerror or error}).{more}") from error
        return path


def default_folder(workload: str) -> str:
    """Where the study of a workload lies unless another folder is named.

    >>> default_folder("my net/2")
    'runs/my-net-2'
    """
    return "runs/" + "".join(c if c.isalnum() or c in "-_." else "-" for c in workload)


def _absolute(folder: str | Path) -> Path:
    path = (project_root() / Path(folder).expanduser()).resolve()
    try:
        path.is_file()
    except OSError as error:
        raise StudyError(f"study '{str(folder)[:80]}': no folder can be named so ({error.strerror}).") from None
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, fsync, rename: ``path`` holds the old content or the new, never a part."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
