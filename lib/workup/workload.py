"""What the user brings, and what tells one version of it from another."""

import ast
import hashlib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from workup.errors import WorkloadError, nearest

PRECISIONS = ("fp32", "bf16", "fp16")
LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job as the user has it today.

    Args:
        name: for tables, figures and the study.
        model: a function returning a fresh module, initialised under torch's current seed;
            or a module, whose present weights every trial then starts from (it is copied, never trained).
        train_data, eval_data: torch datasets, map-style or iterable; eval_data may be None.
        loss: ``loss(model, batch)`` -> per-example losses, shape [batch] (a scalar mean will
            do where no per-example value is needed). ``batch`` is on the model's device.
        optimizer: ``optimizer(params, lr)`` -> torch.optim.Optimizer.
        batch_size, lr, max_train_steps: where the user stands today.
        schedule: ``schedule(fraction)`` -> multiplier of the peak lr, fraction in [0, 1); None is constant.
        metrics: name -> ``f(model, batch)`` -> per-example values, shape [batch].
        loader: options of torch's DataLoader, any of ``LOADER_OPTIONS``.
        precision: fp32, or autocast to bf16, or autocast to fp16 with a gradient scaler.
        compile: whether the model goes through torch.compile.
        initial_loss: what the loss should be near before training; None infers it (``workup check``).

    Raises:
        WorkloadError: a setting of the wrong type or outside its range, by name.
    """

    name: str
    model: Callable[[], nn.Module] | nn.Module
    train_data: Any
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterable[Any], float], torch.optim.Optimizer]
    batch_size: int
    lr: float
    max_train_steps: int
    eval_data: Any = None
    schedule: Callable[[float], float] | None = None
    metrics: Mapping[str, Callable[[nn.Module, Any], Tensor]] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    compile: bool = False
    initial_loss: float | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                value = " ".join(repr(getattr(self, name)).split())
                value = value if len(value) <= 80 else f"{value[:80]} …"
                raise WorkloadError(f"Workload({name}={value}): {name} must be {what}.")

        def whole(name: str) -> None:
            value = getattr(self, name)
            fine = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
            need(fine, name, "a whole number of at least 1")
            object.__setattr__(self, name, int(value))

        def real(name: str, what: str, least: float) -> None:
            value = getattr(self, name)
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            need(number and math.isfinite(value) and float(value) > least, name, what)
            object.__setattr__(self, name, float(value))

        need(isinstance(self.name, str) and bool(self.name.strip()), "name", "a word or two")
        for name, form in (("model", ""), ("loss", "(model, batch)"), ("optimizer", "(params, lr)")):
            need(callable(getattr(self, name)), name, f"a function {form}".rstrip())
        need(self.schedule is None or callable(self.schedule), "schedule", "a function of the fraction done, or None")
        for name in ("train_data", "eval_data"):
            data = getattr(self, name)
            if data is None and name == "eval_data":
                continue
            usable = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
            need(not isinstance(data, DataLoader), name, "a torch Dataset, not its loader: give loader.dataset")
            need(usable and not isinstance(data, (Mapping, str)), name, "a torch Dataset")
            need(size(data) != 0, name, "a data set with at least one example; this one is empty")
        whole("batch_size")
        whole("max_train_steps")
        real("lr", "a positive, finite number", 0)
        need(self.precision in PRECISIONS, "precision", f"one of {', '.join(PRECISIONS)}")
        if self.initial_loss is not None:
            real("initial_loss", "a finite number, or None", -math.inf)
        measures = isinstance(self.metrics, Mapping) and all(
            isinstance(key, str) and key != "loss" and callable(measure) for key, measure in self.metrics.items()
        )
        need(measures, "metrics", "a function by name, as {'accuracy': accuracy}; the name 'loss' is taken")
        need(isinstance(self.loader, Mapping), "loader", "options by name, as {'num_workers': 4}")
        examples = size(self.train_data)
        if examples is not None and self.batch_size > examples:
            raise WorkloadError(
                f"Workload(batch_size={self.batch_size}): larger than train_data, which holds {examples} examples. "
                "Lower batch_size."
            )
        for option in self.loader:
            if option not in LOADER_OPTIONS:
                raise WorkloadError(f"Workload(loader={{'{option}': …}}): unknown. {nearest(option, LOADER_OPTIONS)}")

    def build_model(self) -> nn.Module:
        """A module to train: fresh under the current seed, or a copy of the user's own."""
        module = deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(module, nn.Module):
            raise WorkloadError(
                f"Workload(model=…) of {self.name!r} returned {type(module).__name__}, not an nn.Module."
            )
        return module


def size(data: Any) -> int | None:
    """Number of examples, or None for an iterable data set without a length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def fingerprint(workload: Workload) -> dict[str, str]:
    """What the workload is, part by part, as short hashes: equal parts train alike.

    Parts: ``settings``, ``model`` (structure and initial weights under seed 0), ``train_data`` and
    ``eval_data`` (length and some examples), ``code`` (the source of its functions and of the
    file they stand in, comments and layout aside).
    """
    rng = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        module = workload.build_model()
    finally:
        torch.set_rng_state(rng)
    weights = [(n, tuple(t.shape), str(t.dtype), _sample(t)) for n, t in module.state_dict().items()]
    functions: list[Any] = [workload.loss, workload.optimizer, workload.schedule, *workload.metrics.values()]
    if not isinstance(workload.model, nn.Module):
        functions.append(workload.model)
    settings = (workload.name, workload.batch_size, workload.lr, workload.max_train_steps)
    return {
        "settings": _hash(settings, workload.precision, workload.compile, sorted(workload.metrics)),
        "model": _hash(repr(module), weights),
        "train_data": _data_hash(workload, "train_data"),
        "eval_data": _data_hash(workload, "eval_data"),
        "code": _hash(*[_code(f) for f in functions if f is not None]),
    }


def trial_fingerprint(parts: Mapping[str, str], workload: Workload, device: str) -> str:
    """The part of a trial's id that is not in its own settings."""
    kept = [f"{key}={parts[key]}" for key in ("model", "train_data", "eval_data", "code")]
    return _hash(kept, workload.precision, workload.compile, device.split(":")[0])


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def _sample(tensor: Tensor, most: int = 4096) -> str:
    flat = tensor.detach().cpu().reshape(-1)
    part = flat[:: max(1, flat.numel() // most)].contiguous()
    return hashlib.sha256(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"").hexdigest()[:12]


def _data_hash(workload: Workload, which: str) -> str:
    data = getattr(workload, which)
    if data is None:
        return "none"
    length = size(data)
    if length is None or not hasattr(data, "__getitem__"):
        return _hash(type(data).__qualname__, length)
    picks = sorted({int(i * (length - 1) / 7) for i in range(8)})
    hashes = []
    for pick in picks:
        try:
            hashes.append(example_hash(data[pick]))
        except Exception as error:
            what = f"{which}[{pick}], of {length:,} examples by its length, cannot be read"
            raise WorkloadError(f"workload {workload.name!r}: {what} ({type(error).__name__}: {error}).") from error
    return _hash(length, hashes)


def example_hash(value: Any) -> str:
    """A hash of one example's content: tensors and arrays by their bytes, containers item by item."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:  # numpy has neither bfloat16 nor sparse layouts
            value = value.to_dense().float().numpy()
    if hasattr(value, "tobytes"):
        shape, kind = getattr(value, "shape", getattr(value, "size", "")), getattr(value, "dtype", "")
        return _hash(str(shape), str(kind), hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, Mapping):
        return _hash([(str(k), example_hash(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return _hash([example_hash(v) for v in value])
    return _hash(value if isinstance(value, (str, bytes, int, float, bool, type(None))) else type(value).__qualname__)


def _code(function: Any) -> str:
    """The syntax tree of the file a function stands in, or what names it where there is none."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        path = inspect.getsourcefile(target)
        source = Path(path).read_text() if path and Path(path).is_file() else inspect.getsource(target)
        return _hash(ast.dump(ast.parse(source)))
    except (OSError, TypeError, SyntaxError):
        return getattr(target, "__qualname__", repr(type(target)))
