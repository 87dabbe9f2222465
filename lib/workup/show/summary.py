"""A study's first page, for the report and the terminal: what to train with, what that is worth, what is still open."""

import dataclasses
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from workup.finding import Finding
from workup.show.cards import columns, spell, title
from workup.study import Study
from workup.terminal import typed

#: Notebooks by what a run of one costs, the cheapest first.
CHEAPEST = ("07", "11", "06", "04", "02", "05", "03")
#: What more is spent to settle what one budget could not.
MORE = {"smoke": "standard", "standard": "thorough", "thorough": "thorough"}
HEADER = ("setting", "today", "train with", "interval", "how sure", "why")


@dataclass(frozen=True, repr=False)
class Summary:
    """The first page.

    Args:
        settings: rows of text, :data:`HEADER` first; empty before any notebook has concluded.
        worth: what the change is worth, a sentence or two.
        conflicts: what in the findings does not fit together, and what follows.
        open: (what, why) of each question that could not be told.
        command: the cheapest command that would settle one of them; "" where nothing is open.
    """

    settings: list[tuple[str, ...]]
    worth: str
    conflicts: list[str]
    open: list[tuple[str, str]]
    command: str

    def _repr_html_(self) -> str:
        """The same on a page: in JupyterLab and in the report, whose HTML stands in ``summary.html`` beside this."""
        pages = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        text = Path(__file__).with_suffix(".html").read_text()
        return pages.from_string(text).render(dataclasses.asdict(self))

    def __repr__(self) -> str:
        if not self.settings:
            return "Nothing has been concluded yet."
        parts = [columns(self.settings), wrapped(f"What it is worth: {self.worth}")]
        if self.conflicts:
            parts.append("\n".join(["What did not fit together:", *map(_item, self.conflicts)]))
        if self.open:
            parts.append("\n".join(["What could not be told:", *(_item(f"{what}: {why}") for what, why in self.open)]))
        if self.command:
            parts.append(f"The cheapest command that would settle it:\n  {self.command}")
        return "\n\n".join(parts)


def summary(study: Study) -> Summary:
    """The first page of ``study``.

    Raises:
        StudyError: a file of the study is damaged.
    """
    records, written = study.records(), study.prescription()
    if written is None:
        return Summary([], "", [], [], "")
    found = study.findings()
    rows = [HEADER, *map(_row, written["settings"])]
    asked = (finding for finding in found.values() if not finding.is_conclusive and not finding.is_none)
    inconclusive = sorted(
        (finding for finding in asked if finding.name != "improvement"), key=lambda finding: _cost(finding.experiment)
    )
    conflicts = list(written["conflicts"])
    stale = next((conflict for conflict in conflicts if conflict["name"] == "compared other settings"), None)
    worth = _worth(found.get("improvement"), stale)
    runs = [conflict["run"] for conflict in conflicts if conflict["run"]]
    return Summary(
        settings=rows,
        worth=worth,
        conflicts=[conflict["text"] for conflict in conflicts if conflict is not stale],
        open=[(title(finding.name), finding.summary) for finding in inconclusive],
        command=_command(study, records[-1] if records else {}, runs, inconclusive, found.get("improvement")),
    )


def _row(line: Mapping[str, Any]) -> tuple[str, ...]:
    interval = spell(tuple(line["interval"])) if line["interval"] else ""
    return line["name"], spell(line["today"]), spell(line["value"]), interval, line["confidence"], line["why"]


def _worth(gain: Finding | None, stale: Mapping[str, Any] | None) -> str:
    if gain is None:
        return "not compared with today's settings yet."
    if stale is not None:
        return stale["text"]
    around = (
        f" Difference {spell(gain.value)} ({spell(gain.interval)})." if gain.is_conclusive and gain.interval else ""
    )
    return " ".join([gain.summary + around, *(f"But: {caveat}" for caveat in gain.caveats)])


def _command(
    study: Study, record: Mapping[str, Any], runs: list[str], inconclusive: list[Finding], gain: Finding | None
) -> str:
    """Runs that resolve a conflict first, at the same budget; else the cheapest open question's, at a larger one."""
    budget = record.get("budget", "standard")
    wanted = sorted(
        inconclusive + ([gain] if gain is not None and not gain.is_conclusive else []),
        key=lambda f: _cost(f.experiment),
    )
    if runs:
        notebooks = min(runs, key=lambda run: (len(run), run))
    elif wanted:
        notebooks, budget = wanted[0].experiment[:2], MORE.get(budget, budget)
    elif gain is None:
        notebooks = "11"
    else:
        return ""
    workload = str(record.get("workload", study.about["workload"]))
    given = ["workup", "run", workload, "--study", typed(study.folder), "--budget", budget, "--notebooks", notebooks]
    return shlex.join(given)


def _cost(experiment: str) -> int:
    return CHEAPEST.index(experiment[:2]) if experiment[:2] in CHEAPEST else len(CHEAPEST)


def wrapped(text: str) -> str:
    """A paragraph for a terminal."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(text, 110, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
