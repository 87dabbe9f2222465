"""Can this workload be trained at all? Answered in seconds, before any long run."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workup.errors import WorkupError
from workup.measure import data, faults, train
from workup.measure.state import preserved, seed_everything
from workup.trace import Trial
from workup.workload import Workload, example_hash, size

#: Share of the expected loss that an untrained model may lie off it, beside the batch's own noise.
TOLERANCE = 0.25
#: The small batch to learn by heart: examples, steps at a rate, share of the first loss to get below.
SMALL, STEPS, LEARNED = 4, 200, 0.25
#: Seconds for each rate that a batch is learned at, and for hashing each data set.
PATIENCE = 3.0
#: Share of the evaluation examples from which an overlap is a fault, and not a few repeated examples.
OVERLAP = 0.01

Answer = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was asked, ``pass``, ``warn`` or ``fail``, what was seen, and the rule."""

    name: str
    result: str
    detail: str
    rule: str


class First(NamedTuple):
    """The first step under a seed: the model with its gradients, the batch, the losses, the model's output."""

    model: nn.Module
    batch: Any
    losses: Tensor
    output: Any


def check(workload: Workload, *, device: str = "cpu", seed: int = 0, until: str | None = None) -> list[Check]:
    """Every check in turn, the later ones only if a batch passes.

    An error in the user's own code is a failed check; nothing of the caller's changes.

    Args:
        device: as from :func:`workup.measure.devices.resolve`.
        until: the name of the last check to make; None makes all.

    Example:
        >>> from workup import load
        >>> {c.result for c in check(load("diabetes-regression"))}
        {'pass'}
    """
    found: list[First] = []

    def passes() -> Answer:
        found.append(first_step(workload, device, seed))
        each = (
            "one loss each"
            if found[0].losses.dim()
            else "the loss is one mean, so that no example can be named as a cause"
        )
        return "pass", f"{data.batch_length(found[0].batch)} examples, {each}"

    steps: list[tuple[str, str, Callable[[], Answer]]] = [
        ("builds", "playbook: A3", lambda: _builds(workload)),
        ("one batch passes", "playbook: A3", passes),
        ("first loss", "ln C: the loss of knowing nothing", lambda: _first_loss(workload, found[0])),
        ("evaluation passes", "playbook: F3", lambda: _evaluates(workload, found[0].model, device)),
        ("gradients", "playbook: C4", lambda: _gradients(workload, found[0].model)),
        ("same seed, same loss", "playbook: F5", lambda: _repeats(workload, found[0], device, seed)),
        ("learns one batch by heart", "playbook: A3", lambda: _memorises(workload, device, seed)),
        ("evaluation data apart", "playbook: F3", lambda: _overlap(workload)),
    ]
    results: list[Check] = []
    with preserved():
        for name, rule, ask in steps:
            result, detail = _answered(ask)
            results.append(Check(name=name, result=result, detail=detail, rule=rule))
            if name == until or (result == "fail" and not found):
                break
            seed_everything(seed)
    return results


def _answered(ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except WorkupError as error:
        return "fail", str(error)
    except (Exception, SystemExit) as error:
        return "fail", faults.sentence(error)


def first_step(workload: Workload, device: str, seed: int, *, batch_size: int | None = None) -> First:
    """A fresh model's forward and backward pass over the seed's first batch.

    Raises:
        WorkloadError: as :func:`workup.measure.train.check_loss`.
    """
    seed_everything(seed)
    outputs: list[Any] = [None]
    model = workload.build_model().to(device).train()
    model.register_forward_hook(lambda *call: outputs.append(call[2]))
    batch = next(data.batches(workload, batch_size or workload.batch_size, seed=seed, device=device))
    with train.autocasting(workload.precision, device):
        losses = workload.loss(model, batch)
        train.check_loss(workload, losses, data.batch_length(batch))
    losses.float().mean().backward()
    return First(model, batch, losses.detach().float(), outputs[-1])


def _builds(workload: Workload) -> Answer:
    model = workload.build_model()
    again = {id(p) for p in workload.build_model().parameters()}
    if any(p.requires_grad and id(p) in again for p in model.parameters()):
        return "fail", "model() returns the same weights each time, so a trial would go on from the last one's"
    plan = Trial(lr=workload.lr, steps=100, batch_size=workload.batch_size, shape="workload")
    if not plan.learning_rates(workload.schedule).any():
        return "fail", "schedule(fraction) is 0 throughout"
    count = sum(p.numel() for p in model.parameters())
    return ("pass", f"{count:,} parameters") if count else ("fail", "the model has no parameters")


def _first_loss(workload: Workload, first: First) -> Answer:
    losses, loss = first.losses, first.losses.mean().item()
    if not math.isfinite(loss):
        bad = int((~torch.isfinite(losses)).sum())
        return "fail", f"{loss} before any step ({bad} of {losses.numel()} values): look at data, model and loss"
    expected, assumed = expected_loss(workload, first.output, first.batch)
    if expected is None:
        return "pass", f"{loss:.3g}; {assumed}"
    noise = 2 * losses.std().item() / math.sqrt(len(losses)) if losses.dim() and len(losses) > 1 else 0.0
    seen = f"{loss:.3g}, expected near {expected:.3g} ({assumed})"
    if abs(loss - expected) <= TOLERANCE * abs(expected) + noise:
        return "pass", seen
    high = "an initialisation or inputs of too large a scale, or a sum in place of a mean"
    low = "pretrained weights, labels that leak into the inputs, or an average over ignored entries"
    return "warn", f"{seen}. Is it {high if loss > expected else low}?"


def expected_loss(workload: Workload, output: Any, batch: Any) -> tuple[float | None, str]:
    """What a model that knows nothing should lose, and what was assumed to say so.

    The workload's own ``initial_loss``; else ln 2 for one logit to each target of 0 or 1; else
    ln C for an output of C classes with integer targets below C; else None.

    Args:
        output: what the model put out: logits, something with ``.logits``, or a container that begins with them.
    """
    if workload.initial_loss is not None:
        return float(workload.initial_loss), "as the workload says"
    logits = next((t for t in _tensors(getattr(output, "logits", output)) if t.is_floating_point() and t.dim()), None)
    if logits is not None:
        shape, given = logits.shape, _tensors(batch)
        for target in given:
            alike = target.shape in (shape, shape[:-1] if shape[-1] == 1 else shape)
            if alike and not ((target != 0) & (target != 1)).any():
                return math.log(2), f"ln 2: one logit, output {list(shape)}, to each target of 0 or 1"
        whole = [t for t in given if not t.is_floating_point() and t.dtype != torch.bool]
        fits = [(shape[-1], t) for t in whole if t.shape == shape[:-1]]
        fits += [(shape[1], t) for t in whole if len(shape) > 2 and t.shape == shape[:1] + shape[2:]]
        fits += [(shape[-1], t) for t in whole]  # a language model's tokens: one more than outputs, or outputs flat
        for classes, target in fits:
            if classes > 1 and int(target.max()) < classes:
                return math.log(classes), f"ln {classes}: output {list(shape)}, integer targets below {classes}"
    return None, "neither classes nor integer targets seen, so nothing is expected: Workload(initial_loss=…) says"


def _tensors(value: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(value) if isinstance(value, Mapping) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]


def _gradients(workload: Workload, model: nn.Module) -> Answer:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = workload.optimizer(model.parameters(), workload.lr)
    groups = optimizer.param_groups
    doubled = workload.optimizer(model.parameters(), 2 * workload.lr).param_groups
    if all(float(one["lr"]) == float(two["lr"]) for one, two in zip(groups, doubled, strict=True)):
        return "fail", "optimizer(params, lr) makes the same rates whatever its lr, so none can be compared"
    held = {id(p) for group in groups for p in group["params"]}
    reached = {name: p.grad for name, p in trained.items() if p.grad is not None}
    faults = {
        "not finite in": [name for name, grad in reached.items() if not torch.isfinite(grad).all()],
        "none reaches": [name for name in trained if name not in reached],
        "all zero in": [name for name, grad in reached.items() if not grad.any()],
        "not given to the optimizer:": [name for name, p in trained.items() if id(p) not in held],
    }
    said = [f"{what} {', '.join(names[:8])}{' …' * (len(names) > 8)}" for what, names in faults.items() if names]
    if not reached or faults["not finite in"]:
        return "fail", "; ".join(said) or "no parameter requires a gradient"
    try:
        optimizer.step()
    except TypeError as error:
        return "fail", f"{error}. An optimizer that wants the loss again within a step, as LBFGS, cannot be used here"
    return ("warn", "; ".join(said)) if said else ("pass", f"reach all {len(trained)} trained parameter tensors")


def _repeats(workload: Workload, first: First, device: str, seed: int) -> Answer:
    once, again = first.losses.mean().item(), first_step(workload, device, seed).losses.mean().item()
    if once == again or not math.isfinite(once):
        return "pass", f"{once:.9g} twice under seed {seed}"
    if abs(once - again) <= 1e-4 * abs(once):
        return "warn", f"{once:.9g}, then {again:.9g}: some operation rounds differently each time"
    cause = "something draws from a random state other than torch's, numpy's or python's own"
    return "fail", f"{once:.6g}, then {again:.6g} under seed {seed}, so trials cannot be compared: {cause}"


def _memorises(workload: Workload, device: str, seed: int) -> Answer:
    """Train on one small batch at the workload's rate, then at ten times and a tenth of it (playbook: A3)."""
    small, best, start = min(SMALL, workload.batch_size), (math.inf, workload.lr), math.nan
    for lr in (workload.lr, workload.lr * 10, workload.lr / 10):
        first, end = first_step(workload, device, seed, batch_size=small), time.monotonic() + PATIENCE
        optimizer = workload.optimizer(first.model.parameters(), lr)
        start = first.losses.mean().item()
        for _ in range(STEPS):
            optimizer.step()
            optimizer.zero_grad()
            with train.autocasting(workload.precision, device):
                loss = workload.loss(first.model, first.batch).float().mean()
            value = loss.item()
            if value < (LEARNED * start if start > 0 else start - 0.1 * abs(start)):
                return "pass", f"{small} examples, from {start:.3g} to {value:.3g} at lr {lr:.2g}"
            if not math.isfinite(value) or time.monotonic() > end:
                break
            best = min(best, (value, lr))
            loss.backward()
    seen = f"{small} examples, from {start:.3g} to {best[0]:.3g} at best (lr {best[1]:.2g})"
    if best[0] < start - 0.1 * abs(start):
        return "warn", f"{seen}: it learns, but not by heart within {STEPS} steps or {PATIENCE:.0f} s"
    return "fail", f"{seen}: it does not learn them. Do gradients, labels and optimizer belong together?"


def _evaluates(workload: Workload, model: nn.Module, device: str) -> Answer:
    if workload.eval_data is None:
        return "warn", "no eval_data: only the training loss can be judged"
    batches = data.evaluation_batches(workload, batch_size=workload.batch_size, device=device)
    if (batch := next(iter(batches), None)) is None:
        return "fail", "eval_data gave no example"
    values = train.evaluate(workload, model, [batch], device)
    bad = [name for name, value in values.items() if not torch.isfinite(value)]
    return ("warn", f"not finite: {', '.join(bad)}") if bad else ("pass", ", ".join(values))


def _overlap(workload: Workload) -> Answer:
    """Whether evaluation examples also stand in the training data, by content (playbook: F3)."""
    if workload.eval_data is None:
        return "warn", "no eval_data to compare"
    if workload.eval_data is workload.train_data:
        return "fail", "eval_data is train_data itself"
    evaluated, trained = _hashes(workload.eval_data), _hashes(workload.train_data)
    count = len(evaluated & trained)
    among = f"among {len(evaluated):,} evaluation and {len(trained):,} training examples"
    if not count:
        return "pass", f"none in common {among}"
    result = "fail" if count >= OVERLAP * len(evaluated) else "warn"
    return result, f"{count:,} in common ({count / len(evaluated):.1%}) {among}"


def _hashes(examples: Any) -> set[str]:
    """Hashes of as many examples as ``PATIENCE`` allows; random augmentation makes equal examples differ."""
    end, length, found = time.monotonic() + PATIENCE, size(examples), set()
    indexed = length is not None and hasattr(examples, "__getitem__")
    for example in (examples[i] for i in range(length or 0)) if indexed else examples:
        found.add(example_hash(example))
        if time.monotonic() > end:
            break
    return found
