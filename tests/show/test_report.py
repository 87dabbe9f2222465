"""The report: everything in one file, nothing asked of the network, nothing unescaped."""

import base64
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from workup.finding import Finding
from workup.judge.prescription import prescribe
from workup.show.report import write_report
from workup.study import Study

PIXEL = base64.b64encode(b"\x89PNG not really").decode()
BEST = Finding(name="best_lr", value=0.03, rule="playbook: C1", summary="0.03 trains <best>.", confidence="high")
VOID = {"meta", "img", "br", "hr"}


class Page(HTMLParser):
    """What a browser would fetch or run, and whether every tag that must be closed is."""

    def __init__(self, text):
        super().__init__()
        self.links, self.scripts, self.open = [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID | {"html"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "html":
            assert self.open.pop() == tag


@pytest.fixture
def study(tmp_path):
    return Study.open(tmp_path / "mine", workload="my <model>", fingerprint={"model": "abc123", "code": "def456"})


def write_notebook(written, name, cells, **parameters):
    notebook = new_notebook(cells=cells)
    notebook.metadata["papermill"] = {"parameters": parameters}
    nbformat.write(notebook, written.folder / "notebooks" / f"{name}.ipynb")


def figure():
    return new_output("display_data", data={"image/png": PIXEL + "\n", "text/plain": "<Figure>"})


def report(study):
    path = write_report(study)
    assert path == study.folder / "report.html"
    return path.read_text()


def test_an_empty_study_says_what_is_missing(study):
    page = report(study)
    for said in ("Nothing has been concluded yet.", "No notebook has been run in this study."):
        assert said in page
    assert "No prescription yet" in page
    assert "not measured" in page
    assert Page(page).open == []


def test_a_full_report_asks_finds_prescribes_draws_and_can_be_repeated(study):
    cells = [
        new_markdown_cell("# Which learning rate?\n\nWe sweep it.\n\n| a | b |\n|---|---|\n| 1 | table |"),
        new_markdown_cell("Crosses **failed**."),
        new_code_cell("secret_code()", outputs=[figure()]),
    ]
    write_notebook(study, "04_learning_rate", cells, workload="my.py:workload", study="runs/mine", seed=3)
    study.record("04_learning_rate", [BEST], seed=3, device="cpu", budget="standard", versions={"torch": "2.13"})
    own = SimpleNamespace(batch_size=64, lr=0.1, max_train_steps=900, schedule=None, precision="fp32")
    study.save_prescription(prescribe(study.findings(), workload=own))
    (study.folder / "traces" / "a.parquet").write_bytes(b"")
    page = report(study)
    for said in (
        "Which learning rate?",
        "We sweep it.",
        "<td>table</td>",
        "Crosses <strong>failed</strong>.",
        "0.03 trains &lt;best&gt;.",
    ):
        assert said in page
    for said in ("Plain PyTorch", "Lightning", "TrainingArguments(", "torch 2.13", "model abc123", "<td>1</td>"):
        assert said in page
    assert "workup run my.py:workload --study runs/mine --seed 3" in page
    assert "secret_code" not in page
    parsed = Page(page)
    assert parsed.links == [f"data:image/png;base64,{PIXEL}"]
    assert parsed.open == []


def test_the_page_asks_nothing_of_the_network_and_runs_nothing(study):
    evil = '<img src="http://evil/x.png" onerror="alert(1)"><script src="http://evil/y.js"></script>'
    write_notebook(
        study,
        "04_learning_rate",
        [
            new_markdown_cell(f"# Title {evil}\n\n[a link](http://evil/z) ![picture](http://evil/p.png) {evil}"),
            new_code_cell("x", outputs=[new_output("display_data", data={"text/html": evil}), figure()]),
            new_code_cell("x", outputs=[new_output("error", ename="E", evalue=evil, traceback=[])]),
        ],
        workload=evil,
    )
    study.record("04_learning_rate", [Finding(name="best_lr", value=evil, rule=evil, summary=evil)], device=evil)
    page = report(study)
    parsed = Page(page)
    assert parsed.scripts == 0
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert not re.search(r"url\(|@import|<link|<iframe", page)


def test_a_notebook_that_stopped_is_said_to_have(study):
    failed = new_output("error", ename="ParameterError", evalue="lr must be positive", traceback=[])
    write_notebook(study, "07_clipping", [new_markdown_cell("# Clip?"), new_code_cell("x", outputs=[failed])])
    assert "It stopped before its end:</b> ParameterError: lr must be positive" in report(study)


def test_a_damaged_notebook_loses_only_itself(study):
    (study.folder / "notebooks" / "04_learning_rate.ipynb").write_text('{"cells": [')
    study.record("05_instability", [BEST])
    page = report(study)
    assert "its file cannot be read" in page
    assert "0.03 trains &lt;best&gt;." in page


def test_the_tracking_row_gives_the_best_checkpoints_loss(study):
    gained = Finding(
        name="improvement", value=0.1, rule="F4", summary="Lower.", evidence={"prescribed": [0.2, 0.4, "nan"]}
    )
    study.record("11_final_run", [gained])
    assert "<tr><td>best checkpoint&#39;s evaluation loss</td><td>0.3</td></tr>" in report(study)
