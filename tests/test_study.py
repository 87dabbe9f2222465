import errno
import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from workup import Finding, Study, StudyError, Trial
from workup.measure.train import train
from workup.study import write_whole

PARTS = {"model": "aa", "code": "bb"}


def opened(folder):
    return Study.open(folder, workload="small", fingerprint=PARTS)


def test_a_study_keeps_traces_and_findings(tmp_path, workload):
    study = opened(tmp_path / "s")
    trial = Trial(lr=0.1, steps=3, batch_size=4)
    trace = train(workload, trial)
    study.save_trace("t1", trace)
    again = Study.read(tmp_path / "s")
    assert again.load_trace("t1").steps.equals(trace.steps)
    assert again.load_trace("t2") is None
    assert [name for name, _ in again.traces()] == ["t1"]
    study.record("04_learning_rate", [Finding(name="best_lr", value=0.1, rule="C1", summary="…")])
    study.record("06_warmup", [Finding(name="best_lr", value=0.2, rule="D5", summary="…")])
    assert again.findings()["best_lr"].value == 0.2
    assert again.findings()["best_lr"].experiment == "06_warmup"


def test_a_table_is_measured_once_for_all_that_it_depends_on(tmp_path):
    study, calls = opened(tmp_path / "s"), []

    def measure():
        calls.append(1)
        return pd.DataFrame({"size": [1, 2], "status": ["fits", ""], "seconds": [0.1, float("nan")]})

    first = study.table("probe", {"seed": 0, "knobs": {"a": None}}, measure)
    again = Study.read(tmp_path / "s").table("probe", {"knobs": {"a": None}, "seed": 0}, measure)
    pd.testing.assert_frame_equal(first, again)
    assert len(calls) == 1
    study.table("probe", {"seed": 1, "knobs": {"a": None}}, measure)
    study.table("other", {"seed": 0, "knobs": {"a": None}}, measure)
    study.table("probe", {"seed": 0, "knobs": {"a": None}}, measure, holds=lambda kept: kept["size"].max() > 2)
    assert len(calls) == 4


def test_a_damaged_table_is_measured_again(tmp_path):
    study = opened(tmp_path / "s")
    study.table("probe", {}, lambda: pd.DataFrame({"a": [1]}))
    next((tmp_path / "s" / "tables").iterdir()).write_bytes(b"half")
    with pytest.warns(UserWarning, match="measured again"):
        assert study.table("probe", {}, lambda: pd.DataFrame({"a": [2]}))["a"].tolist() == [2]
    assert study.table("probe", {}, lambda: pd.DataFrame({"a": [3]}))["a"].tolist() == [2]


def test_opening_names_what_is_wrong_with_the_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StudyError, match="is a file"):
        opened(file)
    with pytest.raises(StudyError, match="cannot write"):
        opened(file / "below")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(StudyError, match="holds other files"):
        opened(tmp_path / "photos")
    with pytest.raises(StudyError, match="no folder"):
        Study.read(tmp_path / "none")
    opened(tmp_path / "s")
    (tmp_path / "s" / "study.json").write_text("{")
    with pytest.raises(StudyError, match="damaged"):
        opened(tmp_path / "s")


def test_a_study_of_another_workload_or_version_is_refused_by_name(tmp_path):
    opened(tmp_path / "s")
    with pytest.raises(StudyError, match="belongs to workload 'small', not 'large'"):
        Study.open(tmp_path / "s", workload="large", fingerprint=PARTS)
    with pytest.raises(StudyError, match="changed since: model"):
        Study.open(tmp_path / "s", workload="small", fingerprint={**PARTS, "model": "cc"})


def test_a_damaged_trace_is_told_and_runs_again(tmp_path):
    study = opened(tmp_path / "s")
    (study.folder / "traces" / "t1.parquet").write_bytes(b"PAR1 cut off")
    with pytest.warns(UserWarning, match="t1 is damaged"):
        assert study.load_trace("t1") is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def full_disk(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_loses_no_trace(tmp_path, workload, monkeypatch):
    study = opened(tmp_path / "s")
    trace = train(workload, Trial(lr=0.1, steps=3, batch_size=4))
    rescue = tmp_path / "elsewhere"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(rescue))
    real = write_whole
    monkeypatch.setattr(
        "workup.study.write_whole",
        lambda path, data: full_disk(0) if study.folder in path.parents else real(path, data),
    )
    with pytest.warns(UserWarning, match="No space left"):
        kept = study.save_trace("t1", trace)
    assert kept.read_bytes() == trace.to_bytes()
    assert rescue in kept.parents
    assert study.load_trace("t1").to_bytes() == trace.to_bytes()
    with pytest.raises(StudyError, match=r"report\.html \(No space left.*\)\. Traces are kept in .*elsewhere"):
        study.write("report.html", "<p>")


WRITER = """
import pathlib, sys
from workup.study import write_whole
for _ in range(100):
    write_whole(pathlib.Path(sys.argv[1]), sys.argv[2].encode() * 100_000)
"""


def test_two_processes_writing_one_file_never_mix(tmp_path):
    path = tmp_path / "shared"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert (len(set(content)), len(content)) == (1, 100_000)
    assert [writer.returncode for writer in writers] == [0, 0]


def test_the_prescription_is_written_as_json_with_lines_to_paste(tmp_path, workload):
    study = opened(tmp_path / "s")
    study.record("04_learning_rate", [Finding(name="best_lr", value=0.25, rule="C1", summary="…")])
    study.prescribe(workload)
    body = json.loads((study.folder / "prescription.json").read_text())
    assert body["peak_lr"] == 0.25
    assert "0.25" in body["lines"]["pytorch"]
    assert Study.read(study.folder).prescription() == body


def test_a_name_too_long_and_a_damaged_prescription_are_told(tmp_path):
    with pytest.raises(StudyError, match="no folder can be named so"):
        Study.open(tmp_path / ("x" * 400), workload="w", fingerprint={})
    study = Study.open(tmp_path / "s", workload="w", fingerprint={})
    study.write("prescription.json", '{"lines": ')
    with pytest.raises(StudyError, match=r"prescription\.json is damaged"):
        study.prescription()
