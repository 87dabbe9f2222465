"""One self-contained page of a study for a colleague: what was asked, what was found, how sure, what to paste."""

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from workup.finding import Finding
from workup.show.cards import cards, recommended, spell
from workup.study import Study

STYLE = """body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:56em;margin:2em auto;padding:0 1.2em}
h1,h2,h3{line-height:1.2} h2{margin-top:2em;border-bottom:1px solid #ccc} h3{margin:1.6em 0 .3em}
pre{background:#f4f4f4;padding:.8em 1em;white-space:pre-wrap;font-size:.88em} summary{cursor:pointer}
figure{margin:1em 0 2em} figure img{max-width:100%} figcaption,.aside{color:#555;font-size:.92em}
table{border-collapse:collapse} th,td{text-align:left;vertical-align:top;padding:.15em 1.4em .15em 0}
@media print{h2,h3{break-after:avoid} figure,.card{break-inside:avoid}}"""
FRAMEWORKS = {"pytorch": "Plain PyTorch", "lightning": "Lightning", "transformers": "transformers"}


@dataclass(frozen=True)
class Chapter:
    """What the page takes from one executed notebook; figures are (base64 PNG, the Markdown before it)."""

    name: str
    title: str
    question: str = ""
    figures: tuple[tuple[str, str], ...] = ()
    error: str = ""
    parameters: Mapping[str, Any] | None = None


def write_report(study: Study) -> Path:
    """Write ``report.html`` into the study and return its path; what is missing is said in it.

    The page asks nothing of the network, and every text in it is escaped. Its figures are those
    of the executed notebooks in ``notebooks/``, each with the Markdown that stands before it.

    Raises:
        StudyError: a findings file is damaged, or the folder cannot be written.
    """
    found, chapters = study.findings(), list(_chapters(study.folder / "notebooks"))
    name = escape(str(study.about["workload"]))
    drawn = "".join(_figures(chapter) for chapter in chapters)
    sections = {
        "What was asked": "".join(_asked(c) for c in chapters) or _aside("No executed notebook is in this study."),
        "What was found, and how sure": cards(found)._repr_html_(),
        "What to paste": _paste(study.prescription()),
        "Figures": drawn or _aside("No executed notebook of this study holds a figure."),
        "How it was measured": _measured(study),
        "To track and to repeat": _tracking(study, found, chapters),
    }
    page = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Workup: {name}</title><style>{STYLE}</style>',
        f"<h1>Workup: {name}</h1>{_aside(f'Study {study.folder.name}, reported {datetime.date.today()}')}",
        _table(recommended(study)) if found else _aside("Nothing has been concluded yet."),
        *(f"<h2>{heading}</h2>{body}" for heading, body in sections.items()),
    ]
    return study.write("report.html", "\n".join([*page, "</html>"]))


def _chapters(folder: Path) -> Iterator[Chapter]:
    import nbformat

    for path in sorted(folder.glob("*.ipynb")):
        try:
            notebook = nbformat.read(path, as_version=4)
        except Exception as error:  # a notebook that was cut short is no reason to lose the report
            yield Chapter(path.stem, path.stem, error=f"its file cannot be read ({type(error).__name__})")
            continue
        said, failure, texts, figures = "", "", [], []
        for cell in notebook.cells:
            if cell.cell_type == "markdown" and "papermill-error-cell-tag" not in cell.metadata.get("tags", []):
                said = cell.source
                texts.append(said)
            for output in cell.get("outputs", []):
                if image := output.get("data", {}).get("image/png"):
                    figures.append(("".join(image.split()), re.sub(r"(?m)^#+ .*$", "", said)))
                    said = ""
                if output.output_type == "error":
                    failure = f"{output.ename}: {output.evalue}"
        heading, _, rest = (texts[0] if texts else path.stem).strip().partition("\n")
        parameters = notebook.metadata.get("papermill", {}).get("parameters")
        yield Chapter(path.stem, heading.lstrip("# "), rest.strip(), tuple(figures), failure, parameters)


def prose(markdown: str) -> str:
    """Markdown's headings, paragraphs, lists, bold and code as escaped HTML; links keep their words.

    >>> prose("# Why <b>?\\n\\nSee `x` and **y**.\\n\\n- one\\n- two")
    '<h4>Why &lt;b&gt;?</h4><p>See <code>x</code> and <b>y</b>.</p><ul><li>one</li><li>two</li></ul>'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", escape(markdown.strip(), quote=False))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text))
    text = re.sub(r"^#+\s+(.*)$", r"\n<h4>\1</h4>\n", text, flags=re.MULTILINE)
    text = re.sub(r"^[-*] (.*)$", r"\n<li>\1</li>\n", text, flags=re.MULTILINE)
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    marked = "".join(block if block.startswith(("<h4>", "<li>")) else f"<p>{block}</p>" for block in blocks)
    return re.sub(r"((?:<li>.*?</li>)+)", r"<ul>\1</ul>", marked, flags=re.DOTALL)


def _aside(text: str) -> str:
    return f'<p class="aside">{escape(text)}</p>'


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as a table, the first its header."""
    head, *body = [[escape(str(cell)) for cell in row] for row in rows]
    lines = ["<th>" + "<th>".join(head), *("<td>" + "<td>".join(row) for row in body)]
    return "<table><tr>" + "<tr>".join(lines) + "</table>"


def _asked(chapter: Chapter) -> str:
    stopped = f"<p><b>It stopped before its end:</b> {escape(chapter.error)}</p>" if chapter.error else ""
    return f"<h3>{escape(chapter.title)}</h3>{prose(chapter.question)}{stopped}"


def _paste(prescription: Mapping[str, Any] | None) -> str:
    if prescription is None:
        return _aside("No prescription yet: it is written when a notebook concludes.")
    return "".join(
        f"<details{' open' * (key == 'pytorch')}><summary>{escape(FRAMEWORKS.get(key, key))}</summary>"
        f"<pre>{escape(lines)}</pre></details>"
        for key, lines in prescription["lines"].items()
    )


def _figures(chapter: Chapter) -> str:
    images = "".join(
        f'<figure><img alt="{escape(chapter.title)}" src="data:image/png;base64,{escape(image)}">'
        f"<figcaption>{prose(said)}</figcaption></figure>"
        for image, said in chapter.figures
    )
    return f"<h3>{escape(chapter.title)}</h3>{images}" if images else ""


def _measured(study: Study) -> str:
    rows: list[tuple[str, ...]] = [("notebook", "device", "seed", "budget", "versions")]
    for path in sorted((study.folder / "findings").glob("*.json")):
        body = json.loads(path.read_text())
        versions = ", ".join(f"{key} {value}" for key, value in dict(body.get("versions", {})).items())
        rows.append((path.stem, *(str(body.get(key, "not recorded")) for key in rows[0][1:4]), versions))
    parts = ", ".join(f"{part} {value}" for part, value in study.about["fingerprint"].items())
    return _table(rows) + _aside(f"Begun {study.about.get('created', 'at an unknown time')}. Fingerprint: {parts}.")


def _tracking(study: Study, found: Mapping[str, Finding], chapters: Sequence[Chapter]) -> str:
    """The row for a table of studies (playbook: F5)."""
    given = next((chapter.parameters for chapter in chapters if chapter.parameters), {})
    reference, folder = given.get("workload", study.about["workload"]), given.get("study", study.folder)
    gained = found.get("improvement")
    best = [value for value in gained.evidence.get("prescribed", ()) if isinstance(value, float)] if gained else []
    row = {
        "name": study.folder.name,
        "configuration": "study.json, prescription.json",
        "notes": gained.summary if gained else "; ".join(finding.summary for finding in found.values()),
        "trials": str(len(list((study.folder / "traces").glob("*.parquet")))),
        "best checkpoint's evaluation loss": spell(sum(best) / len(best)) if best else "not measured",
        "command": f"workup run {reference} --study {folder}"
        + "".join(f" --{key} {given[key]}" for key in ("budget", "seed", "device") if key in given),
    }
    return _table([("column", "entry"), *row.items()])
