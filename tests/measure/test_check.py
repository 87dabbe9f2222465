import itertools
import math
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from workup import WorkloadError
from workup.measure.check import check, expected_loss
from workup.measure.data import batch_length
from workup.workload import fingerprint

NAMES = [
    "builds",
    "one batch passes",
    "first loss",
    "evaluation passes",
    "gradients",
    "same seed, same loss",
    "learns one batch by heart",
    "evaluation data apart",
]


def results(workload, **options):
    return {c.name: c for c in check(workload, **options)}


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_a_healthy_workload_passes_every_check_in_order(workload):
    found = results(workload)
    assert list(found) == NAMES
    assert {c.result for c in found.values()} == {"pass"}


def global_states():
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state, torch.get_default_dtype()


def test_nothing_of_the_callers_changes(make_workload):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    states = global_states()
    results(make_workload(model=model))
    assert global_states() == states
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training
    assert not model._forward_hooks
    assert all(p.grad is None for p in model.parameters())


# -- bad input: (loss, what is said) ----------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda m, b: 1.0, "returned float, not a tensor"),
        (lambda m, b: cross_entropy(m, b)[:, None], "has shape [16, 1]"),
        (lambda m, b: cross_entropy(m, b)[:5], "has shape [5]"),
        (lambda m, b: cross_entropy(m, b).detach(), "has no gradient"),
        (lambda m, b: cross_entropy(m, b) * 1j, "is complex (torch.complex64)"),
        (lambda m, b: sys.exit("no data here"), "SystemExit: no data here"),
        (lambda m, b: cross_entropy(m, (b[0][:, :4], b[1])), "RuntimeError: mat1 and mat2 shapes"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_ends_the_checks_with_what_is_wrong(make_workload, loss, said):
    found = results(make_workload(loss=loss))
    assert list(found) == NAMES[:2]
    assert found["one batch passes"].result == "fail"
    assert said in found["one batch passes"].detail


def test_an_error_in_the_users_code_is_placed_in_the_users_file(make_workload):
    def loss(model, batch):
        return model(batch["images"])

    detail = results(make_workload(loss=loss))["one batch passes"].detail
    assert detail.startswith("TypeError: ")
    assert "(test_check.py:" in detail


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_data": TensorDataset(torch.zeros(0, 8), torch.zeros(0))}, "this one is empty"),
        ({"eval_data": []}, "this one is empty"),
        ({"batch_size": 300}, "larger than train_data, which holds 200 examples"),
    ],
)
def test_empty_data_and_a_batch_larger_than_the_data_are_refused_when_stated(make_workload, changes, said):
    with pytest.raises(WorkloadError, match=said):
        make_workload(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_data": DataLoader(TensorDataset(torch.zeros(64, 8)))}, "train_data must be a torch Dataset"),
        ({"eval_data": "data/eval.csv"}, "eval_data must be a torch Dataset"),
        ({"train_data": {"x": torch.zeros(64, 8)}}, "train_data must be a torch Dataset"),
        ({"metrics": None}, "metrics must be a function by name"),
        ({"metrics": {"accuracy": 0.5}}, "metrics must be a function by name"),
        ({"metrics": {"loss": cross_entropy}}, "the name 'loss' is taken"),
        ({"loader": None}, "loader must be options by name"),
        ({"initial_loss": "2.3"}, "initial_loss must be a finite number"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_when_stated(make_workload, changes, said):
    with pytest.raises(WorkloadError, match=said):
        make_workload(**changes)


def test_a_function_that_returns_one_model_each_time_fails_and_a_shared_frozen_part_does_not(make_workload):
    model = nn.Linear(8, 3)
    found = results(make_workload(model=lambda: model))
    assert list(found) == ["builds"]
    assert "same weights each time" in found["builds"].detail
    frozen = nn.Linear(8, 8).requires_grad_(False)
    assert results(make_workload(model=lambda: nn.Sequential(frozen, nn.Linear(8, 3))))["builds"].result == "pass"


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda f: 1 / (f - 0.5), r"schedule(0) is -2: a finite multiplier of at least 0 is needed."),
        (lambda f: math.nan if f > 0.5 else 1.0, "schedule(0.51) is nan: a finite"),
        (lambda f: [1.0, 0.1][int(f * 3)], "schedule(0.67) failed (IndexError: list index out of range)."),
        (lambda f: None, "schedule(0) failed (TypeError"),
        (lambda f: 0, "is 0 throughout"),
    ],
)
def test_a_schedule_that_gives_no_rates_fails_before_any_training(make_workload, schedule, said):
    found = results(make_workload(schedule=schedule))
    assert list(found) == ["builds"]
    assert said in found["builds"].detail


def test_a_loss_of_zero_is_not_learned(make_workload):
    found = results(make_workload(loss=lambda m, b: cross_entropy(m, b) * 0))
    assert found["learns one batch by heart"].result == "fail"


def test_bfloat16_examples_are_compared_and_fingerprinted(make_workload, workload):
    def halved(data):
        x, y = data.tensors
        return TensorDataset(x.bfloat16(), y)

    made = make_workload(
        model=lambda: nn.Linear(8, 3).bfloat16(),
        train_data=halved(workload.train_data),
        eval_data=halved(workload.eval_data),
    )
    assert results(made)["evaluation data apart"].result == "pass"
    assert fingerprint(made) == fingerprint(made)


def test_a_length_that_promises_too_much_is_told_by_the_fingerprint(make_workload):
    class Longer(list):
        def __len__(self):
            return 1000

    with pytest.raises(WorkloadError, match=r"eval_data\[142\], of 1,000 examples by its length.*IndexError"):
        fingerprint(make_workload(eval_data=Longer([(torch.zeros(8), 0)] * 50)))


def test_a_model_that_cannot_be_built_ends_the_checks(make_workload):
    found = results(make_workload(model=lambda: nn.Linear(8, "three")))
    assert list(found) == ["builds"]
    assert found["builds"].result == "fail"


def test_a_model_without_parameters_fails(make_workload):
    assert results(make_workload(model=nn.Flatten))["builds"].detail == "the model has no parameters"


def test_an_iterable_that_gives_nothing_is_told(make_workload):
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    assert "gave no full batch of 16" in results(make_workload(train_data=Nothing()))["one batch passes"].detail


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_at_the_start_fails_with_how_many_values(make_workload, value):
    def loss(model, batch):
        losses = cross_entropy(model, batch)
        return torch.where(torch.arange(len(losses)) < 3, losses * value, losses)

    found = results(make_workload(loss=loss))["first loss"]
    assert found.result == "fail"
    assert f"{value} before any step (3 of 16 values)" in found.detail


def test_a_scalar_mean_is_accepted_with_a_note(make_workload):
    found = results(make_workload(loss=lambda m, b: cross_entropy(m, b).mean()))
    assert found["one batch passes"].result == "pass"
    assert "the loss is one mean" in found["one batch passes"].detail


# -- the loss to expect -----------------------------------------------------------------------


def test_a_sum_in_place_of_a_mean_and_a_leak_are_warned_of(make_workload):
    high = results(make_workload(loss=lambda m, b: cross_entropy(m, b) * 32))["first loss"]
    assert high.result == "warn"
    assert "a sum in place of a mean" in high.detail
    low = results(make_workload(loss=lambda m, b: cross_entropy(m, b) / 4))["first loss"]
    assert low.result == "warn"
    assert "leak" in low.detail


def test_the_workloads_own_initial_loss_comes_first(make_workload):
    found = results(make_workload(initial_loss=5.0))["first loss"]
    assert found.result == "warn"
    assert "expected near 5 (as the workload says)" in found.detail


LABELS = torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize(
    ("output", "batch", "classes"),
    [
        (torch.zeros(4, 3), (torch.zeros(4, 8), LABELS), 3),
        (torch.zeros(4, 3), {"image": torch.zeros(4, 8), "label": LABELS}, 3),
        (torch.zeros(4, 5, 9), (torch.randint(9, (4, 6)),), 9),
        (torch.zeros(20, 9), (torch.randint(9, (4, 6)),), 9),
        (torch.zeros(4, 3), (torch.randint(3, 1000, (4, 7)), LABELS), 3),
        (torch.zeros(4, 3, 6, 7), (torch.zeros(4, 1, 6, 7), torch.randint(3, (4, 6, 7))), 3),
        ({"logits": torch.zeros(4, 3)}, (torch.zeros(4, 8), LABELS), 3),
        ((torch.zeros(4, 3), None), [torch.zeros(4, 8), LABELS], 3),
        (torch.zeros(4), (torch.zeros(4, 8) + 0.5, torch.tensor([0.0, 1, 1, 0])), 2),
        (torch.zeros(4, 1), (torch.zeros(4, 8) + 0.5, torch.tensor([0, 1, 1, 0])), 2),
    ],
)
def test_classes_are_read_off_the_output_and_the_targets(workload, output, batch, classes):
    expected, assumed = expected_loss(workload, output, batch)
    assert expected == pytest.approx(math.log(classes))
    assert f"ln {classes}" in assumed


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (torch.zeros(4, 1), (torch.zeros(4, 8), torch.tensor([0.3, 1.2, -1, 0]))),
        (torch.zeros(4, 3), (torch.zeros(4, 8), LABELS + 5)),
        (None, (torch.zeros(4, 8), LABELS)),
    ],
)
def test_nothing_is_expected_where_nothing_can_be_read_off(workload, output, batch):
    expected, assumed = expected_loss(workload, output, batch)
    assert expected is None
    assert "initial_loss" in assumed


# -- gradients --------------------------------------------------------------------------------


class Faulty(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.used, self.other, self.fault = nn.Linear(8, 3), nn.Linear(8, 3), fault

    def forward(self, x):
        if self.fault == "dead":
            return self.used(x) + torch.relu(self.other(x) - 1e6)
        if self.fault == "infinite":
            return self.used(x) + 0 * (self.other(x).sum() - self.other(x).sum()).sqrt()
        return self.used(x)


@pytest.mark.parametrize(
    ("fault", "result", "said"),
    [
        ("unused", "warn", "none reaches other.weight, other.bias"),
        ("dead", "warn", "all zero in other.weight, other.bias"),
        ("infinite", "fail", "not finite in other.weight, other.bias"),
    ],
)
def test_parameters_that_no_good_gradient_reaches_are_named(make_workload, fault, result, said):
    found = results(make_workload(model=lambda: Faulty(fault)))["gradients"]
    assert (found.result, found.detail) == (result, said)


def test_a_frozen_parameter_is_no_fault(make_workload):
    def model():
        layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        layers[0].requires_grad_(False)
        return layers

    assert results(make_workload(model=model))["gradients"].detail == "reach all 2 trained parameter tensors"


def test_parameters_that_the_optimizer_was_not_given_are_named(make_workload):
    found = results(make_workload(optimizer=lambda params, lr: torch.optim.SGD(itertools.islice(params, 2), lr=lr)))
    assert found["gradients"].result == "warn"
    assert found["gradients"].detail == "not given to the optimizer: 2.weight, 2.bias"


# -- repeatability, learning by heart ---------------------------------------------------------


def test_an_optimizer_that_does_not_heed_the_rate_fails(make_workload):
    found = results(make_workload(optimizer=lambda params, lr: torch.optim.SGD(params, lr=0.01)))["gradients"]
    assert found.result == "fail"
    assert "whatever its lr" in found.detail


def test_a_source_of_randomness_outside_the_seeds_fails(make_workload):
    values = iter(range(10**6))
    found = results(make_workload(loss=lambda m, b: cross_entropy(m, b) * (1 + next(values) % 7)))
    assert found["same seed, same loss"].result == "fail"
    assert "trials cannot be compared" in found["same seed, same loss"].detail


def test_differences_of_rounding_alone_are_a_warning(make_workload):
    values = iter(range(10**6))
    found = results(make_workload(loss=lambda m, b: cross_entropy(m, b) * (1 + 1e-6 * (next(values) % 7))))
    assert found["same seed, same loss"].result == "warn"


def test_numpys_and_pythons_random_states_are_seeded(make_workload):
    def loss(model, batch):
        return cross_entropy(model, batch) * (1 + np.random.rand() / 10 + random.random() / 10)  # noqa: NPY002

    assert results(make_workload(loss=loss))["same seed, same loss"].result == "pass"


def test_an_optimizer_that_moves_nothing_does_not_learn_by_heart(make_workload):
    def optimizer(params, lr):
        return torch.optim.SGD([p.detach().clone().requires_grad_() for p in params], lr=lr)

    found = results(make_workload(optimizer=optimizer))
    assert found["learns one batch by heart"].result == "fail"
    assert "does not learn" in found["learns one batch by heart"].detail
    assert found["gradients"].result == "warn"


def test_a_rate_ten_times_off_is_forgiven(make_workload):
    found = results(make_workload(lr=0.0005))["learns one batch by heart"]
    assert found.result == "pass"
    assert "at lr 0.005" in found.detail


def test_a_model_too_simple_for_its_batch_is_warned_of(make_workload):
    x = torch.ones(64, 8)
    contradictory = TensorDataset(x, torch.arange(64) % 2)
    found = results(make_workload(train_data=contradictory))["learns one batch by heart"]
    assert found.result == "warn"
    assert "not by heart" in found.detail


# -- evaluation data --------------------------------------------------------------------------


def test_shared_examples_are_counted_by_content(make_workload, workload):
    train = workload.train_data
    x, y = (torch.cat([a, b[:10]]) for a, b in zip(workload.eval_data.tensors, train.tensors, strict=True))
    found = results(make_workload(eval_data=TensorDataset(x.clone(), y.clone())))["evaluation data apart"]
    assert found.result == "fail"
    assert found.detail == "10 in common (16.7%) among 60 evaluation and 200 training examples"


def test_a_few_repeated_examples_are_a_warning(make_workload, workload):
    many = torch.randn(400, 8, generator=torch.Generator().manual_seed(5))
    x = torch.cat([many, workload.train_data.tensors[0][:1]])
    found = results(
        make_workload(eval_data=TensorDataset(x, torch.cat([x[:-1, :3].argmax(1), workload.train_data.tensors[1][:1]])))
    )
    assert found["evaluation data apart"].result == "warn"
    assert found["evaluation data apart"].detail.startswith("1 in common (0.2%)")


def test_overlapping_subsets_and_the_same_object_are_found(make_workload, workload):
    whole = workload.train_data
    found = results(make_workload(train_data=Subset(whole, range(150)), eval_data=Subset(whole, range(140, 200))))
    assert found["evaluation data apart"].detail.startswith("10 in common")
    same = results(make_workload(train_data=whole, eval_data=whole))
    assert same["evaluation data apart"].detail == "eval_data is train_data itself"


def test_without_evaluation_data_only_a_warning_is_given(make_workload):
    found = results(make_workload(eval_data=None))
    assert [found[name].result for name in ("evaluation passes", "evaluation data apart")] == ["warn", "warn"]


def test_an_optimizer_that_takes_a_closure_is_told(make_workload):
    found = results(make_workload(optimizer=lambda params, lr: torch.optim.LBFGS(params, lr=lr)))["gradients"]
    assert found.result == "fail"
    assert "closure" in found.detail
    assert "cannot be used here" in found.detail


def test_a_metric_that_fails_is_told(make_workload):
    found = results(make_workload(metrics={"oops": lambda m, b: m(b[0]) + "a"}))["evaluation passes"]
    assert found.result == "fail"
    assert found.detail.startswith("TypeError")


def test_evaluation_data_that_gives_nothing_is_told(make_workload):
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    assert results(make_workload(eval_data=Nothing()))["evaluation passes"].detail == "eval_data gave no example"


def test_strings_before_the_tensors_of_a_batch_do_not_hide_its_length(make_workload, workload):
    data = [{"text": "a word", "id": i, "x": x, "y": y} for i, (x, y) in enumerate(workload.train_data)]

    def loss(model, batch):
        return cross_entropy(model, (batch["x"], batch["y"]))

    found = results(make_workload(train_data=data, eval_data=None, loss=loss), until="one batch passes")
    assert found["one batch passes"].detail == "16 examples, one loss each"
    assert batch_length({"text": ["a", "b"], "x": torch.zeros(2, 3)}) == 2
    assert batch_length(["one", "two", "three"]) == 3


def test_map_style_data_of_dictionaries_and_an_iterable_evaluation_pass(make_workload, workload):
    class Dictionaries(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, i):
            x, y = workload.train_data[i]
            return {"x": x, "y": y}

    class Stream(IterableDataset):
        def __iter__(self):
            return ({"x": x, "y": y} for x, y in workload.eval_data)

    def loss(model, batch):
        return cross_entropy(model, (batch["x"], batch["y"]))

    found = results(make_workload(train_data=Dictionaries(), eval_data=Stream(), loss=loss))
    assert {c.result for c in found.values()} == {"pass"}
    assert found["evaluation data apart"].detail.endswith("among 50 evaluation and 100 training examples")
