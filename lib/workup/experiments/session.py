"""One run of a notebook: its workload, study, device and parameters, checked before any training."""

import ast
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from workup import notebooks
from workup.errors import WorkloadError
from workup.finding import Finding, Prescription
from workup.judge.prescription import prescribe
from workup.measure import devices, executors
from workup.progress import progress
from workup.references import load
from workup.study import Study, default_folder
from workup.terminal import typed
from workup.trace import Trace, Trial
from workup.workload import Workload, fingerprint, trial_fingerprint

STANDARD = ("workload", "study", "device", "seed", "budget")


@dataclass(frozen=True, kw_only=True)
class Session:
    """One notebook's run.

    Args:
        notebook: its name.
        reference: what the workload was found by; a child process finds it again.
        workload, study, device, seed, budget: as its parameters cell says.
        knobs: the notebook's own parameters, None where unset.
        fingerprint: the part of every trial's id that the workload gives.
        sources: the value of each parameter resolved so far, and where it came from (:meth:`resolve_parameter`).
    """

    notebook: str
    workload: Workload
    reference: str
    study: Study
    device: str
    seed: int
    budget: str
    knobs: Mapping[str, Any]
    fingerprint: str
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def prescription(self) -> Prescription:
        """What the notebooks before this one add up to: the settings that this one works around."""
        return prescribe(self.study.findings(before=self.notebook), workload=self.workload)

    def resolve_parameter(
        self, knob: str, *, fallback: Any = None, finding: str | None = None, setting: str | None = None
    ) -> Any:
        """The value of a parameter of the notebook: as given, else what earlier notebooks found, else ``fallback``.

        Args:
            finding: the name of the finding whose value it takes.
            setting: the setting of the prescription it takes, the workload's own where nothing was found.
        """
        given = self.knobs.get(knob)
        found = self.study.findings(before=self.notebook).get(finding) if finding else None
        if given is not None:
            value, source = given, "given"
        elif setting:
            line = next(line for line in self.prescription.settings if line.name == setting)
            value, source = line.value, f"prescribed by {line.source}" if line.source else "the workload's own"
        elif found is not None and found.is_conclusive:
            value, source = found.value, f"found by {found.experiment}"
        else:
            value, source = fallback, "the workload's own, or the budget's"
            if finding:
                source = f"the workload's own: the study has no {finding} yet"
        self.sources[knob] = {"value": value, "from": source}
        return value

    def settings(self) -> pd.DataFrame:
        """What is used and where it came from: columns setting, value, from."""
        own = {"workload": self.workload.name, "device": self.device, "budget": self.budget, "seed": self.seed}
        rows = [{"setting": key, "value": value, "from": "given"} for key, value in own.items()]
        rows += [{"setting": key, **entry} for key, entry in self.sources.items()]
        return pd.DataFrame(rows).astype({"value": object}).set_index("setting")

    def run(self, trials: Sequence[Trial], *, label: str = "trials") -> list[Trace]:
        """The trace of every trial, in order: from the study where it is there, else trained now.

        Ctrl-C keeps what was measured and stops.

        Raises:
            WorkloadError: a trial fails at its very first step, or all fail alike, where no setting can be the cause.
        """
        ids = [trial.id(self.fingerprint) for trial in trials]
        kept = {key: trace for key in dict.fromkeys(ids) if (trace := self.study.load_trace(key)) and trace.done}
        # What failed may have been mended outside the code: a file that was missing, a full disk.
        found = {key: trace for key, trace in kept.items() if trace.status != "failed"}
        missing = {key: trial for key, trial in zip(ids, trials, strict=True) if key not in found}
        with progress(len(trials), label) as bar:
            bar.advance(len(trials) - len(missing))
            for key, trace in self._train(missing):
                found[key] = trace
                bar.advance()
        traces = [found[key] for key in ids]
        if len(found) > 1 and {(t.status, t.reason) for t in traces} == {("failed", traces[0].reason)}:
            name, count = self.workload.name, len(found)
            raise WorkloadError(
                f"workload {name!r}: all {count} trials fail alike, so no setting is the cause: {traces[0].reason}"
            )
        return traces

    def _train(self, missing: Mapping[str, Trial]) -> Iterator[tuple[str, Trace]]:
        """Each trial's id and trace as it ends, kept in the study."""
        keys = list(missing)
        self.sources.setdefault("executor", {"value": self.executor, "from": "given or by default"})
        chosen = executors.execute(
            self.workload,
            list(missing.values()),
            device=self.device,
            executor=self.executor,
            save=lambda index, unfinished: self.study.save_trace(keys[index], unfinished),
            reference=self.reference,
            note=self._note,
        )
        with contextlib.closing(chosen):
            for index, trace in chosen:
                self.study.save_trace(keys[index], trace)
                self._must_train(trace)
                yield keys[index], trace

    @property
    def executor(self) -> str:
        """Where trials train: as given, else ``executors.DEFAULT``."""
        return self.knobs.get("executor") or executors.DEFAULT

    def _note(self, sentence: str) -> None:
        entry = self.sources["executor"]
        entry["from"] = f"{entry['from']}; {sentence}"

    def _must_train(self, trace: Trace) -> None:
        if len(trace.steps) == 0 and trace.status == "failed" and trace.reason.startswith("step 0:"):
            raise WorkloadError(f"workload {self.workload.name!r} fails at its first step: {trace.reason}")
        if len(trace.steps) == 1 and trace.status == "diverged":
            raise WorkloadError(
                f"workload {self.workload.name!r}: the loss of the first batch is {trace.steps.loss[0]} before any "
                "update, so no learning rate is the cause. Look at the data and the loss."
            )

    def command(self, numbers: str, *, more: bool = True) -> str:
        """A line for the terminal: these notebooks again for this study, with the next larger budget if ``more``."""
        usual = self.study.folder == (notebooks.project_root() / default_folder(self.workload.name)).resolve()
        budget = {"smoke": "standard"}.get(self.budget, "thorough") if more else self.budget
        options = {"--notebooks": numbers, "--budget": budget, "--study": "" if usual else typed(self.study.folder)}
        parts = [part for pair in options.items() if pair[1] not in ("", "standard") for part in pair]
        return shlex.join(["workup", "run", self.reference, *parts])

    def conclude(self, *findings: Finding, at: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
        """Record the findings, and the prescription that the study's findings now add up to.

        Args:
            at: the settings they were measured at, for those that do not say so themselves.
        """
        findings = tuple(dataclasses.replace(found, at=found.at or at or {}) for found in findings)
        about = {"workload": self.reference, "budget": self.budget, "seed": self.seed, "device": self.device}
        settings = {key: {k: str(v) for k, v in entry.items()} for key, entry in self.sources.items()}
        self.study.record(self.notebook, findings, **about, settings=settings, versions=devices.versions())
        self.study.save_prescription(prescribe(self.study.findings(), workload=self.workload))
        return findings


def more_rounds(found: Finding, extra: int) -> Finding:
    """The finding, saying how many rounds were measured for it beyond its budget's."""
    if not extra > 0:
        return found
    count = f"{extra} more round{'' if extra == 1 else 's'}"
    return dataclasses.replace(found, summary=f"{found.summary} Measured {count} to tell.")


def start(notebook: str, namespace: Mapping[str, Any]) -> Session:
    """Check a notebook's parameters, find its workload, open its study.

    nbmake cannot pass parameters, so the environment can: WORKUP_WORKLOAD, WORKUP_STUDY,
    WORKUP_DEVICE, WORKUP_SEED and WORKUP_BUDGET stand in for a parameter left at its default.

    Args:
        notebook: its name, as ``04_learning_rate``.
        namespace: where the parameters stand: the notebook's ``globals()``, or a plain mapping.

    Raises:
        ParameterError: an unknown parameter, or a value of the wrong type.
        WorkloadError, StudyError, DeviceError: what they name cannot be used.
    """
    path = notebooks.find(notebook)
    known = notebooks.declared(path)
    injected = _injected(namespace)
    given = {name: namespace[name] for name in [*known, *injected] if name in namespace}
    for name in STANDARD:
        wanted = os.environ.get(f"WORKUP_{name.upper()}")
        if wanted and name not in injected and given.get(name, known[name].default) == known[name].default:
            given[name] = wanted
    values = notebooks.check(path, given)
    device = devices.resolve(values["device"])
    workload = load(values["workload"])
    parts = fingerprint(workload)
    folder = values["study"] or default_folder(workload.name)
    return Session(
        notebook=notebook,
        workload=workload,
        reference=values["workload"],
        study=Study.open(folder, workload=workload.name, fingerprint=parts),
        device=device,
        seed=values["seed"],
        budget=values["budget"],
        knobs={name: value for name, value in values.items() if name not in STANDARD},
        fingerprint=trial_fingerprint(parts, workload, device),
    )


def _injected(namespace: Mapping[str, Any]) -> list[str]:
    """Names that papermill set: it only warns of one that the notebook does not declare, so we look."""
    cells = [cell for cell in namespace.get("In", []) if cell.startswith("# Parameters\n")]
    nodes = [node for cell in cells for node in ast.parse(cell).body if isinstance(node, ast.Assign)]
    return [target.id for node in nodes for target in node.targets if isinstance(target, ast.Name)]
