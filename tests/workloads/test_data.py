import gzip
import hashlib

import numpy as np
import pytest
import torch

from workup import WorkupError
from workup.workload import example_hash
from workup.workloads import data


@pytest.mark.parametrize(
    ("name", "shape"), [("digits", (1797, 65)), ("diabetes", (442, 11)), ("breast_cancer", (569, 31))]
)
def test_each_bundled_file_is_the_recorded_one_and_has_no_repeated_row(name, shape):
    table = data.read_table(f"{name}.csv.gz")
    assert table.shape == shape
    assert len(np.unique(table, axis=0)) == shape[0]
    assert np.isfinite(table).all()


def test_the_readme_lists_every_file_with_its_checksum():
    text = (data.data_folder() / "README.md").read_text()
    for name, checksum in data.CHECKSUMS.items():
        assert f"`{name}`" in text
        assert checksum in text


def test_a_corrupted_copy_is_refused_with_both_checksums(tmp_path):
    whole = (data.data_folder() / "digits.csv.gz").read_bytes()
    corrupted = gzip.compress(gzip.decompress(whole).replace(b"0,0,5,13", b"0,0,5,12", 1), mtime=0)
    (tmp_path / "digits.csv.gz").write_bytes(corrupted)
    with pytest.raises(WorkupError) as raised:
        data.read_table("digits.csv.gz", folder=tmp_path)
    message = str(raised.value)
    assert str(tmp_path / "digits.csv.gz") in message
    assert hashlib.sha256(corrupted).hexdigest() in message
    assert data.CHECKSUMS["digits.csv.gz"] in message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WorkupError, match=r"digits\.csv\.gz is missing"):
        data.read_table("digits.csv.gz", folder=tmp_path)


def test_an_installed_wheel_finds_its_data_inside_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "__file__", str(tmp_path / "site-packages/workup/workloads/data.py"))
    assert data.data_folder() == tmp_path / "site-packages/workup/_data"


def test_a_python_without_sources_is_told_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(WorkupError, match=r"argparse\.py is not there"):
        data.python_sources()


def test_text_windows_are_the_bytes_of_the_sources_one_after_the_other():
    train, evaluate = data.python_sources(context=32)
    folder = data.Path(data.sysconfig.get_path("stdlib"))
    source = (folder / "contextlib.py").read_bytes()
    assert bytes(evaluate.tensors[0][:4].flatten().tolist()) == source[: 4 * 33]
    assert train.tensors[0].shape[1] == evaluate.tensors[0].shape[1] == 33
    assert not set(data.TRAIN_MODULES) & set(data.EVAL_MODULES)


@pytest.mark.parametrize("split", [data.digits, data.diabetes, data.breast_cancer, data.python_sources])
def test_no_evaluation_example_stands_in_the_training_data(split):
    train, evaluate = split()
    seen = {example_hash(train[i]) for i in range(len(train))}
    assert not any(example_hash(evaluate[i]) in seen for i in range(len(evaluate)))


def test_features_are_scaled_by_the_training_rows_alone():
    for train, _ in (data.diabetes(), data.breast_cancer()):
        features = train.tensors[0]
        torch.testing.assert_close(features.mean(0), torch.zeros(features.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(features.std(0, correction=0), torch.ones(features.shape[1]), atol=1e-5, rtol=0)


def test_the_malignant_are_a_minority_in_both_parts():
    train, evaluate = data.breast_cancer()
    assert [int(part.tensors[1].sum()) for part in (train, evaluate)] == [24, 12]
    assert [len(part) for part in (train, evaluate)] == [262, 131]
