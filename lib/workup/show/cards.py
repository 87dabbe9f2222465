"""Findings as cards in a notebook, as text in a terminal, and as the short table of recommendations."""

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workup.finding import Finding
from workup.study import Study

#: Colours of how sure: background and text, readable on light and on dark. The word stands beside them.
COLOURS = {"high": ("#00704F", "#FFF"), "medium": ("#E69F00", "#000"), "low": ("#B84A00", "#FFF")}
UNTOLD = ("#5A5A5A", "#FFF")
NAMES = {
    "best_lr": "Best learning rate",
    "lr_at_edge": "Best rate at the edge of instability",
    "unstable_lr": "Unstable from learning rate",
    "peak_lr": "Peak learning rate",
    "clip_norm": "Clipping threshold",
    "clipped_fraction": "Share of steps clipped",
    "input_bound": "Bound by its input",
    "warmup_steps": "Warmup",
    "max_feasible_batch_size": "Largest feasible batch size",
    "saturation_batch_size": "Throughput saturates at batch size",
}
SETTINGS = {
    "batch_size": "recommended_batch_size",
    "peak_lr": "best_lr",
    "warmup_steps": "warmup_steps",
    "clip_norm": "clip_norm",
}


def title(name: str) -> str:
    """A finding's name in words.

    >>> title("best_lr"), title("recommended_fix")
    ('Best learning rate', 'Recommended fix')
    """
    return NAMES.get(name, name.replace("_", " ").capitalize())


def spell(value: Any, unit: str = "") -> str:
    """A value as one would say it, its unit behind.

    >>> spell(0.031623, ""), spell(True), spell(4096, "examples"), spell("mid_recovered"), spell((0.01, 0.1))
    ('0.0316', 'yes', '4,096 examples', 'mid, recovered', '0.01 to 0.1')
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return f"{spell(value[0])} to {spell(value[1], unit)}"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        words = value.replace("_recovered", ", recovered").replace("_", " ")
    elif isinstance(value, (int, float)):
        plain = f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.3g}"
        words = f"{value:,}" if isinstance(value, int) else plain
    else:
        words = json.dumps(value, default=str)
    return f"{words} {unit}".rstrip()


def answer(finding: Finding) -> str:
    """Value, unit and interval, or that it cannot be told."""
    if not finding.told:
        return "cannot tell"
    around = f" ({spell(finding.interval)})" if finding.interval is not None else ""
    return spell(finding.value, finding.unit) + around


@dataclass(frozen=True)
class Cards:
    """Findings to look at: HTML in JupyterLab and in the report, Markdown or text elsewhere."""

    findings: tuple[Finding, ...]

    def _repr_html_(self) -> str:
        return "".join(_html(finding) for finding in self.findings) or "<p>No finding yet.</p>"

    def _repr_markdown_(self) -> str:
        return "\n\n".join(_text(finding, mark="**") for finding in self.findings) or "No finding yet."

    def __repr__(self) -> str:
        return "\n\n".join(_text(finding) for finding in self.findings) or "No finding yet."


def cards(findings: Finding | Iterable[Finding] | Mapping[str, Finding]) -> Cards:
    """One card a finding: the answer, how sure, why, and what would make it wrong.

    Example:
        >>> cards(Finding(name="best_lr", value=0.03, rule="playbook: C1", summary="0.03 trains best."))
        Best learning rate: 0.03 [medium confidence]
          0.03 trains best. (playbook: C1)
    """
    if isinstance(findings, Finding):
        return Cards((findings,))
    return Cards(tuple(findings.values() if isinstance(findings, Mapping) else findings))


def _text(finding: Finding, *, mark: str = "") -> str:
    sure = f"{finding.confidence} confidence" if finding.told else "not told"
    lines = [f"{mark}{title(finding.name)}: {answer(finding)}{mark} [{sure}]"]
    lines.append(f"{finding.summary} ({finding.rule})")
    lines += [f"To settle it: {finding.settle}"] * bool(finding.settle and not finding.told)
    lines += [f"But: {caveat}" for caveat in finding.caveats]
    return ("  \n" if mark else "\n  ").join(lines)


def _html(finding: Finding) -> str:
    safe = html.escape
    back, ink = COLOURS[finding.confidence] if finding.told else UNTOLD
    sure = f"{finding.confidence} confidence" if finding.told else "cannot tell"
    parts = [
        f'<div style="border:1px solid rgba(128,128,128,.45);border-left:6px solid {back};border-radius:6px;'
        'padding:10px 16px;margin:10px 0;max-width:46em;color:inherit;line-height:1.45">',
        f'<div style="font-size:.9em;opacity:.85">{safe(title(finding.name))}'
        f'<span style="float:right;background:{back};color:{ink};border-radius:9px;padding:1px 10px">{sure}</span></div>',
        f'<div style="font-size:1.5em;font-weight:600;margin:2px 0 4px">{safe(answer(finding))}</div>',
        f'<div>{safe(finding.summary)} <span style="opacity:.7">({safe(finding.rule)})</span></div>',
    ]
    if finding.settle and not finding.told:
        parts.append(f'<div style="margin-top:6px"><b>To settle it:</b> {safe(finding.settle)}</div>')
    if finding.caveats:
        items = "".join(f"<li>{safe(caveat)}</li>" for caveat in finding.caveats)
        parts.append(f'<ul style="margin:6px 0 0 1.2em;padding:0">{items}</ul>')
    if finding.evidence:
        rows = "".join(
            f'<tr><td style="padding:1px 14px 1px 0;text-align:left;vertical-align:top">{safe(key.replace("_", " "))}'
            f'</td><td style="text-align:left;word-break:break-word">{safe(_evidence(value))}</td></tr>'
            for key, value in finding.evidence.items()
        )
        parts.append(
            '<details style="margin-top:6px"><summary style="cursor:pointer">evidence</summary>'
            f'<table style="font-size:.9em;border-collapse:collapse">{rows}</table></details>'
        )
    return "".join(parts) + "</div>"


def _evidence(value: Any, most: int = 300) -> str:
    words = spell(value)
    return words if len(words) <= most else f"{words[:most]} … ({len(value)} in all)"


def recommendations(findings: Study | Mapping[str, Finding]) -> str:
    """The settings, and then what else was found, as a text table: setting, value, how sure, from.

    Of a study, the settings are its prescription's, those that stay as they were included.
    """
    written = findings.prescription() if isinstance(findings, Study) else None
    found = findings.findings() if isinstance(findings, Study) else dict(findings)
    rows = [("setting", "value", "interval", "how sure", "from")]
    for setting, name in SETTINGS.items():
        finding = found.get(name)
        if written is None and finding is not None:
            rows.append(_row(setting, finding))
        elif written is not None:
            source = written["sources"].get(setting, "as you have it")
            own = finding is not None and (finding.told and spell(finding.value) == spell(written[setting]))
            row = _row(setting, finding) if own and finding is not None else (setting, "", "", "", "")
            rows.append((setting, spell(written[setting]), *row[2:4], source))
    rows += [_row(title(n), finding) for n, finding in found.items() if n not in SETTINGS.values()]
    if len(rows) == 1:
        return "No finding yet: run a notebook, or `workup run`."
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _row(name: str, finding: Finding) -> tuple[str, str, str, str, str]:
    value = spell(finding.value, finding.unit) if finding.told else "cannot tell"
    interval = spell(finding.interval) if finding.interval is not None else ""
    return name, value, interval, finding.confidence if finding.told else "", finding.experiment or finding.rule
