"""One self-contained page of a study for a colleague: asked, found, how sure, what to paste."""

import datetime
import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workup.finding import Finding
from workup.show.cards import cards, recommendations
from workup.study import Study

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:60em;margin:2em auto;padding:0 1.2em}
h1,h2{line-height:1.2} h2{margin-top:2em;border-bottom:1px solid #ccc} h3{margin:1.6em 0 .3em}
pre{background:#f4f4f4;padding:.8em 1em;overflow-x:auto;font-size:.88em} summary{cursor:pointer;font-weight:600}
figure{margin:1em 0 1.8em} figure img{max-width:100%} figcaption,.aside{color:#555;font-size:.92em}
table{border-collapse:collapse} th,td{text-align:left;vertical-align:top;padding:.15em 1.2em .15em 0}
@media print{details{display:block} h2{break-after:avoid} figure{break-inside:avoid}}
"""


@dataclass(frozen=True)
class Chapter:
    """What the report takes from one executed notebook: its question, its figures, and whether it got through."""

    name: str
    title: str
    question: str
    figures: tuple[tuple[str, str], ...]
    error: str


def write_report(study: Study) -> Path:
    """Write ``report.html`` into the study and return its path; what is missing is said in it.

    The page asks nothing of the network. Every text in it is escaped. Figures come from the
    executed notebooks in ``notebooks/``, each with the paragraph that stands before it.

    Raises:
        StudyError: a findings file is damaged, or the folder cannot be written.
    """
    found, chapters = study.findings(), list(_chapters(study.folder / "notebooks"))
    name = html.escape(str(study.about["workload"]))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Workup: {name}</title><style>{STYLE}</style>',
        f"<h1>Workup: {name}</h1>",
        f'<p class="aside">{html.escape(study.folder.name)}, written {datetime.date.today().isoformat()}</p>',
        f"<pre>{html.escape(recommendations(study))}</pre>",
        "<h2>What was asked</h2>",
        *(_asked(chapter) for chapter in chapters),
        *_missing(chapters, "No executed notebook is in this study, so there are no questions and no figures here."),
        "<h2>What was found, and how sure</h2>",
        *_found(found.values()),
        "<h2>What to paste</h2>",
        *_paste(study.prescription()),
        "<h2>Figures</h2>",
        *(_figures(chapter) for chapter in chapters if chapter.figures),
        *_missing([c for c in chapters if c.figures], "No figure."),
        "<h2>How it was measured</h2>",
        *_environment(study),
        "<h2>To reproduce and to track</h2>",
        _tracking(study, found),
        "</html>",
    ]
    return study.write("report.html", "\n".join(parts))


def _chapters(folder: Path) -> Iterator[Chapter]:
    import nbformat

    for path in sorted(folder.glob("*.ipynb")):
        try:
            cells = nbformat.read(path, as_version=4).cells
        except Exception as error:  # a notebook that was cut short is no reason to lose the report
            yield Chapter(path.stem, path.stem, "", (), f"its file cannot be read ({type(error).__name__})")
            continue
        said, figures, failure, question = "", [], "", ""
        for cell in cells:
            if cell.cell_type == "markdown":
                said = cell.source
                question = question or said
            for output in cell.get("outputs", []):
                if image := output.get("data", {}).get("image/png"):
                    figures.append(("".join(str(image).split()), said))
                if output.output_type == "error":
                    failure = f"{output.ename}: {output.evalue}"
        heading, _, rest = question.strip().partition("\n")
        yield Chapter(path.stem, heading.lstrip("# ") or path.stem, rest.strip(), tuple(figures), failure)


def prose(markdown: str) -> str:
    """Markdown's plain paragraphs and headings as escaped HTML.

    >>> prose("# Why <b>?\\n\\nSee `x` and **y**.")
    '<h4>Why &lt;b&gt;?</h4><p>See <code>x</code> and <b>y</b>.</p>'
    """
    blocks = []
    for block in re.split(r"\n\s*\n", html.escape(markdown.strip(), quote=False)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block)
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text))
        heading = re.match(r"#+\s+(.*)\n?", text)
        blocks += [f"<h4>{heading[1]}</h4>"] if heading else []
        rest = text[heading.end() :] if heading else text
        blocks += [f"<p>{rest}</p>"] if rest.strip() else []
    return "".join(blocks)


def _missing(there: list[Any], said: str) -> list[str]:
    return [] if there else [f'<p class="aside">{html.escape(said)}</p>']


def _asked(chapter: Chapter) -> str:
    stopped = f"<p><b>Stopped before its end</b>: {html.escape(chapter.error)}</p>" if chapter.error else ""
    return f"<h3>{html.escape(chapter.title)}</h3>{prose(chapter.question)}{stopped}"


def _found(findings: Iterable[Finding]) -> list[str]:
    shown = list(findings)
    return _missing(shown, "Nothing yet: no notebook has concluded.") + [cards(shown)._repr_html_()] * bool(shown)


def _paste(prescription: dict[str, Any] | None) -> list[str]:
    if prescription is None:
        return _missing([], "No prescription yet: it is written when a notebook concludes.")
    names = {"pytorch": "Plain PyTorch", "lightning": "Lightning", "transformers": "transformers"}
    return [
        f"<details{' open' if key == 'pytorch' else ''}><summary>{html.escape(names.get(key, key))}</summary>"
        f"<pre>{html.escape(lines)}</pre></details>"
        for key, lines in prescription.get("lines", {}).items()
    ]


def _figures(chapter: Chapter) -> str:
    drawn = "".join(
        f'<figure><img alt="{html.escape(chapter.title)}" src="data:image/png;base64,{html.escape(image)}">'
        f"<figcaption>{prose(said)}</figcaption></figure>"
        for image, said in chapter.figures
    )
    return f"<h3>{html.escape(chapter.title)}</h3>{drawn}"


def _environment(study: Study) -> list[str]:
    rows = {"study begun": study.about.get("created", "unknown")}
    rows |= {f"workload, {part}": value for part, value in study.about["fingerprint"].items()}
    settings = []
    for path in sorted((study.folder / "findings").glob("*.json")):
        body = json.loads(path.read_text())
        rows |= {str(k): str(v) for k, v in dict(body.get("versions") or {}).items()}
        settings.append(", ".join([path.stem, *(f"{k} {body[k]}" for k in ("device", "seed", "budget") if k in body)]))
    cells = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
    return [f"<table>{cells}</table>", *(f"<p>{html.escape(line)}</p>" for line in settings)]


def _tracking(study: Study, found: dict[str, Finding]) -> str:
    """The playbook's row for a table of studies (playbook: F5)."""
    notes = "; ".join(f.summary for f in list(found.values())[:2]) or "nothing concluded yet"
    trials = len(list((study.folder / "traces").glob("*.parquet")))
    command = f"workup run {study.about['workload']} --study {study.folder.name}"
    row = {"name": study.folder.name, "notes": notes, "trials": trials, "command": f"`{command}`"}
    table = "\n".join("| " + " | ".join(str(v).replace("|", "/") for v in cells) + " |" for cells in
                      (row.keys(), ["---"] * len(row), row.values()))  # fmt: skip
    return f"<pre>{html.escape(table)}</pre>"
