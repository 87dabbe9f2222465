"""Workup: short controlled experiments on your PyTorch training, and what they say to change.

The names below are the whole public surface; each is imported on first use, so that
``import workup`` costs nothing and the judging functions run without torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Workload": "workload",
    "load": "references",
    "Trial": "trace",
    "Trace": "trace",
    "Finding": "finding",
    "Prescription": "finding",
    "Study": "study",
    "start": "experiments.session",
    "WorkupError": "errors",
    "WorkloadError": "errors",
    "ParameterError": "errors",
    "StudyError": "errors",
    "DeviceError": "errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'workup' has no attribute {name!r}")
    return getattr(importlib.import_module(f"workup.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
