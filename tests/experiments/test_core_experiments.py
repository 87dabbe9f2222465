"""The five core experiments on one small workload, each against what is known of it."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workup import Prescription, Study, Trace, Trial, Workload, WorkloadError
from workup.experiments import causes, clipping, final_run, instability, learning_rate, warmup
from workup.experiments.session import Session
from workup.judge.prescription import prescribe
from workup.measure.architecture import Audit
from workup.trace import COLUMNS

#: Quadratic bowl 0.5 * CURVATURE * w^2: gradient descent contracts by |1 - lr * CURVATURE| a step.
CURVATURE = 10.0


class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))


def bowl_loss(model, batch):
    return 0.5 * CURVATURE * model.w**2 + 0 * batch[0][:, 0]


@pytest.fixture
def session(tmp_path):
    workload = Workload(
        name="bowl",
        model=Bowl,
        train_data=TensorDataset(torch.zeros(32, 1)),
        eval_data=TensorDataset(torch.zeros(8, 1)),
        loss=bowl_loss,
        optimizer=torch.optim.SGD,
        batch_size=8,
        lr=0.01,
        max_train_steps=600,
    )
    return Session(
        notebook="04_learning_rate",
        workload=workload,
        reference="",
        study=Study.open(tmp_path / "s", workload="bowl", fingerprint={}),
        device="cpu",
        seed=0,
        budget="smoke",
        knobs={},
        fingerprint="f",
    )


def sweep(session):
    traces = session.run(learning_rate.plan(session))
    return learning_rate.refine(session, learning_rate.widen(session, traces))


def test_the_sweep_widens_until_the_known_optimum_and_the_known_edge_are_bracketed(session):
    traces = sweep(session)
    best, peak, _, unstable = learning_rate.conclude(session, traces)
    # lr* = 1 / curvature converges in one step; 2 / curvature is the edge of stability.
    assert best.value == pytest.approx(1 / CURVATURE, rel=0.01)
    assert unstable.interval[0] <= 2 / CURVATURE <= unstable.interval[1]
    assert best.evidence["horizon_steps"] == 60
    assert session.study.findings()["best_lr"].value == best.value
    assert peak.name == "peak_lr"
    assert best.at == peak.at == {"batch_size": 8}


def test_where_every_trial_fails_the_reason_is_said(session):
    def metric(model, batch):
        raise ValueError("no such class")

    broken = dataclasses.replace(session, workload=dataclasses.replace(session.workload, metrics={"oops": metric}))
    with pytest.raises(WorkloadError, match=r"all 3 trials fail alike, .*: step 6: ValueError: no such class"):
        sweep(broken)
    broken.workload.metrics.clear()  # mended: what failed is run again
    assert {trace.status for trace in sweep(broken)} <= {"finished", "diverged"}


def test_rates_at_lr_star_and_just_above_are_shown(session):
    traces = sweep(session)
    best, *_ = learning_rate.conclude(session, traces)
    shown = [trace.trial.lr for trace in learning_rate.around_best(traces, best)]
    assert shown[0] == best.value
    assert shown == sorted(shown)


def test_multiples_of_lr_star_break_where_theory_says(session):
    session = dataclasses.replace(session, notebook="05_instability", knobs={"lr": 0.08, "steps": 80})
    traces = session.run(instability.plan(session))
    table = instability.table(traces)
    # 0.08 and 0.16 lie below 2 / 10, 0.4 and 0.8 above.
    assert table.stability[:2].tolist() == ["stable", "stable"]
    assert table.stability[2:].isin(["diverged", "early"]).all()
    remedies, fixed, found = explain(session, traces)
    # Adam's multiples are of its own rate; of the others, each is paired at 5 and at 10 times lr*.
    assert [(fix, times) for fix, times in remedies if fix == "adam"] == [("adam", 5.0), ("adam", 10.0)]
    paired = {(times, t.lr) for (fix, times), t in remedies.items() if fix not in ("adam", "lower lr")}
    assert paired == {(5.0, traces[2].trial.lr), (10.0, traces[3].trial.lr)}
    assert fixed.lower.iloc[-1] == 0
    assert (fixed.stability[fixed.fix == "adam"] == "stable").all()
    test, unstable, cause, fix = found
    assert test.value == "stable"
    assert unstable.value == pytest.approx(0.4)
    assert unstable.interval == pytest.approx((0.16, 0.4))
    assert fix.value == "none"
    assert {"adam", "lower lr"} <= set(fix.evidence["restored"])
    assert cause.value == "learning_rate"


def test_a_best_rate_that_is_itself_unstable_is_said_to_be(session):
    session = dataclasses.replace(session, notebook="05_instability", knobs={"lr": 0.4, "steps": 80})
    test, *_ = explain(session, session.run(instability.plan(session)))[2]
    assert test.caveats[0].startswith("At 0.4 itself training is not calm: ")


def explain(session, traces):
    """The cause and the remedies of notebook 05, as it takes them."""
    adam, model = instability.another_optimizer(session, traces), instability.audit(session)
    remedies = instability.plan_fixes(session, traces, adam, model)
    fixed = instability.fix_table(remedies, session.run(list(remedies.values())))
    return remedies, fixed, instability.conclude(session, traces, fixed, model, causes.find(session, traces))


def test_changes_that_the_model_allows_are_among_the_remedies(session):
    session = dataclasses.replace(session, notebook="05_instability", knobs={"lr": 0.08, "steps": 30})
    traces = session.run(instability.plan(session))
    model = Audit(layers=1, norms=1, branches=("f",), post_norm=("f",), bare=(), zero_init="w=0", pre_norm="pre=True")
    remedies = instability.plan_fixes(session, traces, [], model)
    hot = {(fix, times): trial for (fix, times), trial in remedies.items() if fix in ("zero-init", "pre-norm")}
    assert {key: trial.change for key, trial in hot.items()} == {
        (fix, times): change
        for fix, change in (("zero-init", "w=0"), ("pre-norm", "pre=True"))
        for times in (5.0, 10.0)
    }
    assert {trial.lr for trial in hot.values()} == {traces[2].trial.lr, traces[3].trial.lr}


def test_a_workload_stable_at_ten_times_lr_star_is_told_it_needs_nothing(session):
    session = dataclasses.replace(session, notebook="05_instability", knobs={"lr": 0.01, "steps": 80})
    traces = session.run(instability.plan(session))
    remedies, _, (test, unstable, cause, fix) = explain(session, traces)
    assert list(remedies) == [("nothing", 2.0)]
    assert (test.value, unstable.value, cause.value, fix.value) == ("stable", None, "none", "none")


def test_a_run_too_short_to_judge_is_called_neither_stable_nor_unstable(session):
    session = dataclasses.replace(session, notebook="05_instability", knobs={"lr": 0.01, "steps": 2})
    traces = session.run(instability.plan(session))
    remedies, _, (test, unstable, _, fix) = explain(session, traces)
    assert list(remedies) == [("nothing", 2.0)]
    assert (test.value, unstable.value, fix.value) == ("cannot_tell", None, None)
    assert "cannot be told" in unstable.summary
    assert "cannot be told" in fix.summary


def test_warmup_plans_orders_of_magnitude_to_a_tenth_of_the_run_and_finds_that_none_is_enough(session):
    session = dataclasses.replace(session, notebook="06_warmup", knobs={"unstable_lr": 0.25, "lr": 0.1})
    trials = warmup.plan(session)
    assert {t.warmup_steps for t in trials} == {0, 10, 40}
    assert {t.lr for t in trials} == {0.1, 0.25, 0.790569, 2.5}
    assert {t.steps for t in trials} == {120}
    (found,) = warmup.conclude(session, warmup.refine(session, session.run(trials)))
    # Past 2 / curvature no ramp helps a quadratic.
    assert found.evidence["enough"] is False or found.evidence["peak_lr"] is None
    assert prescribe(session.study.findings(), workload=session.workload).peak_lr == 0.01


@pytest.mark.parametrize("known", [{}, {"unstable_lr": 0.01}])
def test_no_warmup_is_needed_only_where_a_rate_is_known_to_be_unstable(session, known):
    session = dataclasses.replace(session, notebook="06_warmup", knobs={"lr": 0.01, **known})
    (found,) = warmup.conclude(session, session.run(warmup.plan(session)))
    # Without a ramp all of 0.01, 0.03 and 0.1 train: the edge is at 0.2.
    assert found.value == (0 if known else None)
    assert known or "no rate is known to be unstable" in found.summary


def test_a_rate_on_a_plateau_or_that_learns_less_than_half_of_what_lr_star_does_is_stuck():
    def trace(lr, losses):
        steps = pd.DataFrame({name: np.zeros(len(losses)) for name in COLUMNS}).assign(
            step=range(len(losses)), loss=losses, eval_loss=np.nan
        )
        return Trace(trial=Trial(lr=lr, steps=len(losses), batch_size=1), steps=steps)

    noise, t = 0.01 * np.random.default_rng(0).standard_normal(200), np.arange(200)
    falling, flat = 1 + 2 * np.exp(-t / 20) + noise, np.full(200, 2.9) + noise
    # Over half is learned, but from the first quarter on nothing more, where lr* goes on.
    plateau, slow = np.maximum(falling, 1.8), 3 - 2 * t / 200 + noise
    traces = [trace(0.1, slow), trace(0.2, falling), trace(0.5, plateau), trace(1.0, np.append(3.0, flat[1:]))]
    assert instability.table(traces).stability.tolist() == ["stable", "stable", "stuck", "stuck"]
    assert instability.shaky(traces) == traces[2:]


def test_a_trial_that_fails_is_neither_stable_nor_unstable(session):
    def metric(model, batch):
        if model.w.abs() > 10:
            raise ValueError("out of range")
        return batch[0][:, 0]

    broken = dataclasses.replace(session.workload, metrics={"oops": metric})
    session = dataclasses.replace(session, workload=broken, notebook="05_instability", knobs={"lr": 0.08, "steps": 80})
    traces = session.run(instability.plan(session))
    assert [trace.status for trace in traces] == ["finished", "finished", "failed", "failed"]
    assert instability.table(traces).stability.tolist() == ["stable", "stable", "cannot_tell", "cannot_tell"]
    assert "ValueError: out of range" in instability.verdict(traces[2]).summary


def test_the_threshold_comes_from_the_unclipped_norms_of_the_rate_at_hand(session):
    session = dataclasses.replace(session, notebook="07_clipping", knobs={"lr": 0.01, "high_lr": 0.25, "steps": 100})
    traces = session.run(clipping.plan(session))
    clipped = clipping.plan_clipped(session, traces)
    # |g| = 10 * 0.9^t at lr 0.01.
    norms = 10 * 0.9 ** np.arange(100)
    expected = [np.percentile(norms, p) for p in (90, 75, 50)]
    assert [t.clip_norm for t in clipped] == pytest.approx([expected[0], *expected], rel=1e-3)
    assert [t.lr for t in clipped] == [0.01] + [0.25] * 3
    assert clipping.plan_open(session, traces) == {}
    found, share = clipping.conclude(session, traces, session.run(clipped), clipping.open_table({}, []))
    assert share.rule.startswith("playbook: E")
    assert found.name == "clip_norm"


def test_a_threshold_is_not_ruled_out_by_trials_that_failed(session):
    def metric(model, batch):
        if model.w.abs() > 10:
            raise ValueError("out of range")
        return batch[0][:, 0]

    broken = dataclasses.replace(session.workload, metrics={"oops": metric})
    knobs = {"lr": 0.01, "high_lr": 0.8, "steps": 100, "clip_norm": 1e4}
    session = dataclasses.replace(session, workload=broken, notebook="07_clipping", knobs=knobs)
    traces = session.run(clipping.plan(session))
    clipped = session.run(clipping.plan_clipped(session, traces))
    for found in clipping.conclude(session, traces, clipped, clipping.open_table({}, [])):
        assert not found.is_conclusive
        assert "trials failed (step " in found.summary


def test_on_thorough_the_open_questions_on_clipping_are_measured(session):
    knobs = {"lr": 0.05, "high_lr": 0.25, "steps": 100}
    session = dataclasses.replace(session, notebook="07_clipping", budget="thorough", knobs=knobs)
    traces = session.run(clipping.plan(session))
    questions = clipping.plan_open(session, traces)
    assert [(t.warmup_steps, bool(t.clip_norm), t.clip_percentile, t.clip_from) for t in questions.values()] == [
        (0, True, None, 0),
        (0, False, 90, 0),
        (10, False, None, 0),
        (10, True, None, 0),
        (10, True, None, 10),
    ]
    opened = clipping.open_table(questions, session.run(list(questions.values())))
    clip, _ = clipping.conclude(session, traces, session.run(clipping.plan_clipped(session, traces)), opened)
    assert clip.evidence["open_questions"]["adaptive"]["final"] == opened.final[1]
    assert [text.count(";") for text in clip.caveats if "E6" in text] == [1, 2]


def test_the_final_run_pairs_seeds_and_keeps_steps_equal(session):
    session = dataclasses.replace(session, notebook="11_final_run", knobs={"steps": 40})
    prescription = Prescription(
        batch_size=8, peak_lr=0.1, warmup_steps=5, max_train_steps=605, clip_norm=None, schedule=False
    )
    trials = final_run.plan(session, prescription)
    assert {(t.steps, t.batch_size) for runs in trials.values() for t in runs} == {(40, 8)}
    assert [t.seed for t in trials["present"]] == [t.seed for t in trials["prescribed"]] == [0, 1, 2]
    groups = {name: session.run(runs) for name, runs in trials.items()}
    assert final_run.more_seeds(session, prescription, groups) is groups
    (found,) = final_run.conclude(session, prescription, groups)
    assert found.at == {"lr": 0.1, "batch_size": 8, "warmup_steps": 5, "clip_norm": None}
    # At lr 0.01 the loss is 5 * 0.9^(2 t); at 1 / curvature it reaches 0.
    assert found.value == pytest.approx(5 * 0.9**80, rel=1e-3)


def test_settings_that_are_todays_are_not_compared_with_themselves(session):
    session = dataclasses.replace(session, notebook="11_final_run", knobs={"steps": 40})
    prescription = session.prescription
    trials = final_run.plan(session, prescription)
    groups = {name: session.run(runs) for name, runs in trials.items()}
    (found,) = final_run.conclude(session, prescription, groups)
    assert (found.value, found.evidence["matters"]) == (0.0, False)
    assert "nothing to compare" in found.summary


def test_a_final_loss_is_the_mean_of_the_last_tenth_and_missing_where_the_trial_ended_early():
    def trace(losses, steps):
        table = pd.DataFrame({name: np.zeros(len(losses)) for name in COLUMNS}).assign(loss=losses)
        return Trace(trial=Trial(lr=0.1, steps=steps, batch_size=1), steps=table)

    assert learning_rate.final_loss(trace(np.arange(20.0), 20)) == 18.5
    assert np.isnan(learning_rate.final_loss(trace(np.arange(19.0), 20)))
