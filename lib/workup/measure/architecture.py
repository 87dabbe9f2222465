"""An audit of a model's residual branches and norms, and changes that need none of its code (playbook: C8).

Both come from the autograd graph of one batch: whatever the model's code looks like, a residual sum is an
addition of which one side was computed from the other, or both from one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workup.measure import data
from workup.measure.change import changed
from workup.measure.state import preserved, seed_everything
from workup.measure.train import autocasting
from workup.workload import Workload

#: Switches that models read at each call: setting one turns Norm(x + f(x)) into x + f(Norm(x)).
SWITCHES = {
    "norm_first": True,
    "normalize_before": True,
    "pre_norm": True,
    "do_layer_norm_before": True,
    "post_norm": False,
}
#: A graph of more operations is not looked at: what lies behind each takes a bit for each.
MOST = 30_000
#: Autograd's names of norms, and of a norm written out.
NORM = re.compile(r"(Layer|Batch|Group|Rms|RMS)Norm|Rsqrt")

#: Operations that a weight goes through on its way to the one that uses it.
LAYOUT = re.compile(r"(T|Transpose|Permute|View|Reshape\w*|Expand|Slice|Select|Unsqueeze|Clone|ToCopy|Alias)Backward\d")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a model is built of, by module path, and the changes it allows (``Trial(change=…)``; "" for none).

    Args:
        layers: operations with weights of their own.
        norms: normalisations among all operations.
        branches: f of each residual sum x + f(x).
        post_norm: those whose sum passes a norm on its way to the next residual sum: Norm(x + f(x)).
        bare: the branches, where none of them has a norm, inside or after the sum.
        zero_init: sets the last layer of every branch to 0 (ReZero).
        pre_norm: turns post-norm into pre-norm.
    """

    layers: int
    norms: int
    branches: tuple[str, ...]
    post_norm: tuple[str, ...]
    bare: tuple[str, ...]
    zero_init: str = ""
    pre_norm: str = ""

    @property
    def advice(self) -> str:
        """What in the model may be the cause, in the playbook's order; "" where nothing stands out."""
        said = []
        if self.layers > 3 and not self.branches:
            said.append(f"no residual connection around any of its {self.layers} layers")
        if self.post_norm:
            said.append(f"norms after the residual sum of {_listed(self.post_norm)} (put them before the branch)")
        if self.bare:
            said.append(f"no normalisation in the residual branch of {_listed(self.bare)}")
        elif self.layers > 3 and not self.norms:
            said.append("no normalisation at all")
        return "; ".join(said)


def audit(workload: Workload, *, device: str = "cpu", seed: int = 0) -> Audit:
    """Look at the graph of one batch under ``seed``; trains nothing."""
    found = _graph(workload, "", device, seed)
    with preserved():
        modules = dict(workload.build_model().named_modules())
    pre_norm = " ".join(
        f"{path}{'.' * bool(path)}{name}={value}"
        for path, module in modules.items()
        for name, value in SWITCHES.items()
        if found.post_norm and getattr(module, name, value) is (not value)
    )
    if pre_norm and _graph(workload, pre_norm, device, seed).post_norm:
        pre_norm = ""  # the switch is there, but is read only when the model is built
    return Audit(
        layers=sum(bool(own) and not _norm(node) for node, own in found.own.items()),
        norms=sum(bool(NORM.search(node.name())) for node in found.nodes),
        branches=tuple(dict.fromkeys(found.path(k) for k in range(len(found.sums)))),
        post_norm=found.post_norm,
        bare=found.bare,
        zero_init=found.zero_init,
        pre_norm=pre_norm,
    )


def _graph(workload: Workload, change: str, device: str, seed: int) -> "Graph":
    with preserved():
        seed_everything(seed)
        model = changed(workload.build_model(), change).to(device).train()
        batch = next(data.batches(workload, workload.batch_size, seed=seed, device=device))
        with autocasting(workload.precision, device):
            loss = workload.loss(model, batch).mean()
        return Graph(loss, {id(p): name for name, p in model.named_parameters()})


class Graph:
    """The operations behind ``loss``, and the residual sums among them."""

    def __init__(self, loss: torch.Tensor, names: dict[int, str]) -> None:
        self.nodes = list(_ordered(loss.grad_fn))
        if len(self.nodes) > MOST:
            self.nodes = []
        self.own: dict[Any, list[str]] = {}
        #: Which operations on activations each one was computed from, itself included: a bit each.
        self.behind: dict[Any, int] = {}
        weights: dict[Any, list[str]] = {}
        for bit, node in enumerate(self.nodes):
            below = _inputs(node)
            if hasattr(node, "variable"):
                weights[node] = [names.get(id(node.variable), "")]
            elif LAYOUT.match(node.name()) and below and below[0] in weights:
                weights[node] = weights[below[0]]
            else:
                self.own[node] = [name for n in below for name in weights.get(n, ()) if name]
                self.behind[node] = 1 << bit
                for n in below:
                    self.behind[node] |= self.behind.get(n, 0)
        self.bit = {node: 1 << bit for bit, node in enumerate(self.nodes)}
        self.sums = [found for node in self.nodes if (found := self._residual(node))]

    def before(self, node: Any) -> list[Any]:
        """The activations an operation takes, without its weights."""
        return [n for n in _inputs(node) if n in self.behind]

    def _residual(self, node: Any) -> tuple[Any, Any, int] | None:
        """(sum, last operation of the branch, what lies behind the shortcut), if ``node`` is a residual sum."""
        sides = self.before(node) if node.name() == "AddBackward0" else []
        if len(sides) != 2 or len(node._input_metadata[0].shape) < 2:
            return None
        hits = [self._meets(sides[0], sides[1]), self._meets(sides[1], sides[0])]
        counts = [hit[1] if hit else None for hit in hits]
        if counts == [None, None]:
            return None
        if None in counts:
            alone = 0 if counts[1] is None else 1
            short = alone if counts[alone] == 0 else 1 - alone
        else:
            short = 0 if counts[0] <= counts[1] else 1  # type: ignore[operator]
        branch, met = sides[1 - short], hits[short] or hits[1 - short]
        behind = self.behind[met[0]]  # type: ignore[index]
        return (node, branch, behind) if any(self.own[n] for n in self._region(branch, behind)) else None

    def _meets(self, side: Any, other: Any) -> tuple[Any, int] | None:
        """Where a chain of operations down from ``side`` meets what ``other`` came from; layers passed on the way."""
        layers = 0
        while not self.bit[side] & self.behind[other]:
            layers += bool(self.own[side])
            below = self.before(side)
            if len(below) != 1:
                return None
            side = below[0]
        return side, layers

    def _region(self, branch: Any, behind: int) -> list[Any]:
        """The operations of a branch, from the sum backwards; nearest first."""
        found = dict.fromkeys([branch] if not self.bit[branch] & behind else [])
        queue = list(found)
        for node in queue:
            new = [n for n in self.before(node) if n not in found and not self.bit[n] & behind]
            found |= dict.fromkeys(new)
            queue += new
        return queue

    @cached_property
    def regions(self) -> list[list[Any]]:
        return [self._region(branch, behind) for _, branch, behind in self.sums]

    def path(self, k: int) -> str:
        """The module that holds the weights of the k-th branch."""
        parts = [name.split(".")[:-1] for node in self.regions[k] for name in self.own[node]]
        shared = [level[0] for level in zip(*parts, strict=False) if len(set(level)) == 1]
        return ".".join(shared) or "the model"

    @property
    def post_norm(self) -> tuple[str, ...]:
        sums, found = {node: k for k, (node, *_) in enumerate(self.sums)}, []
        for node, *_ in self.sums:
            for side in self.before(node):
                normed = False
                # Nothing but norms and operations without weights lies between two sums along the shortcut.
                while side not in sums and len(self.before(side)) == 1 and (not self.own[side] or _norm(side)):
                    normed, side = normed or _norm(side), self.before(side)[0]
                if normed and side in sums:
                    found.append(self.path(sums[side]))
        return tuple(dict.fromkeys(found))

    @property
    def bare(self) -> tuple[str, ...]:
        # Branches that share one norm, or have it after the sum, show it in some of them only.
        if self.post_norm or any(_norm(node) for region in self.regions for node in region):
            return ()
        return tuple(dict.fromkeys(map(self.path, range(len(self.sums)))))

    @property
    def zero_init(self) -> str:
        last = [next(self.own[node] for node in region if self.own[node]) for region in self.regions]
        # A weight that is computed, as under weight norm, is no parameter that could be set.
        fine = ({"weight"}, {"weight", "bias"}, {"gamma"})
        if not all({name.rpartition(".")[2] for name in own} in fine for own in last):
            return ""
        return " ".join(f"{name}=0" for name in dict.fromkeys(name for own in last for name in own))


def _norm(node: Any) -> bool:
    return bool(NORM.search(node.name()))


def _inputs(node: Any) -> list[Any]:
    return [n for n, _ in node.next_functions if n is not None]


def _ordered(last: Any) -> Iterator[Any]:
    """Every operation after those it takes its inputs from."""
    stack, seen = [(last, False)], set()
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n in _inputs(node)]


def _listed(paths: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")
