"""An accelerator carried out on the CPU, with its own memory, which runs out, and its own events and waits.

Two modes carry every call: ``device="cuda:0"`` becomes the CPU, and the storages made that way, or computed from such,
are *held*: their bytes are counted, they name ``cuda:0`` as their device, cannot meet tensors of the CPU in one
operator, and the host is seen to wait where it asks for their values. What torch would ask of the hardware
(``torch.accelerator``, ``torch.cuda``) is answered here. Arithmetic, and so every result, is the CPU's.

Not emulated: work that is done later, kernels' own limits and speed, a second stream, workspaces of libraries.
"""

import contextlib
import inspect
import os
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

#: Operators whose result the host has to know.
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}
#: Calls that read values on a CPU alone, to check them.
CHECKED = {"quantile", "nanquantile", "one_hot"}
#: Operators that take tensors of both sides.
CROSSING = {"copy_", "_foreach_copy_", "index", "index_put", "index_put_"}
BLOCK = 512


def storage(tensor):
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


class Chip:
    """The accelerator: its memory and allocator, and how often it was waited for."""

    def __init__(self, kind, total, count):
        self.kind, self.total, self.count, self.limit = kind, total, count, total
        self.live, self.cache = {}, Counter()  # bytes by storage; freed blocks by size, ready to be used again
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = self.retries = self.ooms = 0
        self.creating, self.checking, self.sync_mode = None, False, 0
        self.synchronizations = self.waits = self.events = 0
        self.reached = 0.0

    # memory: blocks are used again only for the same size, as far as an allocator fragments at all

    def holds(self, tensor):
        return id(storage(tensor)) in self.live

    def hold(self, tensor):
        bytes_ = storage(tensor)
        if bytes_ is None or id(bytes_) in self.live:
            return
        size = -(-bytes_.nbytes() // BLOCK) * BLOCK
        self.allocate(size)
        key = id(bytes_)
        self.live[key] = (weakref.ref(bytes_, lambda _: self.free(key)), size)

    def allocate(self, size):
        if self.cache[size]:
            self.cache[size] -= 1
        else:
            if self.reserved + size > self.limit and self.reserved > self.allocated:
                self.retries += 1
                self.empty_cache()
            if self.reserved + size > self.limit:
                self.ooms += 1
                free = (self.limit - self.reserved) / 2**20
                raise torch.OutOfMemoryError(
                    f"{self.kind.upper()} out of memory. Tried to allocate {size / 2**20:.2f} MiB. "
                    f"GPU 0 has a total capacity of {self.total / 2**20:.2f} MiB of which {free:.2f} MiB is free."
                )
            self.reserved += size
        self.allocated += size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def free(self, key):
        size = self.live.pop(key)[1]
        self.allocated -= size
        self.cache[size] += 1

    def empty_cache(self):
        self.cache.clear()
        self.reserved = self.allocated

    def memory_stats(self, device=None):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.allocated_peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved_peak,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }

    def reset_peaks(self, device=None):
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def reset_counts(self, device=None):
        self.retries = self.ooms = 0

    def set_fraction(self, fraction, device=None):
        self.limit = int(fraction * self.total)

    # waits

    def wait(self):
        if self.checking:
            return
        self.waits += 1
        if self.sync_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def synchronize(self, device=None):
        self.synchronizations += 1
        self.reached = time.perf_counter()

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode

    # devices

    @contextlib.contextmanager
    def making(self, held):
        before, self.creating = self.creating, held
        try:
            yield
        finally:
            self.creating = before

    def is_own(self, device):
        if isinstance(device, Tensor):
            return self.holds(device)
        if isinstance(device, int):
            return True
        return torch.device(device).type == self.kind

    def moved(self, tensor, held, *args, dtype=None, non_blocking=False, copy=False, **_):
        dtype = next((each for each in args if isinstance(each, torch.dtype)), dtype)
        waits = not held and self.holds(tensor) and not non_blocking
        with self.making(held):
            changed = tensor if dtype is None else tensor.to(dtype)
            if self.holds(changed) != held or (copy and changed is tensor):
                changed = changed.clone()
        if waits:
            self.wait()
        return changed


class Event:
    chip = None

    def __init__(self, device=None, *, enable_timing=False, **_):
        self.timed, self.at = enable_timing, None

    def record(self, stream=None):
        self.at = time.perf_counter()
        self.chip.events += 1

    def elapsed_time(self, later):
        if not (self.timed and later.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.chip.reached < later.at:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000 * (later.at - self.at)


class Calls(TorchFunctionMode):
    """Python's calls: where tensors are said to be, and where they shall go."""

    def __init__(self, chip):
        super().__init__()
        self.chip = chip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        chip, kwargs = self.chip, dict(kwargs or {})
        name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__" and (of is Tensor.device or of is Tensor.is_cuda):
            held = chip.holds(own)
            return (torch.device(chip.kind, 0) if held else func(own)) if of is Tensor.device else held
        if own is not None and name in ("to", "cuda", "cpu"):
            wanted, rest = ({"cuda": 0, "cpu": "cpu"}.get(name), list(args[1:]))
            if name == "to":
                wanted = kwargs.pop("device", None)
                if rest and isinstance(rest[0], (str, torch.device, int, Tensor)) and not isinstance(rest[0], bool):
                    wanted = rest.pop(0)
                    if isinstance(wanted, Tensor):
                        rest = [wanted.dtype, *rest]
            held = chip.holds(own) if wanted is None else chip.is_own(wanted)
            return chip.moved(own, held, *rest, **kwargs)
        if name == "pin_memory":
            return own
        if own is not None and name in ("numpy", "__array__", "tolist", "__deepcopy__") and chip.holds(own):
            if name in ("numpy", "__array__"):
                raise TypeError(f"can't convert {chip.kind}:0 device type tensor to numpy. Use Tensor.cpu() first.")
            if name == "tolist":
                chip.wait()
                return func(*args, **kwargs)
            copied = func(*args, **kwargs)
            chip.hold(copied)
            return copied
        if name in CHECKED and (name != "one_hot" or len(args) > 1 or "num_classes" in kwargs):
            chip.checking = True
            try:
                return func(*args, **kwargs)
            finally:
                chip.checking = False
        if kwargs.get("device") is not None:
            held = chip.is_own(kwargs["device"])
            with chip.making(held):
                return func(*args, **{**kwargs, "device": "cpu"})
        return func(*args, **kwargs)


class Operators(TorchDispatchMode):
    """Every operator, of the backward pass too: what it makes is held where its inputs are."""

    def __init__(self, chip):
        super().__init__()
        self.chip = chip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        chip, kwargs, name = self.chip, kwargs or {}, func.overloadpacket.__name__
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        here = [chip.holds(t) for t in given]
        held = any(here)
        elsewhere = any(t.dim() for t, is_here in zip(given, here, strict=True) if not is_here)
        if held and elsewhere and chip.creating is None and name not in CROSSING:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{chip.kind}:0 and cpu! (when checking arguments of {name})"
            )
        masks = name.startswith("index") and any(t.dtype == torch.bool for t in tree_iter(args[1:2]) if t is not None)
        if held and chip.creating is None and (name in WAITS or masks or (name == "copy_" and here == [False, True])):
            chip.wait()
        made = func(*args, **kwargs)
        if chip.creating or (held and chip.creating is None):
            old = set() if chip.creating else {id(storage(t)) for t in given}
            for tensor in tree_iter(made):
                if isinstance(tensor, Tensor) and id(storage(tensor)) not in old:
                    chip.hold(tensor)
        return made


# Frames of these stand for torch's own, below the user's line.
for kind in (Chip, Calls, Operators):
    for method in vars(kind).values():
        if callable(method):
            method = inspect.unwrap(method)
            file = str(Path(torch.__file__).with_name("_emulated.py"))
            method.__code__ = method.__code__.replace(co_filename=file)


def replaced(chip):
    """What is answered in the hardware's stead: (where, name, answer)."""
    module, generator = torch.get_device_module(chip.kind), torch.random.default_generator
    yield torch, "Event", type("Event", (Event,), {"chip": chip})
    yield torch.utils.data._utils.pin_memory, "pin_memory", lambda data, device=None: data
    grouped = torch._C._group_tensors_by_device_and_dtype  # asks each storage, below every mode

    def by_device(lists, with_indices=False):
        groups = grouped(lists, with_indices).items()
        return {(next(t for t in group[0][0] if t is not None).device, dtype): group for (_, dtype), group in groups}

    yield torch._C, "_group_tensors_by_device_and_dtype", by_device
    for name, answer in {
        "current_accelerator": lambda check_available=False: torch.device(chip.kind),
        "is_available": lambda: True,
        "device_count": lambda: chip.count,
        "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
        "device_index": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: None,
        "synchronize": chip.synchronize,
        "empty_cache": chip.empty_cache,
        "memory_stats": chip.memory_stats,
        "reset_peak_memory_stats": chip.reset_peaks,
        "reset_accumulated_memory_stats": chip.reset_counts,
    }.items():
        yield torch.accelerator, name, answer
    for name, answer in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: chip.count,
        "get_device_name": lambda device=None: f"emulated {chip.kind.upper()}",
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "mem_get_info": lambda device=None: (chip.total - chip.reserved, chip.total),
        "set_per_process_memory_fraction": chip.set_fraction,
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "get_sync_debug_mode": lambda: chip.sync_mode,
        "set_sync_debug_mode": chip.set_sync_debug_mode,
        # Metal's: one accelerator, whose memory is the machine's, and no peaks
        "driver_allocated_memory": lambda: chip.reserved,
        "current_allocated_memory": lambda: chip.allocated,
        "recommended_max_memory": lambda: chip.total,
        "empty_cache": chip.empty_cache,
    }.items():
        if hasattr(module, name):
            yield module, name, answer


@contextlib.contextmanager
def emulated(kind="cuda", *, total=2**30, count=1):
    """Inside, torch has an accelerator of ``total`` bytes, and so have the processes that are started."""
    chip = Chip(kind, total, count)
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"EMULATED_ACCELERATOR": f"{kind} {total} {count}", "PYTHONPATH": os.pathsep.join(paths)}
    with contextlib.ExitStack() as stack:
        for where, name, answer in list(replaced(chip)):
            stack.enter_context(mock.patch.object(where, name, answer))
        if os.environ.get("EMULATED_ACCELERATOR") != environment["EMULATED_ACCELERATOR"]:
            stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(Operators(chip))
        stack.enter_context(Calls(chip))
        yield chip
