import dataclasses
import random

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from workup import Trial, WorkloadError
from workup.measure.optimizers import OPTIMIZERS
from workup.measure.train import grad_norm, train

TRIAL = Trial(lr=0.05, steps=40, batch_size=16)


def plain_loop(workload, trial, clip=None):
    """The same training written out: an independent, slow twin of the loop under test."""
    torch.manual_seed(trial.seed)
    model = workload.build_model()
    optimizer = workload.optimizer(model.parameters(), trial.lr)
    generator = torch.Generator().manual_seed(trial.seed)
    x, y = workload.train_data.tensors
    losses, norms = [], []
    sampler = torch.utils.data.RandomSampler(x, generator=generator)
    while len(losses) < trial.steps:
        order = torch.tensor(list(sampler))
        for picks in order.split(trial.batch_size):
            if len(picks) < trial.batch_size or len(losses) == trial.steps:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[picks]), y[picks])
            loss.backward()
            squares = [float((p.grad.double() ** 2).sum()) for p in model.parameters()]
            norms.append(sum(squares) ** 0.5)
            if clip is not None and norms[-1] > clip:
                for p in model.parameters():
                    p.grad *= clip / norms[-1]
            optimizer.step()
            losses.append(loss.item())
    return losses, norms


def test_losses_and_norms_are_those_of_a_plain_loop(workload):
    trace = train(workload, TRIAL)
    losses, norms = plain_loop(workload, TRIAL)
    np.testing.assert_allclose(trace.steps.loss, losses, rtol=1e-5)
    np.testing.assert_allclose(trace.steps.grad_norm, norms, rtol=1e-4)
    assert trace.status == "finished"
    assert trace.steps.examples.tolist() == [16] * 40


def test_clipping_trains_as_written_out_and_records_the_unclipped_norm(workload):
    _, norms = plain_loop(workload, TRIAL)
    clip = float(np.median(norms))
    trace = train(workload, dataclasses.replace(TRIAL, clip_norm=clip))
    losses, norms = plain_loop(workload, TRIAL, clip=clip)
    np.testing.assert_allclose(trace.steps.loss, losses, rtol=1e-4)
    np.testing.assert_allclose(trace.steps.grad_norm, norms, rtol=1e-3)
    assert trace.steps.clipped.tolist() == [norm > clip for norm in trace.steps.grad_norm]
    assert trace.steps.clipped.any()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_override_trains_as_torch_optim_does(workload, name):
    own = dataclasses.replace(workload, optimizer=OPTIMIZERS[name])
    losses, _ = plain_loop(own, dataclasses.replace(TRIAL, lr=0.01))
    trace = train(workload, dataclasses.replace(TRIAL, lr=0.01, optimizer=name))
    np.testing.assert_allclose(trace.steps.loss, losses, rtol=1e-4)


def test_a_scalar_mean_loss_trains_like_per_example_losses(workload):
    scalar = dataclasses.replace(workload, loss=lambda model, batch: workload.loss(model, batch).mean())
    np.testing.assert_array_equal(train(workload, TRIAL).steps.loss, train(scalar, TRIAL).steps.loss)


def test_trials_of_one_seed_share_first_loss_and_another_seed_does_not(workload):
    first = [train(workload, dataclasses.replace(TRIAL, steps=1, lr=lr)).steps.loss[0] for lr in (1e-3, 1.0)]
    other = train(workload, dataclasses.replace(TRIAL, steps=1, seed=1)).steps.loss[0]
    assert first[0] == first[1] != other


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.layers[1].eval()

    def forward(self, x):
        # Draws from the random stream also in evaluation mode.
        return self.layers(x) + 0 * torch.rand(())


def test_evaluating_on_the_way_changes_nothing_of_the_training(make_workload):
    workload = make_workload(model=Dropping)
    plain = train(workload, TRIAL)
    watched = train(workload, dataclasses.replace(TRIAL, eval_every=1, eval_examples=50))
    np.testing.assert_array_equal(plain.steps.loss, watched.steps.loss)
    assert watched.steps.eval_loss.notna().all()
    assert plain.steps.eval_loss.isna().all()


def test_evaluation_weighs_each_example_alike_and_metrics_become_columns(make_workload):
    def correct(model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).float()

    workload = make_workload(metrics={"accuracy": correct}, eval_data=small(83))
    trace = train(workload, Trial(lr=1e-9, steps=2, batch_size=16, eval_every=2))
    torch.manual_seed(0)
    model = workload.build_model()
    x, y = workload.eval_data.tensors
    expected = nn.functional.cross_entropy(model(x), y).item()
    assert np.isnan(trace.steps.eval_loss[0])
    assert trace.steps.eval_loss[1] == pytest.approx(expected, rel=1e-5)
    assert trace.steps.eval_accuracy[1] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))


def small(examples):
    x = torch.randn(examples, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :3].argmax(1))


def test_a_rate_too_high_diverges_and_the_trace_ends_with_the_first_bad_loss(workload):
    trace = train(workload, dataclasses.replace(TRIAL, lr=1e12))
    assert trace.status == "diverged"
    assert not np.isfinite(trace.steps.loss.iloc[-1])
    assert np.isfinite(trace.steps.loss.iloc[:-1]).all()
    assert trace.reason == f"step {len(trace.steps) - 1}: the loss is no longer finite"


def broken_at(step, error):
    seen = []

    def loss(model, batch):
        seen.append(1)
        if len(seen) > step:
            raise error
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return loss


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (ValueError("bad value"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_ends_a_trial_is_its_status_and_what_was_measured_is_kept(make_workload, error, status):
    trace = train(make_workload(loss=broken_at(7, error)), TRIAL)
    assert (trace.status, len(trace.steps)) == (status, 7)
    assert np.isfinite(trace.steps.loss).all()
    assert "step 7" in trace.reason


class Shaken(Exception):
    pass


@pytest.mark.parametrize("error", [None, Shaken(), KeyboardInterrupt()])
def test_everything_global_comes_back_bit_for_bit(make_workload, error):
    def loss(model, batch):
        random.random(), np.random.rand(), torch.rand(1)
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        if error is not None:
            raise error
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def state():
        numpy_state = np.random.get_state()
        return (
            random.getstate(),
            numpy_state[1].tolist(),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )

    before = state()
    train(make_workload(loss=loss), dataclasses.replace(TRIAL, steps=3))
    assert state() == before


def test_a_module_given_as_the_model_is_never_trained(make_workload):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace = train(make_workload(model=model), TRIAL)
    assert trace.steps.loss.iloc[-1] < trace.steps.loss[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: 0.5, "returned float, not a tensor"),
        (lambda model, batch: model(batch[0]), r"has shape \[16, 3\]"),
        (lambda model, batch: model(batch[0]).detach().mean(), "has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_stops_at_once_and_says_why(make_workload, loss, message):
    with pytest.raises(WorkloadError, match=message):
        train(make_workload(loss=loss), TRIAL)


def test_groups_of_the_users_optimizer_keep_the_ratio_of_their_rates(make_workload):
    seen = []

    def two_groups(params, lr):
        params = list(params)
        optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": lr / 10}], lr=lr)
        optimizer.register_step_pre_hook(lambda opt, *_: seen.append([g["lr"] for g in opt.param_groups]))
        return optimizer

    train(make_workload(optimizer=two_groups), Trial(lr=1.0, steps=4, batch_size=16, warmup_steps=4))
    np.testing.assert_allclose(seen, [[0.25, 0.025], [0.5, 0.05], [0.75, 0.075], [1.0, 0.1]])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_close_to_full(make_workload, precision):
    full = train(make_workload(), TRIAL).steps
    low = train(make_workload(precision=precision), TRIAL).steps
    np.testing.assert_allclose(low.loss, full.loss, rtol=0.1, atol=0.02)
    np.testing.assert_allclose(low.grad_norm[:20], full.grad_norm[:20], rtol=0.2)


def test_under_fp16_an_overflowing_step_is_recorded_and_skipped_not_the_end(make_workload):
    def overflowing(model, batch):
        return 1e5 * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    workload = make_workload(precision="fp16", loss=overflowing)
    trace = train(workload, dataclasses.replace(TRIAL, lr=1e-9))
    assert trace.status == "finished"
    assert not np.isfinite(trace.steps.grad_norm[0])
    assert np.isfinite(trace.steps.loss).all()


def test_the_norm_is_read_only_also_when_it_is_infinite():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad = torch.tensor([float("inf"), 1.0])
    parameters[1].grad = torch.tensor([3.0, 4.0])
    assert grad_norm(parameters) == float("inf")
    assert parameters[1].grad.tolist() == [3.0, 4.0]
    assert grad_norm(parameters[1:]) == 5.0
    assert grad_norm(parameters, joined=True) == float("inf")
    assert grad_norm([nn.Parameter(torch.zeros(2))], joined=True) == 0


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "dtypes", [["float32"] * 3, ["float16"] * 3, ["bfloat16", "float32", "float32"], ["float64"] * 3]
)
def test_the_norm_is_that_of_all_tensors_together_whatever_their_type_and_layout(dtypes, joined):
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape, dtype in zip([(7, 5), (9,), (3, 2, 4)], dtypes, strict=True):
        parameters.append(nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))
        # Half precision holds no number above 65504, and the norm here is larger.
        parameters[-1].grad = (3e4 * torch.rand(shape, generator=generator).double()).to(parameters[-1].dtype)
    parameters[0].grad = parameters[0].grad.t().contiguous().t()  # not contiguous
    expected = sum(float((p.grad.double() ** 2).sum()) for p in parameters) ** 0.5
    assert float(grad_norm(parameters, joined=joined)) == pytest.approx(expected, rel=1e-6)


class Dicts(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:3].argmax(), "name": f"example {i}"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Dicts()[i] for i in range(40)])


@pytest.mark.parametrize("data", [Dicts(), Stream()])
def test_any_batch_structure_and_iterable_data_train_past_the_end_of_an_epoch(make_workload, data):
    def loss(model, batch):
        assert len(batch["name"]) == 16
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    trace = train(make_workload(train_data=data, eval_data=data, loss=loss), TRIAL)
    assert (trace.status, len(trace.steps)) == ("finished", 40)


def test_an_unfinished_trace_is_saved_on_the_way(workload, monkeypatch):
    monkeypatch.setattr("workup.measure.train.SAVE_EVERY", 0.0)
    saved = []
    train(workload, dataclasses.replace(TRIAL, steps=5), save=saved.append)
    assert [len(trace.steps) for trace in saved] == [1, 2, 3, 4, 5]
    assert {trace.status for trace in saved} == {"interrupted"}


def test_an_adaptive_threshold_is_the_percentile_of_the_norms_before(workload):
    trace = train(workload, dataclasses.replace(TRIAL, clip_percentile=50))
    norms = trace.steps.grad_norm
    expected = [np.inf, *(np.percentile(norms[max(0, t - 100) : t], 50) for t in range(1, 40))]
    np.testing.assert_allclose(trace.steps.clip_limit, expected, rtol=1e-5)
    assert trace.steps.clipped.tolist() == (norms > trace.steps.clip_limit).tolist()
    # It is a threshold like any other: where it never moves, the trial is that of the fixed one.
    first = dataclasses.replace(TRIAL, steps=2)
    fixed = train(workload, dataclasses.replace(first, clip_norm=norms[0]))
    pd.testing.assert_series_equal(trace.steps.loss[:2], fixed.steps.loss, check_exact=False)


def test_clipping_can_set_in_after_the_warmup(workload):
    late = dataclasses.replace(TRIAL, clip_norm=0.01, clip_from=30)
    trace, plain = train(workload, late), train(workload, TRIAL)
    assert trace.steps.clipped.tolist() == [False] * 30 + [True] * 10
    assert trace.steps.loss[:31].tolist() == plain.steps.loss[:31].tolist()
    assert trace.steps.loss[31] != plain.steps.loss[31]


def test_what_watches_sees_each_steps_gradients_and_may_drop_them(workload):
    seen = []

    def watch(step, model, batch, losses):
        norm = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()) ** 0.5
        seen.append((step, norm, float(losses.mean())))
        if step == 5:
            model.zero_grad(set_to_none=True)

    trace, plain = train(workload, TRIAL, watch=watch), train(workload, TRIAL)
    assert [step for step, *_ in seen] == list(range(40))
    assert trace.steps.loss.tolist() == pytest.approx([loss for *_, loss in seen])
    assert trace.steps.grad_norm[5] == 0
    assert trace.steps.grad_norm[:5].tolist() == pytest.approx([norm for _, norm, _ in seen[:5]], rel=1e-5)
    assert trace.steps.loss[:6].tolist() == plain.steps.loss[:6].tolist()
    assert trace.steps.loss[6] != plain.steps.loss[6]
