"""A stack of trials: one vectorised forward and backward pass trains them all by a step.

The trials' parameters are rows of the stack; ``torch.func`` runs the user's model and loss over
the rows, the user's optimizer updates them. Rows never mix: a trial that diverges leaves, and
the others are as they would be without it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten, tree_unflatten

from workup.errors import WorkupError
from workup.measure import data
from workup.measure.change import changed
from workup.measure.optimizers import builder
from workup.measure.state import seed_everything
from workup.measure.train import Recorder, evaluate, evaluation_sample, mean
from workup.trace import Trace, Trial
from workup.workload import Workload

#: Update rules without a link between a tensor's elements, and linear in lr: one step at lr 1 over the whole
#: stack, times each trial's lr, is each trial's own step.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adadelta
)  # fmt: skip


class Unfit(WorkupError):
    """These trials cannot train as one stack; the message says why."""


@dataclasses.dataclass(eq=False)
class Member:
    """One trial of a stack."""

    index: int
    recorder: Recorder
    model: nn.Module
    optimizer: optim.Optimizer

    def __post_init__(self) -> None:
        self.trial, groups = self.recorder.trial, self.optimizer.param_groups
        self.named = {f"model.{name}": p for name, p in self.model.named_parameters()}
        self.shares = [group["lr"] / self.trial.lr for group in groups]
        self.options = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]


class Shell(nn.Module):
    """Lets a function of a model run with other parameters in it; returns the buffers it leaves behind too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable, *args: Any) -> Any:
        return function(self.model, *args), {f"model.{name}": b for name, b in self.model.named_buffers()}


class Stack:
    """The trials' parameters, one row a trial: a leaf [trials, numbers] for each of the optimizer's groups."""

    def __init__(self, workload: Workload, trials: Sequence[Trial], device: str) -> None:
        if any(trial.clip_percentile or trial.clip_from for trial in trials):
            raise Unfit("an adaptive threshold, or one that sets in later, is clipped by the plain loop")
        self.workload, self.device, self.steps = workload, device, max(trial.steps for trial in trials)
        self.members = [self._member(index, trial) for index, trial in enumerate(trials)]
        first, self.crowd = self.members[0], np.ones(self.steps)
        self.shell = Shell(first.model)
        names = {id(p): name for name, p in first.named.items()}
        trained = [[p for p in group["params"] if p.requires_grad] for group in first.optimizer.param_groups]
        if any(id(p) not in names or p.dtype != group[0].dtype for group in trained for p in group) or not all(trained):
            raise Unfit("a group of the optimizer mixes dtypes, trains nothing, or trains what is not the model's")
        self.names = [[names[id(p)] for p in group] for group in trained]
        self.shapes = [[p.shape for p in group] for group in trained]
        rows = [[torch.cat([m.named[n].detach().flatten() for n in g]) for m in self.members] for g in self.names]
        self.leaves = [torch.stack(row).requires_grad_() for row in rows]
        moving = {name for group in self.names for name in group}
        rest = [{n: p.detach() for n, p in m.named.items() if n not in moving} for m in self.members]
        rest = [
            r | {f"model.{n}": b for n, b in m.model.named_buffers()} for r, m in zip(rest, self.members, strict=True)
        ]
        self.fixed = {name: torch.stack([r[name] for r in rest]) for name in rest[0]}
        seeds = dict.fromkeys(trial.seed for trial in trials)
        size = trials[0].batch_size
        self.batches = {seed: data.batches(workload, size, seed=seed, device=device) for seed in seeds}
        self.sample = evaluation_sample(workload, trials[0], device)
        self.optimizer = self._optimizer()
        # Sent to the device once: a host that sends a number at each step waits for it each time.
        limits = [member.trial.clip_norm or np.inf for member in self.members]
        self.limits = torch.tensor(limits, device=device)
        self.rates = [self._rates(group).to(leaf.dtype).to(device) for group, leaf in enumerate(self.leaves)]

    def _member(self, index: int, trial: Trial) -> Member:
        seed_everything(trial.seed)
        model = changed(self.workload.build_model(), trial.change).to(self.device).train()
        build = builder(trial.optimizer) if trial.optimizer else self.workload.optimizer
        recorder = Recorder(self.workload, trial, self.device)
        return Member(index, recorder, model, build(model.parameters(), trial.lr))

    def _rates(self, group: int) -> Tensor:
        """Each trial's learning rate for a group of the optimizer at each step [steps, trials]; 0 past its last."""
        rates = np.zeros((self.steps, len(self.members)))
        for k, member in enumerate(self.members):
            rates[: member.trial.steps, k] = member.recorder.rates * member.shares[group]
        return torch.from_numpy(rates)

    def _optimizer(self) -> optim.Optimizer:
        """The user's optimizer over whole leaves: it moves ``units`` at lr 1, and the rows follow at their own lr."""
        options, kind = self.members[0].options, type(self.members[0].optimizer)
        if kind not in ELEMENTWISE or any(member.options != options for member in self.members):
            raise Unfit(f"{kind.__name__}'s step may differ by more than lr, or mix a tensor's elements")
        self.units = [nn.Parameter(leaf.detach().clone()) for leaf in self.leaves]
        self.decays = any(group.get("weight_decay") for group in options)
        pairs = zip(options, self.units, strict=True)
        return kind([{**group, "params": [unit], "lr": 1.0} for group, unit in pairs])

    def _rows(self, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of leaves by parameter name, each [trials, *shape]."""
        found: dict[str, Tensor] = {}
        for names, shapes, leaf in zip(self.names, self.shapes, leaves, strict=True):
            parts = leaf.split([shape.numel() for shape in shapes], dim=1)
            found |= {n: part.view(len(leaf), *s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return found

    def _each(self, function: Callable, batches: Sequence[Any] = ()) -> Any:
        """``function(model, batch)`` of every row: one batch is shared, one a row is each its own."""
        shared = len(self.batches) == 1
        flat = [tree_flatten(batch) for batch in batches] if not shared else []
        own = [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]

        def one(moving: Any, fixed: Any, mine: Any) -> Any:
            args = [tree_unflatten(mine, flat[0][1])] if flat else batches[:1]
            return torch.func.functional_call(self.shell, (moving, fixed), (function, *args))

        # One draw for all rows of one seed is the plain loop's own draw, dropout's masks included.
        randomness = "same" if shared else "different"
        values, buffers = torch.vmap(one, randomness=randomness)(self._rows(self.leaves), self.fixed, own)
        self.fixed |= {name: buffer.detach() for name, buffer in buffers.items()}
        return values

    def step(self, step: int) -> Iterator[tuple[int, Trace]]:
        """Train every row by one step; yields the traces of those that end with it."""
        self.crowd[step] = len(self.members)
        for member in self.members:
            member.recorder.begin()
        drawn = {seed: next(source) for seed, source in self.batches.items()}
        batches = [drawn[member.trial.seed] for member in self.members]
        examples = data.batch_length(batches[0])
        for member in self.members:
            member.recorder.fetched(examples)
        losses = self._each(lambda model, batch: mean(self.workload.loss(model, batch)), batches)
        losses.sum().backward()
        grads = [leaf.grad for leaf in self.leaves]
        norms = torch.stack([torch.linalg.vector_norm(grad, dim=1) for grad in grads]).norm(dim=0)
        self._clip(grads, norms)
        self._update(step)
        for member, loss, norm in zip(self.members, losses.detach(), norms, strict=True):
            member.recorder.end(loss, norm)
        every = self.members[0].trial.eval_every
        if every and (step + 1) % every == 0:
            self._evaluate()
        yield from self._leave(step)

    def _clip(self, grads: Sequence[Any], norms: Tensor) -> None:
        if any(member.trial.clip_norm for member in self.members):
            limit = self.limits.to(norms.dtype)
            scale = torch.where(limit.isinf(), 1.0, (limit / (norms + 1e-6)).clamp(max=1.0))
            for grad in grads:
                grad.mul_(scale[:, None])

    @torch.no_grad()
    def _update(self, step: int) -> None:
        for unit, leaf in zip(self.units, self.leaves, strict=True):
            unit.grad = leaf.grad
            unit.copy_(leaf) if self.decays else unit.zero_()
        self.optimizer.step()
        for group, (unit, leaf) in enumerate(zip(self.units, self.leaves, strict=True)):
            leaf.addcmul_(unit - leaf if self.decays else unit, self.rates[group][step, :, None])
            leaf.grad = None

    def _evaluate(self) -> None:
        size = max(self.workload.batch_size, 256)
        sample = self.sample or list(data.evaluation_batches(self.workload, batch_size=size, device=self.device))
        values = self._each(lambda model: evaluate(self.workload, model, sample, self.device))
        for k, member in enumerate(self.members):
            member.recorder.evaluated({name: value[k] for name, value in values.items()})

    def _leave(self, step: int) -> Iterator[tuple[int, Trace]]:
        ended = [m for m in self.members if m.recorder.has_diverged(1) or m.recorder.done == m.trial.steps]
        if not ended:
            return
        keep = [k for k, member in enumerate(self.members) if member not in ended]
        self.members = [self.members[k] for k in keep]
        yield from [(member.index, self.trace(member, "finished", "")) for member in ended]
        self.leaves = [leaf.detach()[keep].requires_grad_() for leaf in self.leaves]
        self.fixed = {name: value[keep] for name, value in self.fixed.items()}
        self.limits, self.rates = self.limits[keep], [rate[:, keep] for rate in self.rates]
        seeds = {member.trial.seed for member in self.members}
        self.batches = {seed: source for seed, source in self.batches.items() if seed in seeds}
        for unit in self.units:
            state, shape = self.optimizer.state[unit], unit.shape
            state |= {k: v[keep] for k, v in state.items() if isinstance(v, Tensor) and v.shape == shape}
            unit.data = unit.data[keep]

    def trace(self, member: Member, status: str, reason: str) -> Trace:
        """A trial's trace so far, with its share of the time."""
        trace = member.recorder.trace(status, reason)
        trace.steps[["seconds", "data_seconds"]] /= self.crowd[: len(trace.steps), None]
        return trace
