import pytest
import torch

from workup.errors import DeviceError
from workup.measure import devices


@pytest.mark.parametrize("name", ["cpu:9", "cuda:99", "meta", "tpu9", ""])
def test_a_device_that_is_not_here_is_refused_by_name(name):
    with pytest.raises(DeviceError, match=f"device '{name}'.*Use auto"):
        devices.resolve(name)


def test_the_cpu_is_one_device_and_auto_takes_it_where_there_is_no_other():
    assert devices.resolve("cpu") == devices.resolve("cpu:0") == "cpu"
    assert devices.resolve("auto") in ("cpu", "cuda:0", "mps")
    assert devices.name("cpu").endswith(f"CPU, {torch.get_num_threads()} threads")
