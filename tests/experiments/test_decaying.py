import dataclasses
import math

import pytest

import workup
from workup.experiments.learning_rate import decays


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, False),
        (lambda f: min(1.0, 0.01 + 10 * f), False),
        (lambda f: 1 - 0.3 * f, False),
        (lambda f: 0.5 * (1 + math.cos(math.pi * f)), True),
        (lambda f: 1.0 if f < 0.6 else 0.1, True),
    ],
    ids=["none", "warmup alone", "falls a little", "cosine", "a late drop"],
)
def test_a_schedule_decays_where_it_ends_below_half_of_its_peak(schedule, expected):
    assert decays(dataclasses.replace(workup.load("digits-mlp"), schedule=schedule)) is expected
