"""Findings as cards in a notebook and as text in a terminal; tables to read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd

from workup.finding import Finding

#: Background and text colour by confidence: the colour-blind can tell them apart, and the word stands inside.
COLOURS = {"high": ("#00704F", "#FFF"), "medium": ("#E69F00", "#000"), "low": ("#B84A00", "#FFF")}
INCONCLUSIVE = ("#5A5A5A", "#FFF")
NAMES = {
    "best_lr": "Best learning rate of the short sweep",
    "peak_lr": "Learning rate for the whole run",
    "lr_schedule": "Learning-rate schedule",
    "lr_at_edge": "Best rate at the edge of instability",
    "unstable_lr": "Unstable from learning rate",
    "instability_cause": "Cause of the instability",
    "clip_norm": "Clipping threshold",
    "clipped_fraction": "Share of steps clipped",
    "input_bound": "Bound by its input",
    "max_feasible_batch_size": "Largest feasible batch size",
    "saturation_batch_size": "Throughput saturates at batch size",
}
#: What a name in the evidence does not say by itself.
EVIDENCE = {
    "margin": "share of the memory limit left free",
    "carried": "carried to the whole run",
    "stalled": "rates stuck on a plateau",
    "still": "share of the steps without progress",
    "feasible": "rates that train",
    "infeasible": "rates that do not train",
    "extend": "rates to try next",
    "region": "rates as good",
}
# Inline styles: a style sheet in an output would be dropped by an untrusted notebook.
CARD = """<div class="card" style="border:1px solid rgba(128,128,128,.45);border-left:6px solid {{ back }};
border-radius:6px;padding:10px 16px;margin:10px 0;max-width:46em;line-height:1.45">
<div style="font-size:.9em;display:flex;justify-content:space-between;align-items:start;gap:1em">{{ title }}
<span style="white-space:nowrap;background:{{ back }};color:{{ ink }};border-radius:9px;padding:1px 10px"
>{{ sure }}</span></div>
<div style="font-size:1.5em;font-weight:600;margin:2px 0 4px">{{ answer }}</div>
<div>{{ finding.summary }} <span style="opacity:.7">({{ finding.rule }})</span></div>
{% for line in more %}<div style="margin-top:4px">{{ line }}</div>{% endfor %}
{% if evidence %}<details style="margin-top:6px"><summary style="cursor:pointer">evidence</summary>
<table style="font-size:.9em;margin:0;color:inherit">{% for name, value in evidence.items() %}
<tr><td style="text-align:left;vertical-align:top;min-width:10em">{{ name }}</td>
<td style="text-align:left;white-space:normal;overflow-wrap:anywhere">{{ value }}</td></tr>{% endfor %}
</table></details>{% endif %}</div>"""

TABLE = """<table style="margin:0 0 1em">{% for row in rows %}<tr>{% set tag = "th" if loop.first else "td" %}
{% for cell in row %}<{{ tag }} style="text-align:{{ sides[loop.index0] }}">{{ cell }}</{{ tag }}>
{% endfor %}</tr>{% endfor %}</table>"""


def title(name: str) -> str:
    """A finding's name in words.

    >>> title("best_lr"), title("recommended_fix")
    ('Best learning rate of the short sweep', 'Recommended fix')
    """
    return NAMES.get(name, name.replace("_", " ").capitalize())


def spell(value: Any, unit: str = "") -> str:
    """A value as one would say it, its unit behind.

    >>> spell(0.031623), spell(True), spell(4096, "examples"), spell("mid_recovered"), spell((0.01, 0.1))
    ('0.0316', 'yes', '4,096 examples', 'mid recovered', '0.01 to 0.1')
    >>> spell([{"begin": 3, "size": 9.1234}, None])
    'begin: 3, size: 9.12; none'
    """
    if isinstance(value, tuple) and len(value) == 2:
        words = f"{spell(value[0])} to {spell(value[1])}"
    elif isinstance(value, Mapping):
        between = "; " if any(isinstance(item, Mapping) for item in value.values()) else ", "
        words = between.join(f"{key}: {spell(item)}" for key, item in value.items() if item is not None)
    elif isinstance(value, (list, tuple)):
        words = ("; " if any(isinstance(item, Mapping) for item in value) else ", ").join(map(spell, value))
    elif value is None or isinstance(value, bool):
        words = {None: "none", True: "yes", False: "no"}[value]
    elif isinstance(value, (int, float)):
        words = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    else:
        words = str(value).replace("_", " ") if str(value).isidentifier() else str(value)
    return f"{words} {unit}".rstrip()


def sure(finding: Finding) -> str:
    """How sure, in words."""
    known = finding.is_conclusive or finding.is_none
    return f"{finding.confidence} confidence" if known else "cannot tell"


def answer(finding: Finding) -> str:
    """Value, unit and interval; or that there is none to tell."""
    around = f" ({spell(finding.interval)})" if finding.interval is not None else ""
    if finding.is_none:
        return "none found"
    return spell(finding.value, finding.unit) + around if finding.is_conclusive else "cannot tell"


@dataclass(frozen=True)
class Shown:
    """HTML in JupyterLab and in the report, text elsewhere."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def cards(findings: Finding | Iterable[Finding] | Mapping[str, Finding]) -> Shown:
    """One card a finding: the answer, how sure, why, and what would make it wrong.

    Example:
        >>> cards(Finding(name="best_lr", value=0.03, rule="playbook: C1", summary="0.03 trains best."))
        Best learning rate of the short sweep: 0.03 [medium confidence]
          0.03 trains best. (playbook: C1)
    """
    found = [findings] if isinstance(findings, Finding) else findings
    found = list(found.values() if isinstance(found, Mapping) else found)
    none = "No finding yet."
    return Shown("".join(map(_html, found)) or f"<p>{none}</p>", "\n".join(map(_text, found)) or none)


def table(frame: pd.DataFrame) -> Shown:
    """A table to read: numbers at the right in four digits, words at the left, blank where nothing was measured.

    Example:
        >>> table(pd.DataFrame({"lr": [0.0316228, 0.1], "status": "finished", "final": [1234.5, float("nan")]}))
        lr       status    final
        -------  --------  -----
        0.03162  finished  1,234
        0.1      finished
    """
    frame = frame.reset_index() if frame.index.name else frame
    body = [tuple(map(_cell, row)) for row in frame.astype(object).itertuples(index=False, name=None)]
    rows = [tuple(map(str, frame.columns)), *body]
    sides = ["right" if dtype.kind in "iuf" else "left" for dtype in frame.dtypes]
    return Shown(jinja2.Template(TABLE, autoescape=True).render(rows=rows, sides=sides), columns(rows))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value != value:  # NaN
        return ""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else spell(value)


def _more(finding: Finding) -> list[str]:
    ask = finding.settle and not finding.is_conclusive and not finding.is_none
    settle = [f"To settle it: {finding.settle}"] if ask else []
    return settle + [f"But: {caveat}" for caveat in finding.caveats]


def _text(finding: Finding) -> str:
    heading = f"{title(finding.name)}: {answer(finding)} [{sure(finding)}]"
    return "\n  ".join([heading, f"{finding.summary} ({finding.rule})", *_more(finding)])


def _html(finding: Finding) -> str:
    back, ink = COLOURS[finding.confidence] if finding.is_conclusive or finding.is_none else INCONCLUSIVE
    evidence = {name: value for name, value in finding.evidence.items() if value is not None and value != []}
    words: dict[str, Any] = {"title": title(finding.name), "sure": sure(finding), "answer": answer(finding)}
    words["evidence"] = {EVIDENCE.get(name, name.replace("_", " ")): _short(name, evidence[name]) for name in evidence}
    card = jinja2.Template(CARD, autoescape=True)
    return card.render(finding=finding, back=back, ink=ink, more=_more(finding), **words)


def _short(name: str, value: Any, most: int = 300) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**30:.3g} GiB"
    words = value["summary"] if isinstance(value, Mapping) and "summary" in value else spell(value)
    return words if len(words) <= most else f"{words[:most]} … ({len(value)} in all)"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table in text, the first of them its header.

    >>> print(columns([("name", "is"), ("lr", "0.1")]))
    name  is
    ----  ---
    lr    0.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
