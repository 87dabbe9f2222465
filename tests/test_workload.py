import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from workup import WorkloadError, load
from workup.workload import example_hash, fingerprint, trial_fingerprint

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workup import Workload

def loss(model, batch):
    return model(batch[0]).pow(2).mean(1)

def workload():
    return Workload(name="mine", model=nn.Linear(4, 2), train_data=TensorDataset(torch.randn(64, 4)), loss=loss,
                    optimizer=torch.optim.SGD, batch_size=8, lr=0.1, max_train_steps=10)

number = 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("digits-mpl", "no built-in of that name. Did you mean 'digits-mlp'"),
        ("mine.py", "say which name in the file"),
        ("none.py:workload", "no file at"),
        ("mine.py:worklod", "has no 'worklod'. Did you mean 'workload'"),
        ("mine.py:number", "number is int, not a Workload"),
        ("no_such_package.module:x", "no module 'no_such_package'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_ended(file, reference, message):
    with pytest.raises(WorkloadError) as caught:
        load(reference)
    assert message in str(caught.value)


def test_an_error_in_the_users_file_shows_their_own_line_and_none_of_ours(file):
    file.write_text("import torch\n\n1 / 0\n")
    with pytest.raises(WorkloadError, match="ZeroDivisionError") as caught:
        load("mine.py:workload")
    assert "line 3" in str(caught.value)
    assert "importlib" not in str(caught.value)


def test_loading_leaves_the_random_state_and_draws_the_same_weights_each_time(file):
    before = torch.get_rng_state()
    first, second = load("mine.py:workload"), load("mine.py:workload")
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(first) == fingerprint(second)


def test_a_fingerprint_is_the_same_in_another_process(file):
    code = "import workup, workup.workload; print(workup.workload.fingerprint(workup.load('mine.py:workload')))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(fingerprint(load("mine.py:workload")))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"lr": 0.2}, "settings"),
        ({"model": lambda: nn.Linear(8, 4)}, "model"),
        ({"train_data": torch.utils.data.TensorDataset(torch.ones(20, 8))}, "train_data"),
        ({"eval_data": None}, "eval_data"),
    ],
)
def test_a_change_shows_in_its_own_part(make_workload, change, part):
    one, other = fingerprint(make_workload()), fingerprint(make_workload(**change))
    assert part in [key for key in one if one[key] != other[key]]


def test_where_the_user_stands_today_is_no_part_of_a_trial(make_workload):
    one, other = make_workload(), make_workload(lr=0.2, max_train_steps=7)
    assert trial_fingerprint(fingerprint(one), one, "cpu") == trial_fingerprint(fingerprint(other), other, "cpu")
    assert trial_fingerprint(fingerprint(one), one, "cpu") != trial_fingerprint(fingerprint(one), one, "cuda:0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"lr": -0.1}, "lr must be a positive, finite number"),
        ({"lr": float("nan")}, "lr must be a positive, finite number"),
        ({"train_data": []}, "this one is empty"),
        ({"batch_size": 201}, "larger than train_data, which holds 200 examples"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16"),
        ({"loader": {"num_worker": 2}}, "Did you mean 'num_workers'"),
        ({"loss": None}, "loss must be a function"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_runs(make_workload, change, message):
    with pytest.raises(WorkloadError) as caught:
        make_workload(**change)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers(make_workload):
    made = make_workload(
        batch_size=np.int64(8), lr=np.float32(0.5), max_train_steps=np.int32(20), initial_loss=np.float64(1)
    )
    settings = (made.batch_size, made.lr, made.max_train_steps, made.initial_loss)
    assert [type(value) for value in settings] == [int, float, int, float]
    assert settings == (8, 0.5, 20, 1.0)


def test_an_example_is_known_by_its_content():
    one = {"x": torch.ones(3), "y": 1}
    assert example_hash(one) == example_hash({"x": torch.ones(3), "y": 1})
    assert example_hash(one) != example_hash({"x": torch.ones(3), "y": 2})
    assert example_hash(torch.ones(3)) != example_hash(torch.ones(3, 1))
    assert example_hash(torch.ones(3)) != example_hash(torch.ones(3, dtype=torch.float64))
