"""Where the user's step makes the host wait for the device, by file and line (playbook: F1)."""

import dataclasses
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from workup.measure import data, devices
from workup.measure.state import preserved
from workup.measure.steps import stepper
from workup.workload import Workload

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parent}/"
#: Calls that bring a tensor's values to the host. On a CPU nothing below them tells.
CALLS = {"cpu", "numpy", "__array__", "tolist", "__repr__", "__str__", "__format__"}
#: Operators whose result or its shape the host has to know.
OPERATORS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive"}
OPERATORS |= {"masked_select", "equal", "allclose", "bincount"}

Place = tuple[str, int, str]


def find_syncs(
    workload: Workload, *, batch_size: int, device: str = "cpu", seed: int = 0, steps: int = 3
) -> pd.DataFrame:
    """The lines of the user's step at which the host waits for the device.

    Where torch warns of waits itself, its warnings are located. Elsewhere the calls and operators that would
    wait on an accelerator are, so that a step can be checked before it meets one.

    Returns:
        One row a line: file, line, function, code, per_step (waits at each step); may be empty.
    """
    tells = devices.tells_syncs(device)
    with preserved():
        step = stepper(dataclasses.replace(workload, compile=False), device=device, seed=seed)
        batches = data.batches(workload, batch_size, seed=seed, device=device)
        step(next(batches))  # the first step allocates and may wait once
        places: Counter[Place] = Counter()
        for _ in range(steps):
            batch = next(batches)
            with devices.syncs(lambda: places.update(user_place())) if tells else watched(places.update):
                step(batch)
        batches.close()  # type: ignore[attr-defined]
    rows = [(*place, linecache.getline(place[0], place[1]).strip(), n / steps) for place, n in places.most_common()]
    return pd.DataFrame(rows, columns=["file", "line", "function", "code", "per_step"])


@contextmanager
def watched(found: Callable[[list[Place]], Any], touched: set[int] | None = None) -> Iterator[None]:
    """Calls that would synchronise, as places; and the storages of every tensor used, by address."""
    inside = 0  # recorded or excused calls under way: what runs below them is part of them

    def look(args: Any, *, waits: bool, uses: bool = True) -> None:
        if touched is not None and uses:
            touched.update(address(t) for t in tree_iter(args) if isinstance(t, Tensor))
        if waits and not inside:
            found(user_place())

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal inside
            name, kwargs = getattr(func, "__name__", ""), kwargs or {}
            look(args, waits=name in CALLS, uses=name in CALLS and name != "cpu")
            # On a CPU one_hot checks its classes by value; with their number given no accelerator waits.
            part = name in CALLS or (name == "one_hot" and (len(args) > 1 or "num_classes" in kwargs))
            inside += part
            try:
                return func(*args, **kwargs)
            finally:
                inside -= part

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, kwargs = func.overloadpacket.__name__, kwargs or {}
            index = tree_iter(args[1:2]) if name.startswith("index") else ()
            masks = any(getattr(part, "dtype", None) == torch.bool for part in index)
            grows = name == "repeat_interleave" and kwargs.get("output_size") is None
            look((args, kwargs), waits=name in OPERATORS or masks or grows)
            return func(*args, **kwargs)

    with Calls(), Operators():
        yield


def address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none of its own (sparse)."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def user_place() -> list[Place]:
    """The innermost frame outside torch and Workup's measuring, in a list; empty where torch acts on its own."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((f"{TORCH}optim/", f"{OURS}steps.py")):
            return []
        if not file.startswith((TORCH, OURS, "<frozen", "<eval_with_key")) and not file.endswith("/warnings.py"):
            return [(file, frame.f_lineno, frame.f_code.co_qualname)]
        frame = frame.f_back  # type: ignore[assignment]
    return []
