"""Which device, and what ran there."""

import platform

import torch

import workup
from workup.errors import DeviceError


def resolve(device: str) -> str:
    """The device to use: ``auto`` takes cuda:0, then mps, then cpu.

    Raises:
        DeviceError: a name torch does not know, or a device this machine does not have.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return "cuda:0"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"device {device!r} is unknown. Use auto, cpu, cuda:0 or mps.") from None
    if parsed.type == "cuda":
        count, index = torch.cuda.device_count(), parsed.index or 0
        if index >= count:
            raise DeviceError(f"device {device!r}: this machine shows torch {count} CUDA devices. Use auto or cpu.")
        return f"cuda:{index}"
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(f"device {device!r}: torch sees no Apple GPU here. Use auto or cpu.")
    if parsed.type not in ("cpu", "mps") or parsed.index:
        raise DeviceError(f"device {device!r} is not one Workup measures on. Use auto, cpu, cuda:0 or mps.")
    return parsed.type


def synchronize(device: str) -> None:
    """Wait for the device's queued work; nothing to wait for on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"workup": workup.__version__, "torch": torch.__version__, "python": platform.python_version()}


def name(device: str) -> str:
    """The device's own name, for reports."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if device == "cpu" else device
