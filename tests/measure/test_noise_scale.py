import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Trial
from workup.judge import critical_size as judge
from workup.measure.noise_scale import loss_and_norms, measure, untouched
from workup.measure.train import train

DIMENSIONS, EXAMPLES = 20, 2000


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIMENSIONS))


@pytest.fixture
def linear(make_workload):
    """loss = w·x, whose gradient for an example is x itself, wherever w is: noise and length are the data's."""
    x = 0.3 + torch.randn(EXAMPLES, DIMENSIONS, generator=torch.Generator().manual_seed(0))
    return make_workload(
        model=Weights, train_data=TensorDataset(x), loss=lambda model, batch: batch[0] @ model.weight, eval_data=None
    )


def true_scale(workload):
    x = workload.train_data.tensors[0].double()
    return float(x.var(dim=0).sum() / x.mean(dim=0).square().sum())


@pytest.mark.parametrize("batch_size", [4, 64])
def test_the_noise_scale_is_the_datas_own_at_any_size_it_is_measured_at(linear, batch_size):
    noise = measure(linear, Trial(lr=0.1, steps=3, batch_size=batch_size), at=[0, 2], draws=(60, 60))
    by_step, drawn = judge.scales(noise)
    assert by_step.index.tolist() == [0, 2]
    for scale, (low, high) in zip(by_step, np.quantile(drawn, [0.025, 0.975], axis=1).T, strict=True):
        assert scale == pytest.approx(true_scale(linear), rel=0.2)
        assert low < true_scale(linear) * 1.02
        assert high > true_scale(linear) * 0.98


def test_with_the_whole_data_in_the_large_batch_its_gradient_is_exact(make_workload, linear):
    noise = measure(linear, Trial(lr=0.1, steps=1, batch_size=EXAMPLES // 8), at=[0], draws=(30, 30), parts=8)
    assert noise["large_norm2"].std() < 1e-5 * noise["large_norm2"].mean()
    assert judge.scales(noise)[0][0] == pytest.approx(true_scale(linear), rel=0.1)


def test_the_loss_and_the_two_norms_against_backward_on_each_batch(make_workload):
    torch.manual_seed(0)
    workload = make_workload()
    model = workload.build_model()
    batches = [workload.train_data[i : i + 10] for i in (0, 10, 20)]
    value, small, large = loss_and_norms(lambda batch: workload.loss(model, batch), model, batches)
    grads, losses = [], []
    for batch in batches:
        model.zero_grad()
        losses.append(workload.loss(model, batch).mean())
        losses[-1].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert value == pytest.approx(np.mean([loss.item() for loss in losses]), rel=1e-5)
    assert small == pytest.approx(np.mean([float(g @ g) for g in grads]), rel=1e-5)
    assert large == pytest.approx(float(torch.stack(grads).mean(0).square().sum()), rel=1e-5)


def test_looking_changes_nothing_of_the_training(make_workload):
    """Batch norm's averages, dropout's randomness and the batches are those of a training without a look."""

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))

    def spying(seen):
        plain = make_workload().loss

        def loss(module, batch):
            losses = plain(module, batch)
            if losses.shape[0] == 16:
                seen.append(float(losses.detach().mean()))
            return losses

        return loss

    trial = Trial(lr=0.1, steps=6, batch_size=16, seed=4)
    bare = train(make_workload(model=model), trial).steps["loss"].tolist()
    seen = []
    noise = measure(make_workload(model=model, loss=spying(seen)), trial, at=[1, 4], draws=(2, 2), parts=3)
    trained = [loss for i, loss in enumerate(seen) if i not in (*range(1, 7), *range(10, 16))]
    assert len(noise) == 4
    assert trained == pytest.approx(bare, rel=1e-6)


def test_buffers_come_back_also_after_an_error():
    norm = nn.BatchNorm1d(3).train()
    before = norm.running_mean.clone()
    with pytest.raises(RuntimeError, match="no 3"), untouched(norm, "cpu"):
        raise RuntimeError(f"no {norm(torch.randn(8, 3)).shape[1]}")
    assert torch.equal(norm.running_mean, before)
    assert int(norm.num_batches_tracked) == 0


def test_data_of_a_single_batch_gives_no_rows(make_workload):
    noise = measure(make_workload(batch_size=150), Trial(lr=0.1, steps=1, batch_size=150), at=[0])
    assert len(noise) == 0
    assert not judge.critical(noise).is_conclusive


def test_draws_go_on_where_they_are_not_yet_enough_up_to_the_most(linear):
    trial = Trial(lr=0.1, steps=3, batch_size=16)
    noise = measure(linear, trial, at=[0, 2], draws=(3, 7), enough=lambda rows: rows["step"].max() == 2)
    assert noise.groupby("step").size().to_dict() == {0: 7, 2: 3}
    fixed = measure(linear, trial, at=[0, 2], draws=(7, 7))
    assert noise[noise["step"] == 0].equals(fixed[fixed["step"] == 0])
