import numpy as np
import pandas as pd
import pytest

from workup.judge import causes


def norms(layers=3, steps=100, seed=0):
    values = np.exp(0.2 * np.random.default_rng(seed).standard_normal((steps, layers)))
    return pd.DataFrame(values, columns=[f"layer{k}" for k in range(layers)])


@pytest.mark.parametrize("bad", [10.0, float("inf"), float("nan")])
def test_the_layer_whose_norm_moved_first_is_named_with_its_step(bad):
    table = norms()
    table.loc[58, "layer1"] = bad
    table.loc[59:, "layer0"] = 100.0
    layer, step, _ = causes.moved_first(table, 60)
    assert (layer, step) == ("layer1", 58)


def test_noise_moves_no_layer_and_a_silent_layer_is_left_out():
    assert causes.moved_first(norms().assign(dead=0.0), 60) is None


def test_at_the_very_start_a_norm_is_compared_with_its_first():
    table = norms(steps=20)
    table.loc[2:, "layer2"] = 50.0
    assert causes.moved_first(table, 2)[:2] == ("layer2", 2)


def test_a_batch_stands_out_of_the_norms_before_it():
    values = norms().layer0.tolist()
    assert not causes.outlying(values, 50)
    assert causes.outlying([*values[:50], 100.0], 50)
    assert causes.outlying([*values[:50], float("nan")], 50)
    assert not causes.outlying(values, 2)
    assert not causes.outlying(values, 1000)


def test_one_layer_out_of_scale_is_named_and_unequal_ones_are_not():
    assert causes.oversized(pd.Series({"a": 0.6, "b": 60.0, "c": 0.5, "d": 0.7})) == ("b", 100.0)
    assert causes.oversized(pd.Series({"a": 0.6, "b": 3.0, "c": 0.5, "d": 0.02})) is None
    assert causes.oversized(pd.Series({"a": 0.6})) is None


SUSPECT = {"text": "The batch of step 40 stands out at 4 of 4 rates.", "test": "without its update the loss rises."}


def test_a_suspect_that_its_experiment_does_not_confirm_is_told_and_is_not_the_cause():
    signs = {"begin": 40, "lr": 0.2, "stable_lr": 0.1, "batch": {**SUSPECT, "confirmed": False}}
    found = causes.judge(signs)
    assert found.value == "learning_rate"
    assert "But without its update" in found.summary


def test_without_a_rate_that_is_stable_or_a_sign_no_cause_is_told():
    found = causes.judge({"begin": 40, "lr": 0.2})
    assert not found.is_conclusive
    assert causes.judge({}).value == "none"
