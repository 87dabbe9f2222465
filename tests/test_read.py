"""`workup read`: what it prints, and the exit code that a script goes by."""

import json

import numpy as np
import pytest

from workup import cli, logs
from workup.experiments import existing_logs


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name, *, steps=300, **columns):
    """A CSV log of a run whose loss falls through noise, with more columns or others."""
    rng = np.random.default_rng(0)
    t = np.arange(steps)
    table = {"step": t, "loss": 2 * np.exp(-t / 80) + 0.5 + 0.02 * rng.standard_normal(steps), **columns}
    rows = (",".join(map(str, row)) for row in zip(*table.values(), strict=True))
    with open(name, "w") as file:
        file.write("\n".join([",".join(table), *rows]) + "\n")
    return table


def read(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["read", *arguments])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def blown_up(steps=300):
    loss = run("x.csv", steps=steps)["loss"].copy()
    loss[200:] = loss[199] + 0.1 * np.arange(steps - 200)
    return loss


def test_a_clean_run_exits_with_0(capsys):
    run("clean.csv", lr=np.full(300, 0.1), grad_norm=1 + 0.1 * np.random.default_rng(1).random(300))
    code, out, err = read(capsys, "clean.csv")
    assert (code, err) == (0, "")
    assert out.startswith(
        "clean.csv: CSV, 300 losses, steps 0 to 299\n  read as step=step, loss=loss, lr=lr, grad_norm"
    )
    assert "note: Not logged: eval_loss.\nStability: stable" in out
    assert out.endswith("No problem found.\n\n")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"loss": "blown up"}, "stability"),
        ({"loss": "nan"}, "stability"),
        ({"grad_norm": np.r_[np.ones(299), np.inf]}, "clip_norm"),
        ({"seconds": np.full(300, 0.1), "data_seconds": np.full(300, 0.05)}, "input_bound"),
        (
            {"val_loss": np.where(np.isin(np.arange(300), [3, 50, 60, 150, 170, 290]), 1.0, np.nan)},
            "evaluation_interval",
        ),
    ],
)
def test_a_problem_exits_with_1_and_is_named(capsys, columns, problem):
    if columns.get("loss") == "blown up":
        columns = {"loss": blown_up()}
    elif "loss" in columns:
        columns = {"loss": np.r_[np.linspace(2, 1, 200), np.full(100, np.nan)]}
    run("bad.csv", **columns)
    code, out, _ = read(capsys, "bad.csv", "--json")
    assert (code, json.loads(out)[0]["problems"]) == (1, [problem])


def test_losses_that_were_not_finite_on_the_way_are_a_problem_and_two_losses_are_no_verdict(capsys):
    loss = run("x.csv")["loss"].copy()
    loss[100:103] = np.nan
    run("holes.csv", loss=loss)
    code, out, _ = read(capsys, "holes.csv")
    assert code == 1
    assert "3 losses before the last finite one are not finite" in out
    run("short.csv", steps=2)
    code, out, _ = read(capsys, "short.csv")
    assert code == 0
    assert out.endswith("Whether training is stable cannot be told.\n\n")


def test_a_log_that_cannot_be_read_exits_with_2_and_the_others_are_read(capsys):
    run("clean.csv")
    code, out, err = read(capsys, "none.csv", "clean.csv", "--json")
    assert code == 2
    assert err.startswith("Error: none.csv: no such file")
    assert [(run["log"], run["problems"]) for run in json.loads(out)] == [("clean.csv", [])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--column", "loss"], "column 'loss': write it as OURS=THEIRS"),
        (["--column", "loss=nll"], "clean.csv has no such column. Did you mean"),
        (["--column", "los=loss"], "'los' is no name of ours. Did you mean 'loss'?"),
        (["--follow", "--json"], "read --follow: name one LOG"),
    ],
)
def test_a_mistake_in_what_was_asked_exits_with_2(capsys, arguments, message):
    run("clean.csv", null=np.zeros(300))
    code, _, err = read(capsys, "clean.csv", *arguments)
    assert code == 2
    assert message in err


def test_json_holds_what_is_not_finite_by_name(capsys):
    run("bad.csv", grad_norm=np.r_[np.ones(299), np.inf])
    _, out, _ = read(capsys, "bad.csv", "--json")
    printed = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [finding["name"] for finding in printed[0]["findings"]] == ["stability", "clip_norm"]


def test_following_prints_a_line_at_each_change_and_exits_by_the_last(capsys, monkeypatch):
    columns = run("live.csv")
    looks = iter([60, 60, 300])
    kept = {number: {key: values[:number] for key, values in columns.items()} for number in (60, 300)}
    kept[300]["loss"] = blown_up()

    def wait(_seconds):
        number = next(looks, None)
        if number is None:
            raise KeyboardInterrupt
        run("live.csv", steps=number, **kept[number])

    run("live.csv", steps=40, **{key: values[:40] for key, values in columns.items()})
    monkeypatch.setattr(logs.time, "sleep", wait)
    code, out, _ = read(capsys, "live.csv", "--follow")
    printed = [line.partition(", ")[0] for line in out.splitlines() if line.startswith("step ")]
    assert printed == ["step 39", "step 59", "step 299"]
    assert code == 1


def test_evaluations_between_logged_losses_stand_at_the_loss_before(here):
    loss = run("log.csv")["loss"]
    evals = {60: 1.0, 105: 1.0, 155: 2.5, 205: 1.0, 255: 0.9}
    rows = [f"{t},{loss[t]}," if t not in evals else f"{t},,{evals[t]}" for t in range(300)]
    (here / "log.csv").write_text("\n".join(["step,loss,val_loss", *rows]))
    found = {f.name: f for f in existing_logs.judge(logs.read("log.csv"))}
    assert found["stability"].evidence["steps"] == 295
    assert found["evaluation_interval"].value == 50


def test_norms_logged_after_clipping_give_no_threshold_and_are_told():
    norms = np.minimum(np.exp(np.random.default_rng(0).standard_normal(300)), 1.0)
    run("clipped.csv", grad_norm=norms)
    found = existing_logs.judge(logs.read("clipped.csv"))[1]
    assert (found.name, found.value) == ("clip_norm", None)
    assert "stop at 1: they were logged after clipping" in found.summary
    run("open.csv", grad_norm=np.exp(np.random.default_rng(0).standard_normal(300)))
    assert existing_logs.judge(logs.read("open.csv"))[1].is_conclusive
