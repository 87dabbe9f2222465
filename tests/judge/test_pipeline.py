import ast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup.errors import ParameterError
from workup.finding import NO_MATTER
from workup.judge import pipeline


def three(step, together, loader=0.01):
    """Rounds of the three speeds [s]."""
    rows = []
    for index, (alone, both) in enumerate(zip(step, together, strict=True)):
        rows += [(index, "loader", loader), (index, "step", alone), (index, "together", both)]
    return pd.DataFrame(rows, columns=["round", "what", "step_seconds"])


def setting(seconds, workers=0, prefetch=None, *, batching="collate", status="finished", stall=0.0):
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        "pin_memory": False,
        "persistent_workers": workers > 0,
        "batching": batching,
        "first_batch_seconds": 0.1,
        "step_seconds": seconds,
        "stall_seconds": stall,
        "epoch_step_seconds": seconds + stall / 10,  # epochs of ten steps
        "status": status,
        "reason": "" if status == "finished" else "OSError: gone",
    }


def stage_rows(**seconds):
    kinds = {"read": "read", "collate": "collate", "transfer": "transfer"}
    rows = [(name, kinds.get(name, "transform"), value, 1.0) for name, value in seconds.items()]
    return pd.DataFrame(rows, columns=["stage", "kind", "batch_seconds", "waiting"])


FIELDS = pd.DataFrame({"field": ["x"], "bytes": [64], "share": [1.0], "used": [True], "seconds": [1e-5]})
SYNCS = pd.DataFrame(columns=["file", "line", "function", "code", "per_step"])


def named(bound, stages, sweep, fields=FIELDS, syncs=SYNCS):
    return pipeline.causes(bound, stages=stages, sweep=pd.DataFrame(sweep), fields=fields, syncs=syncs)


BOUND = pipeline.input_bound(three([0.02] * 5, [0.10] * 5), batch_size=64)
FREE = pipeline.input_bound(three([0.02] * 5, [0.02] * 5), batch_size=64)


def test_a_step_twice_as_long_with_its_loader_is_input_bound_by_half():
    found = pipeline.input_bound(three([0.02] * 5, [0.04] * 5, loader=0.02), batch_size=64)
    assert found.value is True
    assert found.evidence["waiting_share"] == pytest.approx(0.5)
    assert found.evidence["examples_per_second"] == pytest.approx(1600)
    assert found.evidence["examples_per_second_unbound"] == pytest.approx(3200)
    assert "3,200 examples/s in place of 1,600" in found.summary
    assert found.confidence == "high"


def test_a_loader_hidden_behind_the_step_is_not():
    found = pipeline.input_bound(three([0.02, 0.021, 0.02], [0.0205, 0.021, 0.0205]), batch_size=64)
    assert found.value is False
    assert found.evidence["waiting_share"] < 0.05


def test_rounds_that_disagree_cannot_tell_and_say_what_would():
    found = pipeline.input_bound(three([0.02] * 3, [0.02, 0.03, 0.06]), batch_size=64)
    assert not found.is_conclusive
    assert found.settle
    assert found.evidence["waiting_share_interval"] == (0.0, pytest.approx(2 / 3))


def test_one_odd_round_of_nine_changes_nothing():
    found = pipeline.input_bound(three([0.02] * 9, [0.0202] * 8 + [0.5]), batch_size=64)
    assert found.value is False
    assert not pipeline.input_bound(three([0.02] * 5, [0.0202] * 4 + [0.5]), batch_size=64).is_conclusive


def test_a_wait_near_the_mark_that_could_gain_little_does_not_matter():
    found = pipeline.input_bound(three([0.02] * 5, [0.0212, 0.0222, 0.0216, 0.0225, 0.0213]), batch_size=64)
    assert found.value == NO_MATTER
    assert found.is_conclusive
    assert "at most 11% of a step" in found.summary
    assert named(found, stage_rows(read=1.0), [setting(0.04)]).value == "none"


@pytest.mark.parametrize("rounds", [5, 9, 20])
def test_the_interval_holds_the_true_share_however_many_rounds_there_are(rounds):
    rng, held, widths = np.random.default_rng(rounds), 0, []
    for _ in range(200):
        together = 0.02 / (1 - 0.12) * np.exp(rng.normal(0, 0.03, rounds))
        low, high = pipeline.input_bound(three([0.02] * rounds, together), batch_size=64).evidence[
            "waiting_share_interval"
        ]
        held += low <= 0.12 <= high
        widths.append(high - low)
    assert held >= 0.9 * 200
    assert rounds < 20 or np.mean(widths) < 0.06


def test_a_wait_without_a_cause_that_stands_out_says_what_could_be_gained_at_most():
    found = named(BOUND, stage_rows(read=0.001), [setting(0.10), setting(0.099, 1, 2)])
    assert found.value == "none"
    assert "at most 80% of a step" in found.summary
    assert named(FREE, stage_rows(read=0.001), [setting(0.02)]).summary == "Nothing stands out."


def test_what_would_tell_is_named_as_it_was_given():
    unclear = three([0.02] * 3, [0.02, 0.03, 0.06])
    assert pipeline.input_bound(unclear, batch_size=64, settle="workup run x").settle == "workup run x"
    rows = [setting(0.10), setting(0.06, 1, 2)]
    assert pipeline.loader_settings(BOUND, pd.DataFrame(rows), batch_size=64, settle="workup run x").settle
    assert not pipeline.loader_settings(FREE, pd.DataFrame(rows), batch_size=64, settle="workup run x").settle


def test_passes_that_disagree_are_noisy_and_more_of_them_are_less_so():
    def passes(*seconds):
        return pd.DataFrame([setting(s) for s in seconds])

    assert pipeline.noisy(passes(0.1, 0.2))
    assert not pipeline.noisy(passes(0.1, 0.11))
    assert pipeline.by_setting(passes(0.1, 0.12)).noise[0] == pytest.approx(0.01 / 0.11)
    assert pipeline.by_setting(passes(0.1, 0.12, 0.1, 0.12)).noise[0] < 0.01 / 0.11


def test_a_missing_speed_is_named():
    speeds = three([0.02], [0.04])
    with pytest.raises(ParameterError, match="no rows for step"):
        pipeline.input_bound(speeds[speeds.what != "step"], batch_size=64)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=7),
    st.sampled_from([0.001, 4.0, 1024.0]),
)
def test_the_verdict_does_not_depend_on_the_unit_of_time(pairs, scale):
    step, together = np.array(pairs).T
    first = pipeline.input_bound(three(step, together), batch_size=8)
    second = pipeline.input_bound(three(step * scale, together * scale), batch_size=8)
    assert first.value == second.value
    low, high = first.evidence["waiting_share_interval"]
    np.testing.assert_allclose((low, high), second.evidence["waiting_share_interval"], atol=1e-9)
    assert 0 <= low <= first.evidence["waiting_share"] <= high < 1


def test_the_fastest_setting_wins_and_fewer_workers_among_equals():
    rows = [setting(0.10), setting(0.06, 1, 2), setting(0.0405, 2, 2), setting(0.040, 4, 2), setting(0.0402, 2, 8)]
    found = pipeline.loader_settings(BOUND, pd.DataFrame(rows), batch_size=64)
    assert found.value == {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "persistent_workers": True}
    assert found.evidence["gain"] == pytest.approx(0.10 / 0.0405)
    ast.parse(found.evidence["lines"])
    assert "num_workers=2" in found.evidence["lines"]
    assert "persistent_workers=True" in found.evidence["lines"]


def test_the_users_setting_stays_where_nothing_is_clearly_faster():
    sweep = pd.DataFrame([setting(0.041, 2, 2), setting(0.060), setting(0.040, 4, 2)])
    found = pipeline.loader_settings(BOUND, sweep, batch_size=8)
    assert found.value["num_workers"] == 2
    assert found.summary.startswith("Keep the loader")


def test_a_gain_within_the_noise_between_passes_changes_nothing():
    noisy = [setting(0.04), setting(0.06), setting(0.030, 2, 2), setting(0.052, 2, 2)]
    calm = [setting(0.05), setting(0.05), setting(0.041, 2, 2), setting(0.041, 2, 2)]
    assert pipeline.loader_settings(BOUND, pd.DataFrame(noisy), batch_size=8).value["num_workers"] == 0
    assert pipeline.loader_settings(BOUND, pd.DataFrame(calm), batch_size=8).value["num_workers"] == 2
    assert pipeline.loader_settings(BOUND, pd.DataFrame(noisy), batch_size=8).confidence == "low"
    assert pipeline.loader_settings(BOUND, pd.DataFrame(calm), batch_size=8).confidence == "high"
    assert pipeline.loader_settings(BOUND, pd.DataFrame(calm[::2]), batch_size=8).confidence == "low"  # a single pass


def test_a_step_that_does_not_wait_keeps_its_loader_whatever_a_noisy_sweep_says():
    sweep = pd.DataFrame([setting(0.04), setting(0.02, 2, 2)])
    found = pipeline.loader_settings(FREE, sweep, batch_size=8)
    assert found.value["num_workers"] == 0
    assert found.summary.endswith("the step does not wait for it.")
    assert pipeline.loader_settings(BOUND, sweep, batch_size=8).value["num_workers"] == 2


def test_workers_started_again_each_epoch_are_found_where_that_is_long_beside_the_epoch():
    ended = {**setting(0.02, 2, 2, stall=0.2), "persistent_workers": False}
    sweep = [ended, setting(0.02, 2, 2)]
    assert named(FREE, stage_rows(read=0.001), sweep).value == ["epoch_stall"]
    assert named(FREE, stage_rows(read=0.001), sweep[::-1]).value == "none"
    found = pipeline.loader_settings(FREE, pd.DataFrame(sweep), batch_size=8)
    assert found.value["persistent_workers"] is True
    assert found.evidence["gain"] == pytest.approx(2)


def test_collating_tensors_one_by_one_is_compared_but_never_recommended():
    rows = [
        setting(0.010, batching="slices"),
        setting(0.005, batching="examples"),
        setting(0.02, 1, 2, batching="slices"),
    ]
    found = pipeline.loader_settings(BOUND, pd.DataFrame(rows), batch_size=64)
    assert found.value["num_workers"] == 0
    assert "BatchSampler(RandomSampler(train_data), 64" in found.evidence["lines"]
    assert "5 ms a step" in found.caveats[0]
    ast.parse(found.evidence["lines"])


def test_failed_settings_are_passed_over_and_all_failed_cannot_tell():
    gone = setting(np.nan, 2, 2, status="failed")
    assert pipeline.loader_settings(BOUND, pd.DataFrame([setting(0.1), gone]), batch_size=8).value["num_workers"] == 0
    found = pipeline.loader_settings(BOUND, pd.DataFrame([gone]), batch_size=8)
    assert not found.is_conclusive
    assert "OSError: gone" in found.summary


def test_a_slow_stage_is_a_cause_by_name_only_where_the_step_waits():
    stages = stage_rows(read=0.001, Blur=0.08, collate=0.0001, transfer=0.0)
    found = named(BOUND, stages, [setting(0.1)])
    assert found.value == ["expensive_transform"]
    assert found.evidence["expensive_transform"]["where"] == "Blur"
    assert found.summary.startswith("Blur is costly (80 ms a batch): ")
    assert found.evidence["expensive_transform"]["saves_seconds"] == pytest.approx(0.08)
    assert named(FREE, stages, [setting(0.02)]).value == "none"


def test_where_the_wait_cannot_be_told_nor_can_its_causes_but_waste_can():
    unsure = pipeline.input_bound(three([0.02] * 3, [0.02, 0.03, 0.06]), batch_size=64)
    stages = stage_rows(read=0.08, transfer=0.0)
    assert not named(unsure, stages, [setting(0.1)]).is_conclusive
    raw = pd.DataFrame([{"field": "raw", "bytes": 4 << 20, "share": 0.9, "used": False, "seconds": 0.004}])
    assert named(unsure, stages, [setting(0.1)], fields=raw).value == ["unused_field"]


@pytest.mark.parametrize(("waiting", "name"), [(0.9, "slow_read"), (0.1, "slow_decode")])
def test_reading_that_waits_is_told_from_reading_that_works(waiting, name):
    stages = stage_rows(read=0.08, transfer=0.0).assign(waiting=waiting)
    assert named(BOUND, stages, [setting(0.1)]).value == [name]


def test_stages_spread_over_the_workers_that_share_them():
    stages = stage_rows(read=0.03, transfer=0.0)
    assert named(BOUND, stages, [setting(0.1)]).value == ["slow_read"]
    assert named(BOUND, stages, [setting(0.1, 4, 2)]).value == "none"


def test_prefetch_is_the_cause_where_it_does_nearly_as_much_as_workers():
    quick = stage_rows(read=0.001, transfer=0.0)
    own = setting(0.10, 1, 1)
    assert named(BOUND, quick, [own, setting(0.05, 1, 8), setting(0.05, 2, 2)]).value == ["small_prefetch"]
    assert named(BOUND, quick, [own, setting(0.10, 1, 8), setting(0.05, 2, 2)]).value == ["too_few_workers"]
    both = named(BOUND, quick, [own, setting(0.08, 1, 8), setting(0.02, 2, 2)])
    assert both.value == ["too_few_workers", "small_prefetch"]


def test_an_unused_field_and_a_wait_are_causes_whether_or_not_the_step_waits_for_data():
    raw = {"field": "raw", "bytes": 4 << 20, "share": 0.9, "used": False, "seconds": 0.004}
    wait = {"file": "train.py", "line": 7, "function": "loss", "code": "loss.item()", "per_step": 1.0}
    found = named(
        FREE,
        stage_rows(read=0.001),
        [setting(0.02)],
        fields=pd.concat([FIELDS, pd.DataFrame([raw])]),
        syncs=pd.DataFrame([wait]),
    )
    assert found.value == ["unused_field", "synchronisation"]
    assert found.evidence["unused_field"]["where"] == "raw"
    assert found.evidence["synchronisation"]["where"] == "train.py:7"
    now_and_then = pd.DataFrame([{**wait, "per_step": 0.1}])
    small = pd.DataFrame([{**raw, "bytes": 1000}])
    assert named(FREE, stage_rows(read=0.001), [setting(0.02)], fields=small, syncs=now_and_then).value == "none"


def test_a_wait_carries_the_caveat_that_a_cpu_does_not_feel_it():
    wait = pd.DataFrame([{"file": "train.py", "line": 7, "function": "loss", "code": "loss.item()", "per_step": 1.0}])
    found = named(FREE, stage_rows(read=0.001), [setting(0.02)], syncs=wait)
    assert "the host waits for the device at train.py:7" in found.summary.lower()
    assert found.caveats == (pipeline.WAITS,)
    assert named(FREE, stage_rows(read=0.001), [setting(0.02)]).caveats == ()
