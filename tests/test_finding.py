import dataclasses
import json

import numpy as np
import pytest

from workup import Finding, Prescription

FACTS = {"rule": "playbook: C1", "summary": "…"}


def test_a_finding_comes_back_from_json_and_names_what_json_cannot_hold():
    finding = Finding(
        name="best_lr", value=np.float64(0.1), interval=(0.05, 0.2), evidence={"worst": np.inf}, at={"lr": 0.2}, **FACTS
    )
    back = Finding.from_dict(json.loads(json.dumps(finding.to_dict(), allow_nan=False)))
    assert (back.value, back.interval, back.evidence) == (0.1, (0.05, 0.2), {"worst": "inf"})
    assert back.at == {"lr": 0.2}


def test_a_finding_that_cannot_tell_must_say_what_would_settle_it():
    with pytest.raises(ValueError, match="settle"):
        Finding(name="best_lr", value=None, **FACTS)
    assert not Finding(name="stability", value="cannot_tell", settle="a longer run", **FACTS).is_conclusive


def test_the_lines_for_plain_pytorch_run_and_follow_the_schedule():
    import torch

    made = Prescription(batch_size=8, peak_lr=0.4, warmup_steps=2, max_train_steps=6, clip_norm=1.5, schedule=True)
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
