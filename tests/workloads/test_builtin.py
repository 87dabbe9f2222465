import importlib.util
import math
from pathlib import Path

import pytest
import torch

import workup.workloads
from workup import Trial, load
from workup.measure.check import check
from workup.measure.train import train
from workup.workloads import BUILT_IN
from workup.workloads.digits import DEPTH, resnet
from workup.workloads.text import Transformer

#: The mean first loss that an untrained model should be near, and how near.
FIRST = {name: (math.log(10), 0.6) for name in BUILT_IN}
FIRST |= {name: (math.log(256), 0.3) for name in BUILT_IN if name.startswith("text")}
FIRST |= {"diabetes-regression": (1.0, 0.4), "breast-cancer-imbalanced": (math.log(2), 0.1)}
# Large on purpose: that is what they show.
FIRST |= {"relu-mlp-large-init": (16.0, 6.0), "residual-unnormalised": (2.8, 0.4)}

EVERY = pytest.mark.parametrize("name", BUILT_IN)


def first_batch(workload):
    return tuple(tensor[: workload.batch_size] for tensor in workload.train_data.tensors)


@EVERY
def test_a_step_gives_one_loss_per_example_near_that_of_knowing_nothing(name):
    workload = load(name)
    assert workload.name == name
    torch.manual_seed(0)
    model, batch = workload.build_model(), first_batch(workload)
    losses = workload.loss(model, batch)
    assert losses.shape == (workload.batch_size,)
    expected, within = FIRST[name]
    assert losses.mean().item() == pytest.approx(expected, abs=within)
    for metric in workload.metrics.values():
        assert metric(model, batch).shape == (workload.batch_size,)


@EVERY
def test_training_repeats_under_a_seed_and_lowers_the_loss(name):
    workload = load(name)
    trial = Trial(lr=workload.lr, steps=12, batch_size=workload.batch_size)
    first, again = train(workload, trial), train(workload, trial)
    assert first.status == "finished"
    assert first.steps.loss.tolist() == again.steps.loss.tolist()
    assert first.steps.loss[9:].mean() < first.steps.loss[:3].mean()


@EVERY
def test_one_step_lowers_the_loss_of_its_own_batch(name):
    workload = load(name)
    torch.manual_seed(0)
    model, batch = workload.build_model(), first_batch(workload)
    optimizer = workload.optimizer(model.parameters(), workload.lr / 10)
    before = workload.loss(model, batch).mean()
    before.backward()
    optimizer.step()
    assert workload.loss(model, batch).mean() < before


@EVERY
def test_each_states_a_budget_of_thousands_of_steps(name):
    assert 2000 <= load(name).max_train_steps <= 10000


def test_the_stride_variant_differs_in_one_stride_and_in_what_that_makes_of_the_classifier():
    plain, changed = resnet(), resnet(middle_stride=1)
    differing = [
        name
        for (name, a), (_, b) in zip(plain.named_modules(), changed.named_modules(), strict=True)
        if not list(a.children()) and repr(a) != repr(b)
    ]
    assert differing == ["2.conv1", "2.shortcut", "8"]
    assert (plain[2].conv1.stride, changed[2].conv1.stride) == ((2, 2), (1, 1))
    assert (plain[8].in_features, changed[8].in_features) == (32, 128)


def test_the_two_transformers_have_equal_layers_and_norms_in_other_places():
    x = torch.randn(2, 8, 32)
    before, after = (Transformer(post_norm).layers[0] for post_norm in (False, True))
    after.load_state_dict(before.state_dict())
    attention, network = before.branches
    first, second = before.norms
    middle = x + attention(first(x))
    torch.testing.assert_close(before(x), middle + network(second(middle)))
    middle = first(x + attention(x))
    torch.testing.assert_close(after(x), second(middle + network(middle)))


def test_a_transformer_does_not_look_ahead():
    torch.manual_seed(0)
    model = Transformer(post_norm=True)
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:20].all()
    assert not same[20:].any()


def test_residual_blocks_without_norms_add_twice_their_branch():
    model = load("residual-unnormalised").build_model()
    assert len(model) == DEPTH + 2
    x = torch.randn(3, 64)
    torch.testing.assert_close(model[1](x), x + 2 * model[1].branch(x))


def test_the_large_initialisation_is_he_times_one_and_a_half():
    torch.manual_seed(0)
    model = load("relu-mlp-large-init").build_model()
    assert model[2].weight.std().item() == pytest.approx(1.5 * math.sqrt(2 / 128), rel=0.02)


def test_the_minority_is_counted_by_example():
    workload = load("breast-cancer-imbalanced")
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0])
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    count = workload.metrics["minority_correct"](lambda _: logits, (None, labels))
    assert count.tolist() == [1, 0, 0, 0]
    assert workload.metrics["accuracy"](lambda _: logits, (None, labels)).tolist() == [1, 0, 0, 1]


def test_the_starting_file_runs_as_it_is_and_passes_every_check(tmp_path):
    file = tmp_path / "my_workload.py"
    file.write_text((Path(workup.workloads.__file__).parent / "template.py").read_text())
    assert importlib.util.spec_from_file_location("my_workload", file) is not None
    checks = check(load(f"{file}:workload"))
    assert {c.name: c.result for c in checks if c.result != "pass"} == {}
