"""A trial once more, watched from inside: norms by layer, one step's batch, an update left out (playbook: C2, C4)."""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from workup.measure.state import preserved, seed_everything
from workup.measure.train import autocasting, train
from workup.trace import Trace, Trial
from workup.workload import Workload

#: Called with model, batch and losses of a step.
Look = Callable[[nn.Module, Any, Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A watched run: its trace, gradient and weight norms [steps, layers], and what each look saw, by its name."""

    trace: Trace
    grads: pd.DataFrame
    weights: pd.DataFrame
    seen: Mapping[str, Any]


def replay(
    workload: Workload,
    trial: Trial,
    *,
    steps: int,
    device: str = "cpu",
    skip: Collection[int] = (),
    look: Mapping[str, tuple[int, Look]] = {},
) -> Replay:
    """The first ``steps`` of ``trial``, the same numbers on the same device, with every layer watched.

    Args:
        skip: steps whose batch moves no weight (its gradients are dropped).
        look: by name, a step and what to call there, before its update.
    """
    names: list[str] = []
    rows: dict[str, list[Tensor]] = {"grads": [], "weights": []}
    seen: dict[str, Any] = {}

    def watch(step: int, model: nn.Module, batch: Any, losses: Tensor) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        names[:] = [name.rpartition(".")[0] or name for name, _ in named]
        rows["grads"].append(_norms([p.grad for _, p in named], device))
        rows["weights"].append(_norms([p.detach() for _, p in named], device))
        seen.update({name: see(model, batch, losses) for name, (at, see) in look.items() if at == step})
        if step in skip:
            model.zero_grad(set_to_none=True)

    trace = train(workload, trial, device=device, first=steps, watch=watch)

    def table(name: str) -> pd.DataFrame:
        squares = pd.DataFrame(torch.stack(rows[name]).double().cpu().numpy().T ** 2)
        return squares.groupby(names, sort=False).sum(min_count=1).T ** 0.5

    return Replay(trace=trace, grads=table("grads"), weights=table("weights"), seen=seen)


def _norms(tensors: list[Tensor | None], device: str) -> Tensor:
    """L2 norms on one device, 0 for what is not there."""
    dense = [torch.zeros(1) if t is None else t.coalesce().values() if t.is_sparse else t for t in tensors]
    return torch.stack([torch.linalg.vector_norm(t.float()).to(device, non_blocking=True) for t in dense])


def gains(workload: Workload, *, seed: int) -> pd.Series:
    """How much each layer's initial weights amplify a random input, by parameter: rms times the root of its fan-in."""
    with preserved():
        seed_everything(seed)
        model = workload.build_model()
    found = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or isinstance(module, nn.Embedding) or nn.parameter.is_lazy(weight):
            continue
        if weight.dim() > 1:
            found[f"{path}.weight".lstrip(".")] = float(weight.detach().float().norm() / weight.shape[0] ** 0.5)
    return pd.Series(found, dtype=float)


def first_nonfinite(workload: Workload, model: nn.Module, batch: Any, *, device: str) -> str | None:
    """The first module, in the order they run, that puts out a number that is not finite; None where none does."""
    found: list[str] = []

    def look(path: str, output: Any) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            found.append(path)

    copy = deepcopy(model)
    for path, module in copy.named_modules():
        module.register_forward_hook(lambda _, given, output, path=path: look(path, output))
    with preserved(), torch.no_grad(), autocasting(workload.precision, device):
        workload.loss(copy, batch)
    return found[0] if found else None


def sharpness(workload: Workload, model: nn.Module, batch: Any, *, iterations: int = 20) -> float | None:
    """The Hessian's eigenvalue of largest size, of the loss on ``batch``, by power iteration.

    None where an operation has no second derivative. SGD is unstable above 2 (1 + momentum) / lr
    (Cohen et al. 2021, "Gradient descent on neural networks typically occurs at the edge of stability").
    """
    copy = deepcopy(model)
    params = [p for p in copy.parameters() if p.requires_grad]
    with preserved(), torch.enable_grad():
        try:
            loss = workload.loss(copy, batch).float().mean()
            first = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
            vector, value = [torch.randn_like(p) for p in params], 0.0
            for _ in range(iterations):
                length = torch.stack(torch._foreach_norm(vector)).norm()
                vector = [v / length for v in vector]
                product = torch.autograd.grad(first, params, vector, retain_graph=True, materialize_grads=True)
                value = float(sum((v * p).sum() for v, p in zip(vector, product, strict=True)))
                vector = list(product)
        except RuntimeError:
            return None
    return value if np.isfinite(value) else None
