import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Subset

from workup.measure.stages import Clock, fields, stages, timed_copy

SLEEP = 0.003


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Scale:
    factor = 2.0

    def __call__(self, x):
        return x * self.factor


class Blur:
    def __init__(self, sleep=lambda seconds: None):
        self.sleep = sleep

    def __call__(self, x):
        self.sleep(SLEEP)
        return x


class Images(Dataset):
    """Planted: what reading one example calls, and what is done to it."""

    def __init__(self, transform=None, read=None, examples=40):
        self.x = torch.arange(examples * 8, dtype=torch.float32).reshape(examples, 8) / 100
        self.transform, self.read = transform, read

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.read:
            self.read(SLEEP)
        x = self.x[i]
        return (self.transform(x) if self.transform else x), i % 3


class Stream(IterableDataset):
    def __init__(self, transform):
        self.transform = transform

    def __iter__(self):
        return ((self.transform(torch.ones(8) * i), i % 3) for i in range(20))


def biggest(table):
    return table.loc[table.batch_seconds.idxmax()]


def test_each_transform_of_a_composition_has_its_own_row(make_workload, clock):
    table = stages(make_workload(train_data=Images(Compose([Scale(), Blur(clock.sleep)]))), batch_size=4)
    assert table.stage.tolist() == ["read", "Scale", "Blur", "collate", "transfer"]
    assert table.kind.tolist() == ["read", "transform", "transform", "collate", "transfer"]
    assert biggest(table).stage == "Blur"
    assert biggest(table).batch_seconds == pytest.approx(4 * SLEEP, rel=0.01)
    assert biggest(table).waiting == 1
    assert table.share.sum() == pytest.approx(1)
    np.testing.assert_allclose(table.example_seconds * 4, table.batch_seconds)


def test_a_slow_read_is_not_booked_to_the_transform(make_workload, clock):
    table = stages(make_workload(train_data=Images(Scale(), read=clock.sleep)), batch_size=4)
    assert table.stage.tolist() == ["read", "Scale", "collate", "transfer"]
    assert biggest(table).stage == "read"


def test_work_on_the_cpu_is_told_from_waiting(make_workload, clock):
    table = stages(make_workload(train_data=Images(Blur(clock.work), read=clock.sleep)), batch_size=4)
    assert table.set_index("stage").waiting[["read", "Blur"]].tolist() == pytest.approx([1, 0], abs=0.01)


@pytest.mark.parametrize("wrap", [lambda data: Subset(data, range(10)), lambda data: Subset(Subset(data, [1, 2]), [0])])
def test_transforms_of_a_wrapped_data_set_are_found(make_workload, clock, wrap):
    table = stages(make_workload(train_data=wrap(Images(Blur(clock.sleep))), batch_size=1), batch_size=4)
    assert biggest(table).stage == "Blur"


def test_an_iterable_data_set_and_more_batches_than_it_holds(make_workload):
    table = stages(make_workload(train_data=Stream(Blur())), batch_size=8, batches=5)
    assert table.stage.tolist() == ["read", "Blur", "collate", "transfer"]


def test_tensors_sliced_have_no_collate_stage(workload):
    assert stages(workload, batch_size=16).stage.tolist() == ["read", "transfer"]


def test_the_timed_copy_gives_the_same_examples_and_leaves_the_original_alone():
    data = Images(Compose([Scale(), Blur()]))
    before = copy.copy(data.transform.transforms)
    clock = Clock()
    twin = timed_copy(data, clock)
    torch.testing.assert_close(twin[3][0], data[3][0])
    assert twin.transform.transforms[0].factor == 2.0
    assert data.transform.transforms == before
    assert [stage for _, stage in clock.spent] == ["Scale", "Blur"]


def test_a_composition_that_refuses_wrapped_parts_counts_as_reading(make_workload, clock):
    class Strict(Compose):
        def __call__(self, x):
            assert all(type(t) is Blur for t in self.transforms)
            return super().__call__(x)

    table = stages(make_workload(train_data=Images(Strict([Blur(clock.sleep)]))), batch_size=4)
    assert table.stage.tolist() == ["read", "collate", "transfer"]
    assert biggest(table).stage == "read"


class Records(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = torch.full((8,), float(i))
        return {"x": x, "y": i % 3, "weight": torch.ones(()), "raw": torch.zeros(1000), "name": str(i)}


def record_loss(model, batch):
    batch = {key: value.to("cpu") if hasattr(value, "to") else value for key, value in batch.items()}
    assert batch["raw"].shape[1] == 1000
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["weight"]


def test_a_field_only_moved_and_measured_is_unused(make_workload):
    table = fields(make_workload(train_data=Records(), loss=record_loss), batch_size=16).set_index("field")
    assert table.used.to_dict() == {"x": True, "y": True, "weight": True, "raw": False}
    assert table.bytes.to_dict() == {"x": 16 * 8 * 4, "y": 16 * 8, "weight": 16 * 4, "raw": 16 * 1000 * 4}
    assert table.share.sum() == pytest.approx(1)
    assert (table.seconds > 0).all()


def test_the_third_of_three_tensors_unpacked_is_unused(make_workload):
    data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.zeros(40, dtype=torch.long), torch.randn(40, 50))

    def loss(model, batch):
        x, y, _ = batch
        return F.cross_entropy(model(x), y, reduction="none")

    assert fields(make_workload(train_data=data, loss=loss), batch_size=16).used.tolist() == [True, True, False]


def test_a_field_read_by_numpy_is_used(make_workload):
    def loss(model, batch):
        assert batch["raw"].numpy().sum() == 0
        return record_loss(model, batch)

    table = fields(make_workload(train_data=Records(), loss=loss), batch_size=16).set_index("field")
    assert table.used["raw"]


def test_fields_of_the_users_own_collate_have_no_cost_of_their_own(make_workload):
    def collate(examples):
        return torch.utils.data.default_collate([{"x": e["x"], "y": e["y"], "weight": e["weight"]} for e in examples])

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    workload = make_workload(train_data=Records(), loss=loss, loader={"collate_fn": collate})
    table = fields(workload, batch_size=16)
    assert table.field.tolist() == ["x", "y", "weight"]
    assert table.used.tolist() == [True, True, False]
    assert table.seconds.isna().all()
