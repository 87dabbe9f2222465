import inspect
import warnings

import pytest
import torch
from torch.nn import functional as F

from workup.measure import devices
from workup.measure.syncs import find_syncs

STEPS = {
    "item": lambda loss, out, y: loss.mean().item(),
    "float": lambda loss, out, y: float(loss.mean().detach()),
    "if": lambda loss, out, y: 1 if (out > 0).any() else 0,
    "cpu": lambda loss, out, y: y.cpu(),
    "numpy": lambda loss, out, y: out.detach().numpy(),
    "tolist": lambda loss, out, y: y.tolist(),
    "print": lambda loss, out, y: str(loss),
    "format": lambda loss, out, y: f"{loss.mean().detach():.3f}",
    "mask": lambda loss, out, y: out[out > 0],
    "nonzero": lambda loss, out, y: torch.nonzero(y),
    "unique": lambda loss, out, y: torch.unique(y),
    "one_hot": lambda loss, out, y: F.one_hot(y),
}
HEALTHY = {
    "detach": lambda loss, out, y: loss.detach().mean(),
    "to": lambda loss, out, y: y.to(out.device),
    "shape": lambda loss, out, y: int(out.shape[0]) + len(y),
    "where": lambda loss, out, y: torch.where(out > 0, out, 0.0),
    "masked_fill": lambda loss, out, y: out.masked_fill(out > 0, 0.0),
    "one_hot": lambda loss, out, y: F.one_hot(y, 3),
    "index": lambda loss, out, y: out[torch.arange(len(y)), y],
}


def step_with(extra):
    def loss(model, batch):
        x, y = batch
        out = model(x)
        losses = F.cross_entropy(out, y, reduction="none")
        extra(losses, out, y)
        return losses

    return loss


@pytest.mark.parametrize("name", STEPS)
def test_a_wait_each_step_is_found_at_its_own_line(make_workload, name):
    found = find_syncs(make_workload(loss=step_with(STEPS[name])), batch_size=16)
    assert found[["file", "line"]].values.tolist() == [[__file__, inspect.getsourcelines(STEPS[name])[1]]]
    assert found.per_step.tolist() == [2.0 if name == "one_hot" else 1.0]  # one_hot reads the least and the greatest
    assert f'"{name}"' in found.code[0]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_step_that_stays_on_the_device_has_none(make_workload, name):
    assert find_syncs(make_workload(loss=step_with(HEALTHY[name])), batch_size=16).empty


@pytest.mark.parametrize("build", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_torchs_own_optimizers_are_not_the_users_lines(make_workload, build):
    assert find_syncs(make_workload(optimizer=lambda params, lr: build(params, lr=lr)), batch_size=16).empty


def test_a_wait_every_third_step_counts_a_third(make_workload):
    steps = iter(range(100))

    def loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        if next(steps) % 3 == 0:
            losses.mean().item()
        return losses

    assert find_syncs(make_workload(loss=loss), batch_size=16, steps=6).per_step.tolist() == [pytest.approx(1 / 3)]


def test_random_states_and_the_users_module_are_as_before(make_workload):
    module = torch.nn.Linear(8, 3)
    before, state = module.weight.clone(), torch.get_rng_state()
    find_syncs(make_workload(model=module, loss=step_with(STEPS["item"])), batch_size=16)
    assert torch.equal(module.weight, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_torchs_cuda_warning_is_seen_and_others_are_not_taken_for_one(monkeypatch):
    modes, seen = [], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with devices.syncs(lambda: seen.append(True)):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert seen == [True]
    assert modes == ["warn", 0]
