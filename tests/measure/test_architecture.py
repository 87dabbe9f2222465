"""Residual branches and norms found in models built in other ways, each with the answer known from its code."""

import pytest
import torch
from torch import nn

from workup import Trial, load
from workup.measure.architecture import audit
from workup.measure.change import changed
from workup.measure.train import train


class Encoder(nn.Module):
    """torch's own transformer layers over [batch, 8] numbers as four positions of two."""

    def __init__(self, norm_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.inp, self.out = nn.Linear(2, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.out(self.encoder(self.inp(x.view(-1, 4, 2))).mean(1))


def model_of(layers):
    def make():
        return nn.Sequential(*(layer() for layer in layers))

    return make


def test_post_norm_residuals_of_torchs_own_transformer_are_found_and_the_switch_cures_them(make_workload):
    found = audit(make_workload(model=lambda: Encoder(False)))
    # The last sum's norm has no residual sum after it: pre-norm stacks end so too.
    assert found.post_norm == ("encoder.layers.0.self_attn", "encoder.layers.0", "encoder.layers.1.self_attn")
    assert found.pre_norm == "encoder.layers.0.norm_first=True encoder.layers.1.norm_first=True"
    assert "encoder.layers.0.self_attn" in found.advice
    pre = audit(make_workload(model=lambda: Encoder(True)))
    assert (pre.post_norm, pre.pre_norm, pre.advice, len(pre.branches)) == ((), "", "", 2)


def test_zeroed_branches_leave_only_the_shortcut(make_workload):
    workload = make_workload(model=lambda: Encoder(True))
    change = audit(workload).zero_init
    assert set(change.split()) == {
        f"encoder.layers.{k}.{layer}.{name}=0"
        for k in (0, 1)
        for layer in ("self_attn.out_proj", "linear2")
        for name in ("weight", "bias")
    }
    torch.manual_seed(0)
    model, x = changed(workload.build_model(), change), torch.randn(5, 8)
    torch.testing.assert_close(model(x), model.out(model.inp(x.view(-1, 4, 2)).mean(1)))


@pytest.mark.parametrize(
    ("name", "branches", "post", "bare", "advice"),
    [
        ("digits-mlp", 0, 0, 0, ""),
        ("digits-resnet", 3, 0, 0, ""),
        ("text-transformer", 12, 0, 0, ""),
        ("text-transformer-postnorm", 12, 11, 0, "norms after the residual sum of layers.0.branches.0"),
        ("residual-unnormalised", 12, 0, 12, "no normalisation in the residual branch of 1.branch"),
        ("relu-mlp-large-init", 0, 0, 0, "no residual connection around any of its 7 layers; no normalisation at all"),
        ("post-norm-mlp", 12, 11, 0, "norms after the residual sum of 1.branch"),
        ("pre-norm-mlp", 12, 0, 0, ""),
    ],
)
def test_the_built_in_workloads_are_audited_as_they_are_built(name, branches, post, bare, advice):
    found = audit(load(name))
    assert (len(found.branches), len(found.post_norm), len(found.bare)) == (branches, post, bare)
    assert found.advice.startswith(advice)
    assert bool(found.advice) == bool(advice)


def test_a_projected_shortcut_is_not_taken_for_the_branch(make_workload):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.short = nn.Linear(8, 6)
            self.branch = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6))

        def forward(self, x):
            return self.branch(x) + self.short(x)

    found = audit(make_workload(model=model_of([lambda: nn.Linear(8, 8), Block, lambda: nn.Linear(6, 3)])))
    assert found.branches == ("1.branch",)
    assert found.zero_init == "1.branch.3.weight=0 1.branch.3.bias=0"


class Basic(nn.Module):
    """ReLU(shortcut(x) + Norm(f(x))), as in torchvision's ResNet, its sum in place."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear1, self.norm1 = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.linear2, self.norm2 = nn.Linear(outputs, outputs), nn.BatchNorm1d(outputs)
        self.down = nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)) if inputs != outputs else None

    def forward(self, x):
        out = self.norm2(self.linear2(self.norm1(self.linear1(x)).relu()))
        out += x if self.down is None else self.down(x)
        return out.relu()


def test_a_norm_at_the_end_of_the_branch_is_not_taken_for_post_norm(make_workload):
    layers = [lambda: nn.Linear(8, 8), lambda: Basic(8, 8), lambda: Basic(8, 6), lambda: nn.Linear(6, 3)]
    found = audit(make_workload(model=model_of(layers)))
    assert (found.branches, found.post_norm, found.bare, found.layers) == (("1", "2"), (), (), 7)
    assert found.zero_init == "1.norm2.weight=0 1.norm2.bias=0 2.norm2.weight=0 2.norm2.bias=0"
    assert found.advice == ""


def test_two_branches_of_one_norm_are_not_bare_and_a_computed_weight_is_not_zeroed(make_workload):
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.one, self.two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
            return x + self.one(h) + self.two(h)

    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x):
            return 0.7 * x + 0.7 * self.f(x)

    first, last = (lambda: nn.Linear(8, 8)), (lambda: nn.Linear(8, 3))
    found = audit(make_workload(model=model_of([first, Parallel, last])))
    assert (len(found.branches), found.bare) == (2, ())
    assert found.zero_init == "1.one.bias=0 1.one.weight=0 1.two.2.bias=0 1.two.2.weight=0"
    found = audit(make_workload(model=model_of([first, Computed, last])))
    assert (found.bare, found.zero_init) == (("1.f",), "")


def test_a_sum_of_two_losses_or_of_an_embedding_and_its_positions_is_no_residual(make_workload):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.out = nn.Embedding(8, 4), nn.Embedding(8, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out((self.words(x.argsort(dim=1)) + self.places.weight[: x.shape[1]]).mean(1))

    def loss(model, batch):
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + logits.logsumexp(-1).square().mean()

    assert audit(make_workload(model=Words, loss=loss)).branches == ()


def test_a_trial_trains_the_changed_model_and_is_another_trial(workload):
    plain = Trial(lr=0.05, steps=3, batch_size=16)
    zeroed = Trial(lr=0.05, steps=3, batch_size=16, change="2.weight=0 2.bias=0")
    assert plain.id("f") != zeroed.id("f")
    assert train(workload, zeroed).steps.loss[0] == pytest.approx(torch.log(torch.tensor(3.0)).item())
    assert train(workload, plain).steps.loss[0] != pytest.approx(torch.log(torch.tensor(3.0)).item())


def test_looking_at_a_model_changes_nothing(workload):
    before = torch.get_rng_state()
    audit(workload)
    assert torch.equal(before, torch.get_rng_state())
