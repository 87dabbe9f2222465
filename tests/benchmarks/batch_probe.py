"""Attempts and error against the true limit: Workup, Lightning's tuner and accelerate under one real memory limit.

    python -m venv peers && peers/bin/pip install torch==2.13.0 lightning==2.6.6 accelerate==1.15.0
    peers/bin/pip install -e .
    peers/bin/python tests/benchmarks/batch_probe.py [workload ...] [glibc]

Every probe may grow by the same number of bytes over what its process holds after one warm-up step
(RLIMIT_DATA: allocations fail for real). The truth is bisected to 0.5%, each attempt in a fresh process.
A peer that is not installed is left out. A prediction without running, from fake tensors and torch's memory
tracker, stands beside them.

Blocks from 128 KiB on are mapped one by one, in every child alike, so that memory grows with the size and
there is one true limit. With ``glibc`` among the arguments the allocator is left as it is: it keeps freed
blocks under 32 MiB in its heap, where they fragment by tens of MiB, so that a size may fit though a smaller
one does not; the truth is then no more than the first size that did not fit.
"""

import copy
import dataclasses
import os
import sys
from multiprocessing import get_context

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from workup import load
from workup.measure import memory
from workup.measure.memory import Limit
from workup.measure.probe import Prober, search

MIB = 2**20
#: Workload -> bytes a probe may grow by.
ROOM = {"deep_mlp": 120 * MIB, "resnet": 160 * MIB, "transformer": 260 * MIB}
FIRST = {"deep_mlp": 32, "resnet": 64, "transformer": 16}


def deep_mlp():
    base = load("digits-mlp")
    hidden = [layer for _ in range(11) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))
    return dataclasses.replace(tiled(base), model=model)


def resnet():
    return tiled(load("digits-resnet"))


def transformer():
    return load("text-transformer")


def tiled(workload, times=12):
    """The same data many times over, so that memory and not the data set is the limit."""
    data = TensorDataset(*(t.repeat(times, *[1] * (t.dim() - 1)) for t in workload.train_data.tensors))
    return dataclasses.replace(workload, train_data=data, eval_data=None)


def held(reference, pipe):
    """Bytes a child holds after a warm-up step."""
    memory.attempt(load(reference), 1, limit=Limit(2**40, "none"))
    memory._settle("cpu")
    pipe.send(psutil.Process().memory_info().rss)


def steps(workload, size, count):
    """Three plain steps at one size, as a user's own loop would take them."""
    model = workload.build_model()
    optimizer = workload.optimizer(model.parameters(), workload.lr)
    for _, batch in zip(range(count), DataLoader(workload.train_data, size, shuffle=True), strict=False):
        workload.loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def lightning_tuner(workload, first, mode):
    import lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batch_size, self.sizes = workload.build_model(), first, []

        def train_dataloader(self):
            self.sizes.append(self.batch_size)
            return DataLoader(workload.train_data, self.batch_size, shuffle=True)

        def training_step(self, batch, _):
            return workload.loss(self.model, batch).mean()

        def configure_optimizers(self):
            return workload.optimizer(self.parameters(), workload.lr)

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    found = Tuner(trainer).scale_batch_size(module, mode=mode, init_val=first)
    return found, len(module.sizes), found in module.sizes


def accelerate_finder(workload, first, _):
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=len(workload.train_data))
    def run(batch_size):
        tried.append(batch_size)
        steps(workload, batch_size, 3)
        return batch_size

    return run(), len(tried), True


PEERS = {
    "Lightning power": (lightning_tuner, "power"),
    "Lightning binsearch": (lightning_tuner, "binsearch"),
    "accelerate (from the data set down)": (accelerate_finder, None),
}


def peer(name, reference, first, room, pipe):
    """One peer's search in this process, held to ``room`` more bytes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)  # Lightning speaks of every attempt
    try:
        workload = load(reference)
        function, mode = PEERS[name]
        memory.attempt(workload, 1, limit=Limit(2**40, "none"))
        __import__("lightning" if mode else "accelerate")
        memory._settle("cpu")
        with memory._limited(psutil.Process().memory_info().rss + room, "cpu"):
            pipe.send(function(workload, first, mode))
    except ImportError:
        pipe.send(None)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}"[:90])


def foreseen(reference, room, most):
    """The size at which the tensors of two steps, on a device that allocates nothing, take ``room`` at their peak."""
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._pytree import tree_map_only

    workload = load(reference)
    first = next(iter(DataLoader(workload.train_data, 1)))
    held = workload.build_model().to("meta")

    def peak(size):
        with MemTracker() as tracker:
            model = copy.deepcopy(held)
            optimizer = workload.optimizer(model.parameters(), workload.lr)
            tracker.track_external(model, optimizer)
            batch = tree_map_only(torch.Tensor, lambda t: t.new_empty((size, *t.shape[1:]), device="meta"), first)
            for _ in range(2):
                tracker.reset_mod_stats()
                workload.loss(model, batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())

    low, high, least = 1, most + 1, peak(1)  # the room is what is left beyond a step of one example
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) - least <= room else (low, middle)
    return low


def in_child(function, *args):
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=function, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return f"the process died (exit code {process.exitcode})"
    finally:
        process.join()


def fresh(reference, limit):
    def tried_at(size):
        with Prober(reference, limit=limit) as prober:
            return prober.attempt(size)

    return tried_at


def compare(name):
    reference, room, first = f"{__file__}:{name}", ROOM[name], FIRST[name]
    limit = Limit(in_child(held, reference) + room, "benchmark")
    most = len(load(reference).train_data)
    with Prober(reference, limit=limit) as prober:
        tried = list(search(prober.attempt, first=first, most=most, limit_bytes=limit.bytes))
    ours = max(one.batch_size for one in tried if one.fits)
    start = {"first": ours, "most": most, "limit_bytes": limit.bytes}
    exact = list(search(fresh(reference, limit), **start, within=0.005, tries=14))
    truth = max([one.batch_size for one in exact if one.fits], default=ours)
    print(f"\n{name}: the true limit is {truth} (of {most} examples, room {room // MIB} MiB)", flush=True)
    again = sum(fresh(reference, limit)(ours).fits for _ in range(3))
    holds = f"  holds in {again} of 3 new processes"
    print(f"  {'Workup':38}{ours:>7}  {ours / truth - 1:+7.1%}  {len(tried):3} attempts{holds}", flush=True)
    try:
        fake = foreseen(reference, room, most)
        print(
            f"  {'predicted on fake tensors':38}{fake:>7}  {fake / truth - 1:+7.1%}    0 attempts  never tried",
            flush=True,
        )
    except Exception as error:
        print(f"  {'predicted on fake tensors':38}{type(error).__name__}: {error}"[:120], flush=True)
    for other in PEERS:
        result = in_child(peer, other, reference, first, room)
        if isinstance(result, tuple):
            size, attempts, was_tried = result
            note = "" if was_tried else "  never tried"
            print(f"  {other:38}{size:>7}  {size / truth - 1:+7.1%}  {attempts:3} attempts{note}")
        else:
            print(f"  {other:38}{result or 'not installed'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = [name for name in sys.argv[1:] if name != "glibc"]
    if "glibc" not in sys.argv:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
    for name in asked or ROOM:
        compare(name)
