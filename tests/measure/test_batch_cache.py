"""Batches kept for a sweep are those that each trial would draw."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from workup import Trial
from workup.measure import data
from workup.measure.train import train


class Drawn(Dataset):
    """Examples that count how often they are read, and on request are augmented from the global random stream."""

    def __init__(self, augmented=False):
        self.augmented, self.read = augmented, 0
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read += 1
        noise = torch.rand(4) if self.augmented else 0
        return self.x[index] + noise, index % 2


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


#: The second goes on where the first ends; the third has another seed; the fourth begins again.
TRIALS = [
    Trial(lr=0.1, steps=6, batch_size=16),
    Trial(lr=0.3, steps=11, batch_size=16),
    Trial(lr=0.3, steps=6, batch_size=16, seed=1),
    Trial(lr=1.0, steps=11, batch_size=16),
]


def both(workload, room=2**20):
    """Losses of the trials, each drawing its own batches, then from one cache; examples read in either way."""
    source, seen = workload.train_data, []
    cache = data.BatchCache(workload, device="cpu", room=room)
    for own in (None, cache):
        source.read = 0
        losses = [train(workload, trial, batch_cache=own).steps.loss.tolist() for trial in TRIALS]
        seen.append((losses, source.read))
    return seen


def test_batches_are_read_once_for_all_trials_of_a_seed(make_workload):
    workload = make_workload(train_data=Drawn(), model=model, loss=loss)
    (plain, read), (kept, once) = both(workload)
    assert kept == plain
    assert (read, once) == (16 * 34, 16 * (11 + 6))


@pytest.mark.parametrize("workers", [0, 1])
def test_augmented_batches_are_drawn_anew_where_the_trial_draws_from_the_same_stream(make_workload, workers):
    options = {"num_workers": 1} if workers else {}
    workload = make_workload(train_data=Drawn(augmented=True), model=model, loss=loss, loader=options)
    (plain, _), (kept, _) = both(workload)
    assert kept == plain


def test_a_batch_that_a_trial_wrote_into_is_drawn_anew(make_workload):
    def careless(model, batch):
        values = loss(model, batch)
        batch[0].mul_(0.5)
        return values

    workload = make_workload(train_data=Drawn(), model=model, loss=careless)
    (plain, _), (kept, _) = both(workload)
    assert kept == plain


@pytest.mark.parametrize("room", [0, 700])
def test_what_does_not_fit_is_drawn_anew(make_workload, room):
    workload = make_workload(train_data=Drawn(), model=model, loss=loss)
    (plain, _), (kept, again) = both(workload, room)
    assert kept == plain
    assert again > 16 * (11 + 6)


def test_batches_of_more_than_tensors_are_drawn_anew(make_workload):
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

        def to(self, device):
            return self

    def pairs(examples):
        return Pair(torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples]))

    workload = make_workload(
        train_data=Drawn(), model=model, loader={"collate_fn": pairs}, loss=lambda m, b: loss(m, (b.x, b.y)).mean()
    )
    (plain, read), (kept, again) = both(workload)
    assert kept == plain
    assert again == read


def test_an_example_that_cannot_be_read_fails_every_trial_with_its_own_reason(make_workload):
    class Broken(Drawn):
        def __getitem__(self, index):
            if self.read >= 40:
                raise OSError("shard 3 is gone")
            return super().__getitem__(index)

    workload = make_workload(train_data=Broken(), model=model, loss=loss)
    cache = data.BatchCache(workload, device="cpu", room=2**20)
    seen = [train(workload, trial, batch_cache=cache) for trial in TRIALS[:2]]
    assert [trace.status for trace in seen] == ["failed", "failed"]
    assert all("OSError: shard 3 is gone" in trace.reason for trace in seen)
