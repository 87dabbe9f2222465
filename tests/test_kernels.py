"""Kernels bound to this environment, with a temporary Jupyter data folder and a faked number of GPUs."""

import json
import sys

import pytest

from workup import kernels
from workup.errors import DeviceError


@pytest.fixture(autouse=True)
def jupyter(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return tmp_path / "jupyter" / "kernels"


def gpus(monkeypatch, count):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def spec(folder, name):
    return json.loads((folder / name / "kernel.json").read_text())


def test_without_a_gpu_only_the_cpu_kernel_is_installed_and_it_runs_this_python(jupyter, monkeypatch):
    gpus(monkeypatch, 0)
    assert kernels.install() == ["workup-cpu"]
    written = spec(jupyter, "workup-cpu")
    assert written["argv"][0] == sys.executable
    assert written["env"] == {"CUDA_VISIBLE_DEVICES": ""}
    assert written["display_name"] == "Workup (CPU)"


def test_each_visible_gpu_gets_a_kernel_that_sees_it_alone(jupyter, monkeypatch):
    gpus(monkeypatch, 2)
    assert kernels.install() == ["workup-cpu", "workup-gpu0", "workup-gpu1"]
    assert spec(jupyter, "workup-gpu1")["env"] == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_gpu_that_is_pinned_already_keeps_its_own_number_or_uuid(jupyter, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5ebe9f43")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    kernels.install()
    pinned = {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert spec(jupyter, "workup-gpu0")["env"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert spec(jupyter, "workup-gpu1")["env"] == pinned


def test_installing_again_with_fewer_gpus_removes_the_kernels_of_those_that_are_gone(monkeypatch):
    gpus(monkeypatch, 2)
    kernels.install()
    gpus(monkeypatch, 1)
    kernels.install()
    assert list(kernels.installed()) == ["workup-cpu", "workup-gpu0"]


def test_remove_leaves_the_kernels_of_another_environment(jupyter, monkeypatch):
    gpus(monkeypatch, 1)
    kernels.install()
    theirs = spec(jupyter, "workup-gpu0")
    theirs["argv"][0] = "/other/bin/python"
    (jupyter / "workup-gpu0" / "kernel.json").write_text(json.dumps(theirs))
    assert kernels.remove() == ["workup-cpu"]
    assert list(kernels.installed()) == ["workup-gpu0"]


def test_a_data_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path, monkeypatch):
    gpus(monkeypatch, 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match=r"kernel 'workup-cpu': cannot write to .*file/kernels"):
        kernels.install()


def test_without_a_name_the_kernel_is_this_python_whatever_python3_is_elsewhere(jupyter):
    other = {"argv": ["/other/bin/python", "-f", "{connection_file}"], "display_name": "x", "language": "python"}
    (jupyter / "python3").mkdir(parents=True)
    (jupyter / "python3" / "kernel.json").write_text(json.dumps(other))
    assert kernels.manager(None).kernel_spec.argv[0] == sys.executable


def test_a_kernel_that_does_not_exist_names_the_nearest(monkeypatch):
    gpus(monkeypatch, 1)
    kernels.install()
    with pytest.raises(DeviceError, match=r"kernel 'workup-gpu': not installed\. Did you mean 'workup-gpu0'\?"):
        kernels.manager("workup-gpu")


def test_a_kernel_of_another_language_is_refused(jupyter):
    (jupyter / "ir").mkdir(parents=True)
    (jupyter / "ir" / "kernel.json").write_text(json.dumps({"argv": ["R"], "display_name": "R", "language": "R"}))
    with pytest.raises(DeviceError, match="kernel 'ir' runs R, not Python"):
        kernels.manager("ir")
