"""Jupyter kernels bound to this environment: one for the CPU, one for each GPU.

``papermill -k workup-gpu0`` and JupyterLab's menu then reach a chosen device: a GPU's
kernel sees that GPU alone (as the first), the CPU's sees none.
"""

import os
import sys
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel

from workup.errors import DeviceError, nearest

PREFIX = "workup-"


def install() -> list[str]:
    """Install this environment's kernels for the current user, in place of those it had.

    Returns:
        Their names: ``workup-cpu`` and ``workup-gpu0``, …

    Raises:
        DeviceError: Jupyter's data folder cannot be written.
    """
    from ipykernel.kernelspec import install as install_spec

    from workup.measure import devices

    pins = {f"{PREFIX}cpu": devices.hidden()} | {f"{PREFIX}gpu{i}": pin for i, pin in enumerate(devices.pins())}
    order = {name: value for name in ("CUDA_DEVICE_ORDER",) if (value := os.environ.get(name))}
    remove()
    for name, pin in pins.items():
        label = f"Workup ({name.removeprefix(PREFIX).upper()})"
        env = {**order, **pin}
        try:
            install_spec(user=True, kernel_name=name, display_name=label, env=env)
        except OSError as error:
            where = KernelSpecManager().user_kernel_dir
            raise DeviceError(
                f"kernel '{name}': cannot write to {where} ({error.strerror}). Set JUPYTER_DATA_DIR."
            ) from error
    return list(pins)


def installed() -> dict[str, KernelSpec]:
    """Every Workup kernel by name, those of other environments too (see :func:`ours`)."""
    manager = KernelSpecManager()
    names = sorted(name for name in manager.find_kernel_specs() if name.startswith(PREFIX))
    return {name: manager.get_kernel_spec(name) for name in names}


def ours(spec: KernelSpec) -> bool:
    """Whether a kernel runs this environment's Python."""
    return bool(spec.argv) and spec.argv[0] == sys.executable


def remove() -> list[str]:
    """Remove this environment's Workup kernels; the names of what was removed."""
    manager = KernelSpecManager()
    names = [name for name, spec in installed().items() if ours(spec)]
    for name in names:
        manager.remove_kernel_spec(name)
    return names


def manager(name: str | None) -> Any:
    """A manager, not yet started, for the kernel ``name``, or for this very Python where None.

    Jupyter's ``python3`` may belong to another environment, so None does not look it up.

    Raises:
        DeviceError: no kernel of that name, or not one for Python.
    """
    import zmq
    from jupyter_client.manager import AsyncKernelManager

    # without it, other users of the machine could read the kernel's loopback traffic
    private: dict[str, Any] = {"transport_encryption": "auto" if zmq.has("curve") else "disabled"}
    if name is None:
        own = KernelSpecManager(kernel_dirs=[])
        return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=own, **private)
    specs = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec(name)
    except NoSuchKernel:
        hint = nearest(name, specs.find_kernel_specs())
        raise DeviceError(f"kernel '{name}': not installed. {hint} `workup kernels install` adds Workup's.") from None
    if spec.language.lower() != "python":
        raise DeviceError(f"kernel '{name}' runs {spec.language or 'another language'}, not Python.")
    return AsyncKernelManager(kernel_name=name, **private)
