"""One self-contained page of a study for a colleague: what to paste, what was found, how sure, and what was seen.

What the page looks like stands in ``report.html`` beside this file.
"""

import datetime
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import mistune
from markupsafe import Markup

from workup.finding import Finding
from workup.show.cards import cards, spell
from workup.show.summary import summary
from workup.study import Study

FRAMEWORKS = {"pytorch": "Plain PyTorch", "lightning": "Lightning", "transformers": "transformers"}


def write_report(study: Study) -> Path:
    """Write ``report.html`` into the study and return its path; what is missing is said in it.

    The page asks nothing of the network, and every text in it is escaped. Its figures are those
    of the executed notebooks in ``notebooks/``, each with the Markdown that stands before it.

    Raises:
        StudyError: a findings file is damaged, or the folder cannot be written.
    """
    records, found = study.records(), study.findings()
    chapters = _with_cards(list(_chapters(study.folder / "notebooks")), records)
    lines = (study.prescription() or {"lines": {}})["lines"]
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["prose"] = prose
    page = pages.from_string(Path(__file__).with_suffix(".html").read_text())
    text = page.render(
        about=study.about,
        name=study.folder.name,
        today=datetime.date.today(),
        first=summary(study),
        prescription={FRAMEWORKS.get(key, key): text for key, text in lines.items()},
        chapters=chapters,
        measured=_measured(records),
        tracking=_tracking(study, found, chapters),
    )
    return study.write("report.html", text)


def _chapters(folder: Path) -> Iterator[dict[str, Any]]:
    """What the page takes from each executed notebook; figures are (base64 PNG, the Markdown before it)."""
    import nbformat

    for path in sorted(folder.glob("*.ipynb")):
        chapter: dict[str, Any] = {"name": path.stem, "title": path.stem, "question": "", "figures": [], "error": ""}
        chapter["parameters"] = {}
        try:
            notebook = nbformat.read(path, as_version=4)
        except Exception as error:  # a notebook that was cut short is no reason to lose the report
            yield chapter | {"error": f"its file cannot be read ({type(error).__name__})"}
            continue
        said, texts = "", []
        for cell in notebook.cells:
            if cell.cell_type == "markdown" and "papermill-error-cell-tag" not in cell.metadata.get("tags", []):
                said = cell.source
                texts.append(said)
            for output in cell.get("outputs", []):
                if image := output.get("data", {}).get("image/png"):
                    chapter["figures"].append(("".join(image.split()), re.sub(r"(?m)^#+ .*$", "", said)))
                    said = ""
                if output.output_type == "error":
                    chapter["error"] = f"{output.ename}: {output.evalue}"
        title, _, question = (texts[0] if texts else path.stem).strip().partition("\n")
        parameters = notebook.metadata.get("papermill", {}).get("parameters", {})
        yield chapter | {"title": title.lstrip("# "), "question": question, "parameters": parameters}


def prose(markdown: str) -> Markup:
    """Markdown as HTML, its headings small, HTML in it escaped; links and pictures, which would ask the network, go.

    >>> print(prose("# Why <b>?\\n\\nSee `x` and [**y**](http://z)."))
    <h4>Why &lt;b&gt;?</h4>
    <p>See <code>x</code> and <strong>y</strong>.</p>
    <BLANKLINE>
    """
    html = str(mistune.create_markdown(escape=True, plugins=["table"])(markdown))
    return Markup(re.sub(r"</?(a|img)\b[^>]*>", "", re.sub(r"(</?h)\d", r"\g<1>4", html)))


def _with_cards(chapters: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each chapter with its notebook's findings; of one whose executed copy is gone, the findings alone."""
    held = {body["experiment"]: cards(body["findings"])._repr_html_() for body in records}
    bare = {"question": "", "figures": [], "error": "", "parameters": {}}
    gone = [bare | {"name": name, "title": name} for name in held if name not in {c["name"] for c in chapters}]
    both = sorted([*chapters, *gone], key=lambda chapter: str(chapter["name"]))
    return [{**chapter, "cards": held.get(chapter["name"], "")} for chapter in both]


def _measured(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("notebook", "device", "seed", "budget", "versions")]
    for body in records:
        versions = ", ".join(f"{key} {value}" for key, value in dict(body.get("versions", {})).items())
        rows.append((body["experiment"], *(str(body.get(key, "not recorded")) for key in rows[0][1:4]), versions))
    return rows


def _tracking(study: Study, found: Mapping[str, Finding], chapters: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The row for a table of studies (playbook: F5)."""
    given: dict[str, Any] = next((chapter["parameters"] for chapter in chapters if chapter["parameters"]), {})
    options = {"study": study.folder, **given}
    gained = found.get("improvement")
    best = [value for value in gained.evidence.get("prescribed", ()) if isinstance(value, float)] if gained else []
    flags = [f"--{key} {options[key]}" for key in ("study", "budget", "seed", "device") if options.get(key) is not None]
    flags += [f"--notebooks {','.join(chapter['name'][:2] for chapter in chapters)}"] if chapters else []
    return [
        ("column", "entry"),
        ("name", study.folder.name),
        ("configuration", "study.json, prescription.json"),
        ("notes", gained.summary if gained else "; ".join(finding.summary for finding in found.values())),
        ("trials", str(len(list((study.folder / "traces").glob("*.parquet"))))),
        ("best checkpoint's evaluation loss", spell(sum(best) / len(best)) if best else "not measured"),
        ("command", " ".join(["workup run", given.get("workload", study.about["workload"]), *flags])),
    ]
