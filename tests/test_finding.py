import dataclasses
import json

import numpy as np
import pytest

from workup import Finding, Prescription
from workup.finding import prescribe

FACTS = {"rule": "playbook: C1", "summary": "…"}


class Own:
    batch_size, lr, max_train_steps, schedule, precision = 64, 0.1, 1000, None, "fp32"


def test_a_finding_comes_back_from_json_and_names_what_json_cannot_hold():
    finding = Finding(name="best_lr", value=np.float64(0.1), interval=(0.05, 0.2), evidence={"worst": np.inf}, **FACTS)
    back = Finding.from_dict(json.loads(json.dumps(finding.to_dict(), allow_nan=False)))
    assert (back.value, back.interval, back.evidence) == (0.1, (0.05, 0.2), {"worst": "inf"})


def test_a_finding_that_cannot_tell_must_say_what_would_settle_it():
    with pytest.raises(ValueError, match="settle"):
        Finding(name="best_lr", value=None, **FACTS)
    assert not Finding(name="stability", value="cannot_tell", settle="a longer run", **FACTS).told


def test_without_findings_the_prescription_is_what_the_user_has():
    same = prescribe({}, workload=Own)
    assert (same.batch_size, same.peak_lr, same.warmup_steps, same.clip_norm, same.max_train_steps) == (
        64,
        0.1,
        0,
        None,
        1000,
    )
    assert set(same.sources.values()) == {"as you have it"}


def test_warmup_brings_its_own_peak_and_is_prepended_to_the_steps():
    found = {
        "best_lr": Finding(name="best_lr", value=0.05, **FACTS),
        "warmup_steps": Finding(name="warmup_steps", value=100, evidence={"peak_lr": 0.4}, **FACTS),
    }
    made = prescribe(found, workload=Own)
    assert (made.peak_lr, made.warmup_steps, made.max_train_steps) == (0.4, 100, 1100)
    none_needed = {**found, "warmup_steps": Finding(name="warmup_steps", value=0, evidence={"peak_lr": None}, **FACTS)}
    assert prescribe(none_needed, workload=Own).peak_lr == 0.05


def test_the_lines_for_plain_pytorch_run_and_follow_the_schedule():
    import torch

    made = Prescription(
        batch_size=8, peak_lr=0.4, warmup_steps=2, max_train_steps=6, clip_norm=1.5, schedule=True, sources={}
    )
    model = torch.nn.Linear(2, 1)
    head, _, loop = made.as_torch().partition("# in the loop, each step:\n")
    scope = {
        "torch": torch,
        "model": model,
        "make_optimizer": torch.optim.SGD,
        "schedule": lambda fraction: 1 - fraction,
    }
    exec(head, scope)
    rates = []
    for _ in range(6):
        scope["loss"] = 100 * model(torch.ones(1, 2)).pow(2).mean()
        rates.append(scope["optimizer"].param_groups[0]["lr"])
        exec(loop, scope)
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1])
    assert scope["batch_size"] == 8
    assert "max_norm=1.5" in loop


@pytest.mark.parametrize("clip", [None, 2.0])
def test_the_other_frameworks_lines_are_python_and_carry_every_setting(clip):
    made = Prescription(
        batch_size=8, peak_lr=0.4, warmup_steps=2, max_train_steps=6, clip_norm=clip, schedule=False, precision="bf16"
    )
    transformers = made.as_transformers()
    compile(transformers, "lines", "exec")
    for setting in ("batch_size=8", "learning_rate=0.4", "warmup_steps=2", "max_steps=6", "bf16=True"):
        assert setting in transformers
    assert ("max_grad_norm=2" in transformers) == (clip is not None)
    assert ("gradient_clip_val=2" in made.as_lightning()) == (clip is not None)


def test_without_warmup_or_schedule_there_is_no_scheduler_to_paste():
    plain = Prescription(batch_size=8, peak_lr=0.4, warmup_steps=0, max_train_steps=6, clip_norm=None, schedule=False)
    assert "schedule" not in plain.as_torch()
    assert "scheduler" not in plain.as_lightning()
    ramped = dataclasses.replace(plain, warmup_steps=2)
    assert "scheduler.step()" in ramped.as_torch()
    assert '"lr_scheduler"' in ramped.as_lightning()


def test_the_rate_prescribed_is_the_one_for_the_whole_run_where_that_carries():
    """The rate that leads after a short trial is too high for a long one (playbook: A4)."""
    best = Finding(name="best_lr", value=0.3, evidence={"carried": {"value": 0.14}}, **FACTS)
    assert prescribe({"best_lr": best}, workload=Own).peak_lr == 0.14
    untold = dataclasses.replace(best, evidence={"carried": {"value": None}})
    assert prescribe({"best_lr": untold}, workload=Own).peak_lr == 0.3
    edge = dataclasses.replace(best, evidence={"carried": {"value": 0.2}, "lr_at_edge": True, "cautious_lr": 0.15})
    assert prescribe({"best_lr": edge}, workload=Own).peak_lr == 0.15
    scheduled = type("Own", (Own,), {"schedule": lambda fraction: 1 - fraction})
    assert prescribe({"best_lr": best}, workload=scheduled).peak_lr == 0.3
