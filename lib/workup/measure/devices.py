"""The door to the device: whatever depends on the accelerator is asked here, and in no other file.

Built on ``torch.accelerator``. What only some have is answered here for the others too:

=========================  ====  ====  ====================================================
\\                          CUDA  XPU   MPS
=========================  ====  ====  ====================================================
times of steps by events   yes   yes   yes
a real memory limit        yes   yes   yes
peak memory                yes   yes   no; what the driver holds now, its cache included
allocation retries         yes   yes   no
synchronisations, told     yes   no    no; calls and operators that would wait are looked for
one process an accelerator yes   yes   there is only one
=========================  ====  ====  ====================================================
"""

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import workup
from workup.errors import DeviceError

KINDS = ("cuda", "xpu", "mps")
#: What names the accelerators that a process sees, in its environment.
PINS = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
#: How much of its recommended memory torch lets an MPS process use when nobody sets another share.
MPS_SHARE = 1.7


def resolve(device: str) -> str:
    """The device to use: ``auto`` takes the accelerator that torch sees, else the CPU.

    Returns:
        ``cpu``, ``mps``, or ``cuda:0``, ``xpu:0``, … with its number.

    Raises:
        DeviceError: a name torch does not know, or a device this machine does not have.
    """
    if device == "auto":
        found = _accelerator()
        device = found if found in KINDS else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(f"device {device!r} is unknown. Use auto, cpu, cuda:0 or mps.") from None
    index = parsed.index or 0
    if parsed.type == "cpu" and not index:
        return "cpu"
    if parsed.type not in KINDS:
        raise DeviceError(f"device {device!r} is not one Workup measures on. Use auto, cpu, cuda:0 or mps.")
    count = torch.get_device_module(parsed.type).device_count()
    if index >= count:
        what = f"{count} {parsed.type.upper()} devices"
        raise DeviceError(f"device {device!r}: this machine shows torch {what}. Use auto or cpu.")
    return "mps" if parsed.type == "mps" else f"{parsed.type}:{index}"


def kind(device: str) -> str:
    """``cpu``, ``cuda``, ``xpu`` or ``mps``."""
    return torch.device(device).type


def queues(device: str) -> bool:
    """Whether work is queued there and done later, while the host goes on: on every accelerator."""
    return kind(device) != "cpu"


def numbered(device: str) -> bool:
    """Whether it is one of several accelerators (CUDA, XPU): with memory of its own, whose peaks torch keeps."""
    return kind(device) in PINS


def name(device: str) -> str:
    """The device's own name, for reports."""
    if numbered(device):
        return torch.get_device_module(device).get_device_name(device)
    return device if queues(device) else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"workup": workup.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _accelerator() -> str | None:
    """The kind of accelerator that torch was built for and sees here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


# -- time ---------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    """Wait for the device's queued work; nothing to wait for on a CPU."""
    if queues(device):
        torch.accelerator.synchronize(device)


def timestamp(device: str) -> torch.Event:
    """An event in the device's own queue. Between two, once waited for, lie ``a.elapsed_time(b)`` milliseconds."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # or it goes to the queue of another, current, device
    return event


def profiled(device: str) -> list[ProfilerActivity]:
    """What the profiler can watch of work on ``device``."""
    return [a for a in torch.profiler.supported_activities() if a.name.lower() in ("cpu", kind(device))]


# -- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Memory of this process on an accelerator, the most since :func:`reset_usage`.

    Args:
        reserved_bytes: what the allocator took from the device.
        allocated_bytes: what tensors took of that; 0 on MPS, which keeps no peak.
        retries: how often the allocator freed its cache because a request did not fit.
    """

    reserved_bytes: int
    allocated_bytes: int
    retries: int


def usage(device: str) -> Usage:
    """Memory since :func:`reset_usage`; on MPS what is held now, its cache included."""
    if not numbered(device):
        return Usage(torch.mps.driver_allocated_memory(), 0, 0)
    stats = torch.accelerator.memory_stats(device)
    reserved, allocated = (int(stats.get(f"{what}_bytes.all.peak", 0)) for what in ("reserved", "allocated"))
    return Usage(reserved, allocated, int(stats.get("num_alloc_retries", 0)))


def reset_usage(device: str) -> None:
    """Count peaks and retries from here on."""
    if numbered(device):
        torch.accelerator.reset_peak_memory_stats(device)
        torch.accelerator.reset_accumulated_memory_stats(device)


def release(device: str) -> None:
    """Give cached memory back to the device; a CPU's allocator keeps none."""
    if kind(device) == "mps":
        torch.mps.empty_cache()
    elif queues(device):
        torch.accelerator.empty_cache()


def free_bytes(device: str) -> int:
    """What is free on the accelerator now, for every process."""
    if kind(device) == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return torch.get_device_module(device).mem_get_info(device)[0]


@contextlib.contextmanager
def limited(device: str, limit_bytes: int) -> Iterator[None]:
    """Hold this process to so much of the accelerator's memory: an allocation past it fails."""
    if kind(device) == "mps":
        torch.mps.set_per_process_memory_fraction(min(MPS_SHARE, limit_bytes / torch.mps.recommended_max_memory()))
    else:
        module = torch.get_device_module(device)
        module.set_per_process_memory_fraction(min(1.0, limit_bytes / module.mem_get_info(device)[1]), device)
    try:
        yield
    finally:
        if kind(device) == "mps":
            torch.mps.set_per_process_memory_fraction(MPS_SHARE)
        else:
            module.set_per_process_memory_fraction(1.0, device)


# -- random streams -----------------------------------------------------------------------------


def random_streams() -> Callable[[], None]:
    """Remember the random streams of all accelerators; calling what is returned puts them back.

    None is started for that. One that starts meanwhile is left as its first use would have found it: seeded as the CPU.
    """
    found = _accelerator()
    if found not in KINDS:
        return lambda: None
    module: Any = torch.get_device_module(found)
    started = getattr(module, "is_initialized", lambda: True)
    each = [f"{found}:{index}" for index in range(module.device_count())]
    kept = [module.get_rng_state(one) for one in each] if started() else []

    def restore() -> None:
        for one, state in zip(each, kept, strict=False):
            module.set_rng_state(state, one)
        if started() and not kept:
            module.manual_seed_all(torch.initial_seed())

    return restore


@contextlib.contextmanager
def forked_random(device: str, *, seed: int | None = None) -> Iterator[None]:
    """Torch's random streams, on the CPU and on ``device``, are afterwards as before; inside they start at ``seed``."""
    module: Any = torch.get_device_module(device)
    with torch.random.fork_rng(devices=[]):
        kept = module.get_rng_state(device) if queues(device) else None
        try:
            if seed is not None:
                torch.random.default_generator.manual_seed(seed)
            if seed is not None and queues(device):
                with torch.accelerator.device_index(torch.device(device).index):
                    module.manual_seed(seed)
            yield
        finally:
            if kept is not None:
                module.set_rng_state(kept, device)


# -- synchronisations ---------------------------------------------------------------------------


def tells_syncs(device: str) -> bool:
    """Whether torch itself can warn where the host waits for the device."""
    return kind(device) == "cuda"


@contextlib.contextmanager
def syncs(found: Callable[[], Any]) -> Iterator[None]:
    """Call ``found`` at each wait for the device inside, below the line that waits; where :func:`tells_syncs`."""

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found()

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


# -- processes ----------------------------------------------------------------------------------


def pins() -> list[dict[str, str]]:
    """For each accelerator that this process sees, the environment in which a process sees it alone."""
    found = _accelerator()
    one = found if found in PINS else "cuda"
    count = torch.get_device_module(one).device_count()
    named = [part.strip() for part in os.environ.get(PINS[one], "").split(",") if part.strip()]
    return [{PINS[one]: pin} for pin in (named[:count] if named else map(str, range(count)))]


def hidden() -> dict[str, str]:
    """The environment in which a process sees no accelerator that can be hidden."""
    return {PINS["cuda"]: ""}


def alone(device: str) -> str:
    """The name of an accelerator for a process that sees it alone."""
    return f"{kind(device)}:0" if numbered(device) else device


def places(device: str) -> list[tuple[str, dict[str, str]]]:
    """Where processes side by side may train, each a device and an environment.

    Each accelerator as a process's only one; the one there is, where they cannot be told apart; or the CPU, once a core
    that this process may use.
    """
    if numbered(device):
        return [(alone(device), pin) for pin in pins()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [(device, {})] * (1 if queues(device) else cores)
