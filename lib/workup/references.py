"""How a workload is found: by a built-in's name, a file and a name in it, or a module and a name in it."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from workup.errors import WorkloadError, nearest
from workup.notebooks import project_root
from workup.workload import Workload
from workup.workloads import BUILT_IN


def load(reference: str) -> Workload:
    """Find a workload.

    Args:
        reference: ``"name"`` (built in), ``"path/to/file.py:attr"`` or ``"package.module:attr"``;
            attr is a Workload or a function returning one. A relative path starts from
            :func:`workup.notebooks.project_root`. The file runs under torch's seed 0; the caller's random state stays.

    Raises:
        WorkloadError: no such file, module or attribute, an error in the user's own file
            (its traceback, shortened, is part of the message), or not a Workload.

    Example:
        >>> load("digits-mlp").batch_size
        64
    """
    # Weights or data that a file draws without a seed are then the same in every process that loads it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _load(reference)


def _load(reference: str) -> Workload:
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        if reference in BUILT_IN:
            return BUILT_IN[reference]()
        if reference.endswith(".py"):
            raise WorkloadError(f"workload '{reference}': say which name in the file, as in '{reference}:workload'.")
        raise WorkloadError(f"workload '{reference}': no built-in of that name. {nearest(reference, BUILT_IN)}")
    module = _import_file(place, reference) if place.endswith(".py") else _import_module(place, reference)
    if not hasattr(module, attribute):
        own = [n for n, v in vars(module).items() if isinstance(v, Workload) or _defined_in(v, module)]
        raise WorkloadError(f"workload '{reference}': {place} has no '{attribute}'. {nearest(attribute, own)}")
    found = getattr(module, attribute)
    if not isinstance(found, Workload) and callable(found):
        try:
            found = found()
        except WorkloadError:
            raise
        except (Exception, SystemExit) as error:
            raise WorkloadError(f"workload '{reference}': {attribute}() failed.\n{_short(error)}") from error
    if not isinstance(found, Workload):
        kind = type(found).__name__
        raise WorkloadError(
            f"workload '{reference}': {attribute} is {kind}, not a Workload or a function returning one."
        )
    return found


def _defined_in(value: Any, module: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _import_file(place: str, reference: str) -> Any:
    path = (project_root() / place).resolve()
    if not path.is_file():
        raise WorkloadError(f"workload '{reference}': no file at {path}.")
    name = "workup_user_" + hashlib.sha256(str(path).encode()).hexdigest()[:8] + "_" + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload '{reference}': {place} cannot be imported.\n{_short(error)}") from error
    return module


def _import_module(place: str, reference: str) -> Any:
    root = str(project_root())
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and place.startswith(error.name):
            raise WorkloadError(f"workload '{reference}': no module '{error.name}' to import.") from error
        raise WorkloadError(f"workload '{reference}': {place} cannot be imported.\n{_short(error)}") from error
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload '{reference}': {place} cannot be imported.\n{_short(error)}") from error


def _short(error: BaseException) -> str:
    """The user's own frames of a traceback: those outside this package and the import system."""
    here = str(Path(__file__).parent)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((here, "<frozen"))
    ]
    lines = traceback.format_list(frames[-3:]) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
