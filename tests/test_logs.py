"""Logs as other people's programs write them, whole and damaged."""

import contextlib
import json
import struct

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workup import logs, tfevents
from workup.errors import ParameterError
from workup.trace import Trace, Trial


def write(path, text):
    path.write_text(text)
    return path


def lines(*rows):
    return "".join(f"{row}\n" for row in rows)


def values(log, name):
    return log.series[name].to_dict()


# -- formats --------------------------------------------------------------------------------


@pytest.fixture
def trainer_state(tmp_path):
    """As transformers writes it: a loss every 10 steps, an evaluation every 20, a line at the end on the whole run."""
    history = []
    for step in range(10, 101, 10):
        entry = {"epoch": step / 50, "grad_norm": 1.0 + step, "learning_rate": 1e-3, "loss": 3 - step / 100}
        history.append({**entry, "step": step})
        if step % 20 == 0:
            rest = {"eval_runtime": 1.5, "eval_samples_per_second": 900.0, "eval_steps_per_second": 7.0}
            history.append({"epoch": step / 50, "eval_loss": 4 - step / 100, **rest, "step": step})
    history[4]["loss"] = float("nan")
    history.append({"epoch": 2.0, "step": 100, "train_loss": 2.5, "train_runtime": 60.0, "total_flos": 1e15})
    history[-1]["train_samples_per_second"] = 160.0
    state = {"best_metric": None, "global_step": 100, "log_history": history, "max_steps": 100}
    return write(tmp_path / "trainer_state.json", json.dumps(state, indent=2))


def test_a_trainer_state_is_read_with_its_nan_and_without_its_mean_over_the_run(trainer_state):
    log = logs.read(trainer_state)
    assert log.format == "transformers trainer_state.json"
    expected = {step: 3 - step / 100 for step in range(10, 101, 10)}
    loss = values(log, "loss")
    assert np.isnan(loss.pop(40))
    expected.pop(40)
    assert loss == expected
    assert values(log, "eval_loss") == {step: 4 - step / 100 for step in range(20, 101, 20)}
    assert values(log, "grad_norm")[100] == 101
    assert values(log, "throughput") == {100: 160.0}
    assert log.notes == ()


def test_lightnings_sparse_rows_are_joined_by_step(tmp_path):
    rows = ["epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss"]
    for step in (4, 9, 14, 19):
        rows += [f",{0.1 / (1 + step)},{step},,,", f"0,,{step},,{2.0 - step / 20},"]
    rows += ["0,,19,,,1.5", "0,,19,1.4,,"]
    log = logs.read(write(tmp_path / "metrics.csv", lines(*rows)))
    assert log.columns["loss"] == "train_loss_step"
    assert log.table().columns.tolist() == ["step", "lr", "loss", "eval_loss"]
    assert log.table()["step"].tolist() == [4, 9, 14, 19]
    assert log.table()["loss"].tolist() == [1.8, 1.55, 1.3, 1.05]
    assert values(log, "eval_loss") == {19: 1.5}


def test_a_wandb_export_is_read_by_what_follows_the_runs_name(tmp_path):
    head = '"Step","olive-7 - train/loss","olive-7 - train/loss__MIN","olive-7 - train/loss__MAX"'
    rows = [f'"{step}","{2 - step / 10}","0","9"' for step in range(10)]
    log = logs.read(write(tmp_path / "export.csv", lines(head, *rows)))
    assert log.columns == {"step": "Step", "loss": "olive-7 - train/loss"}
    assert values(log, "loss")[3] == 1.7
    assert log.notes == ("Not logged: lr, grad_norm, eval_loss.",)


def test_two_runs_in_one_export_are_told_apart(tmp_path):
    log = logs.read(write(tmp_path / "two.csv", lines("Step,a - loss,b - loss", "1,2.0,3.0")))
    assert values(log, "loss") == {1: 2.0}
    assert log.notes[0] == "loss is read from 'a - loss'; as likely: b - loss."


def test_json_lines_may_be_nested_and_hold_other_things(tmp_path):
    rows = [
        {"step": 1, "train": {"loss": 2.0, "lr": 0.1}, "note": "begin"},
        {"step": 2, "train": {"loss": None, "lr": None}},
        {"step": 3, "train": {"loss": float("inf"), "lr": 0.3}, "eval": {"loss": 1.0}, "config": {"layers": [1, 2]}},
    ]
    log = logs.read(write(tmp_path / "log.jsonl", lines("[1, 2]", *map(json.dumps, rows), '{"step": 4, "train": {"lo')))
    assert str(values(log, "loss")) == "{1: 2.0, 2: nan, 3: inf}"
    assert values(log, "lr") == {1: 0.1, 3: 0.3}
    assert values(log, "eval_loss") == {3: 1.0}
    assert log.notes[0] == "1 malformed or cut lines are left out."


def test_a_trace_of_a_study_comes_back_as_it_was(tmp_path):
    step = np.arange(20)
    eval_loss = np.where(step % 5 == 4, 1.5, np.nan)
    table = pd.DataFrame({"step": step, "loss": 2.0 - step / 20, "grad_norm": 1.0, "eval_loss": eval_loss})
    table.loc[19, "loss"] = np.nan
    trace = Trace(trial=Trial(lr=0.1, steps=20, batch_size=4), steps=table.assign(clipped=step == 3))
    (tmp_path / "t.parquet").write_bytes(trace.to_bytes())
    back = logs.read(tmp_path / "t.parquet")
    assert back.series["loss"].tolist()[:19] == table["loss"].tolist()[:19]
    assert values(back, "eval_loss") == {4: 1.5, 9: 1.5, 14: 1.5, 19: 1.5}
    assert values(back, "clipped")[3] == 1


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_may_have_any_separator_spaces_and_a_byte_order_mark(tmp_path, separator):
    text = lines(*(separator.join(cells) for cells in (["Iter", " Train Loss "], ["10", " 2.5"], ["20", "2.25"])))
    log = logs.read(write(tmp_path / "log.txt", "\ufeff" + text))
    assert values(log, "loss") == {10: 2.5, 20: 2.25}


# -- TensorBoard ----------------------------------------------------------------------------


def varint(number):
    most, rest = divmod(number, 128)
    return bytes([rest]) if not most else bytes([rest | 128]) + varint(most)


def field(number, content):
    """A protobuf field: a whole number, a 4- or 8-byte number packed already, or bytes."""
    kind = 0 if isinstance(content, int) else 2
    body = varint(content) if kind == 0 else varint(len(content)) + content
    return varint(number << 3 | kind) + body


def fixed(number, form, content):
    return varint(number << 3 | (1 if form == "<d" else 5)) + struct.pack(form, content)


def record(step, scalars, *, tensor=False):
    def value(tag, number):
        held = field(8, field(1, 1) + field(5, struct.pack("<f", number))) if tensor else fixed(2, "<f", number)
        return field(1, field(1, tag.encode()) + held)

    summary = b"".join(value(tag, number) for tag, number in scalars.items())
    event = fixed(1, "<d", 1e9 + step / 4) + field(2, step) + field(5, summary)
    return struct.pack("<QI", len(event), 0) + event + struct.pack("<I", 0)


@pytest.mark.parametrize("tensor", [False, True])
def test_scalars_are_read_from_an_event_file(tmp_path, tensor):
    version = fixed(1, "<d", 1e9) + field(3, b"brain.Event:2")
    data = struct.pack("<QI", len(version), 0) + version + struct.pack("<I", 0)
    data += b"".join(record(step, {"train/loss": 2 - step / 128, "lr": 0.5}, tensor=tensor) for step in (0, 150, 300))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(data)
    log = logs.read(tmp_path)
    assert log.format == "TensorBoard events"
    assert values(log, "loss") == {step: 2 - step / 128 for step in (0, 150, 300)}
    assert values(log, "time") == {0: 1e9, 150: 1e9 + 37.5, 300: 1e9 + 75}


def test_an_event_file_as_tensorboard_itself_wrote_it():
    # Two records by tensorboard 2.21's EventFileWriter: a simple value; a float64 scalar and a vector as tensors.
    data = bytes.fromhex(
        "1b000000000000001a0d9e13090000000065cdcd4110ac022a0d0a0b0a046c6f737315000020409547eaba4e00000000000000c4b905ad"
        "090000800065cdcd4110ad022a400a1b0a096576616c2f6c6f7373420e08021200320800000000000002400a210a077765696768747342"
        "160801120412020803220c0000803f0000803f0000803fb73cb34d"
    )
    rows, damaged = tfevents.scalars(data)
    assert damaged == 0
    first, second = {"step": 300, "wall_time": 1e9, "loss": 2.5}, {"step": 301, "wall_time": 1e9 + 1, "eval/loss": 2.25}
    assert rows == [first, second]


def test_a_resume_in_a_second_event_file_goes_back_and_stands(tmp_path):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"".join(record(s, {"loss": 2.0}) for s in range(6)))
    (tmp_path / "events.out.tfevents.2.host").write_bytes(b"".join(record(s, {"loss": 1.0}) for s in range(4, 8)))
    log = logs.read(tmp_path)
    assert values(log, "loss") == {**dict.fromkeys(range(4), 2.0), **dict.fromkeys(range(4, 8), 1.0)}
    assert "loss: goes back 1 times, as after a resume; the later lines stand, 2 are left out." in log.notes


def test_a_cut_event_file_is_read_to_where_it_ends(tmp_path):
    whole = b"".join(record(step, {"loss": 1.0}) for step in range(5))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(whole[:-9])
    log = logs.read(tmp_path)
    assert list(log.series["loss"].index) == [0, 1, 2, 3]
    assert log.notes[0] == "1 malformed or cut lines are left out."


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_damage_to_an_event_file_is_more_than_damaged_records(data):
    whole = bytearray(b"".join(record(step, {"loss": 1.0}, tensor=step % 2 == 0) for step in range(6)))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    rows, damaged = tfevents.scalars(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    assert all(isinstance(row["step"], int) for row in rows)
    assert damaged >= 0


# -- what a log can have wrong --------------------------------------------------------------


def test_every_spelling_of_a_number_that_is_none_is_understood(tmp_path):
    spelled = {
        0: ("2.5", 2.5),
        1: ("nan", np.nan),
        2: ("NaN", np.nan),
        3: ("null", np.nan),
        4: ("None", np.nan),
        5: ("inf", np.inf),
        6: ("Infinity", np.inf),
        7: ("-inf", -np.inf),
        8: ("1e-3", 0.001),
        9: ("", None),
        10: ("2,5x", None),
    }
    rows = (f'{step},"{text}"' for step, (text, _) in spelled.items())
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss", *rows)))
    expected = {step: number for step, (_, number) in spelled.items() if number is not None}
    assert str(values(log, "loss")) == str(expected)
    assert "loss: 1 cells are no such number, and left out." in log.notes


def test_outside_loss_and_norm_a_nan_is_a_blank_and_beside_an_evaluation_it_is_one_everywhere(tmp_path):
    rows = ["1,2.0,nan,nan,0.5", "2,nan,1.9,0.1,nan", "3,nan,null,0.1,nan"]
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss,val_loss,lr,grad_norm", *rows)))
    assert str(values(log, "loss")) == "{1: 2.0, 3: nan}"
    assert str(values(log, "grad_norm")) == "{1: 0.5, 3: nan}"
    assert values(log, "eval_loss") == {2: 1.9}
    assert values(log, "lr") == {2: 0.1, 3: 0.1}


def test_lines_that_cannot_be_read_are_counted_and_left_out(tmp_path):
    rows = ["1,2.0", "2,1.9,3,1.8", "step,loss", "", "x,1.7", "\0\0\0", "4", "5,1.5"]
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss", *rows)))
    assert values(log, "loss") == {1: 2.0, 5: 1.5}
    assert log.notes[:2] == (
        "1 malformed or cut lines are left out.",
        "step: 2 cells are no such number, and left out.",
    )


def test_a_quote_that_never_closes_costs_no_line(tmp_path):
    log = logs.read(write(tmp_path / "log.csv", '"step","loss"\n"1","2.0"\n"2","1.9"\n"3","1.'))
    assert values(log, "loss") == {1: 2.0, 2: 1.9, 3: 1.0}


def test_after_a_resume_the_later_lines_stand(tmp_path):
    steps = [*range(0, 100, 10), *range(60, 200, 10)]
    rows = (f"{step},{number}" for number, step in enumerate(steps))
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss", *rows)))
    assert list(log.series["loss"].index) == list(range(0, 200, 10))
    assert values(log, "loss")[60] == 10
    assert log.notes[0] == "loss: goes back 1 times, as after a resume; the later lines stand, 4 are left out."


def test_one_stray_line_is_no_resume(tmp_path):
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss", *(f"{s},1" for s in [*range(50), 0]))))
    assert len(log.series["loss"]) == 50
    assert "1 are left out" in log.notes[0]


def test_lines_out_of_order_are_sorted(tmp_path):
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss", "0,5", "2,3", "1,4", "3,2")))
    assert log.series["loss"].tolist() == [5, 4, 3, 2]
    assert log.notes[0] == "loss: steps are out of order; sorted."


@given(steps=st.lists(st.integers(-5, 30), min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_whatever_the_order_steps_increase_and_the_last_of_each_kept_step_stands(steps):
    ordered, _ = logs._in_order(pd.Series(np.arange(len(steps), dtype=float), pd.Index(steps)))
    assert np.all(np.diff(ordered.index) > 0)
    assert len(ordered) > 0
    assert all(steps[int(number)] == step for step, number in ordered.items())


def test_without_steps_lines_are_counted(tmp_path):
    log = logs.read(write(tmp_path / "log.csv", lines("loss,lr", "3,0.1", "2,0.1")))
    assert values(log, "loss") == {0: 3.0, 1: 2.0}
    assert log.notes[0] == "No column counts steps: lines are counted."


def test_milliseconds_become_seconds_and_a_negative_norm_is_none(tmp_path):
    log = logs.read(write(tmp_path / "log.csv", lines("step,loss,step_time_ms,gnorm", "1,2,250,-1", "2,2,500,3")))
    assert values(log, "seconds") == {1: 0.25, 2: 0.5}
    assert values(log, "grad_norm") == {2: 3.0}
    assert "grad_norm: 1 cells are no such number, and left out." in log.notes


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/loss", "loss"),
        ("Loss/train", "loss"),
        ("training_loss", "loss"),
        ("train/ce_loss", "loss"),
        ("val/loss", "eval_loss"),
        ("loss/val", "eval_loss"),
        ("eval_wiki_loss", "eval_loss"),
        ("lr-Adam", "lr"),
        ("train/learning_rate", "lr"),
        ("opt/lr", "lr"),
        ("grad_2.0_norm_total", "grad_norm"),
        ("train/grad_norm", "grad_norm"),
        ("gnorm", "grad_norm"),
        ("trainer/global_step", "step"),
        ("_step", "step"),
        ("Iteration", "step"),
        ("batch_time", "seconds"),
        ("data_time", "data_seconds"),
        ("train_samples_per_second", "throughput"),
        ("images/sec", "throughput"),
        ("_timestamp", "time"),
        ("Wall time", "time"),
        ("eval_samples_per_second", None),
        ("epoch", None),
        ("train_accuracy", None),
        ("lossless", None),
    ],
)
def test_columns_are_known_by_the_names_they_usually_have(name, known):
    chosen, _ = logs._columns([name], {}, "log.csv")
    assert chosen == ({known: name} if known else {})


def test_columns_can_be_given(tmp_path):
    path = write(tmp_path / "log.csv", lines("n,nll,loss", "1,2.0,9", "2,1.9,9"))
    log = logs.read(path, columns={"loss": "nll", "step": "n"})
    assert values(log, "loss") == {1: 2.0, 2: 1.9}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"los": "nll"}, "'los' is no name of ours. Did you mean 'loss'?"),
        ({"loss": "nl"}, "has no such column. Did you mean 'nll'?"),
        ({}, "no training loss found among the columns ['n', 'nll']. Give --column loss=NAME."),
    ],
)
def test_a_column_that_is_not_there_is_told_with_the_nearest(tmp_path, columns, message):
    with pytest.raises(ParameterError) as raised:
        logs.read(write(tmp_path / "log.csv", lines("n,nll", "1,2.0")), columns=columns)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n\n",
        "step,loss\n",
        "{}",
        "[]",
        '{"log_history": []}',
        '{"log_history": 3}',
        "nothing",
        "PAR1 but not",
        "{",
    ],
)
def test_what_is_no_log_is_a_users_mistake(tmp_path, content):
    with pytest.raises(ParameterError, match=r"log\.txt"):
        logs.read(write(tmp_path / "log.txt", content))


def test_a_folder_of_no_log_or_of_several_says_so(tmp_path):
    with pytest.raises(ParameterError, match="no such file, nor a folder that holds one of trainer_state"):
        logs.read(tmp_path)
    for version in ("version_0", "version_1"):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "metrics.csv", lines("step,loss", "1,2"))
    with pytest.raises(ParameterError, match=r"holds 2 logs\. Name one of .*version_0, .*version_1"):
        logs.read(tmp_path)
    assert values(logs.read(tmp_path / "version_1"), "loss") == {1: 2.0}


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_log_or_a_users_mistake(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "log"
    path.write_bytes(content)
    with contextlib.suppress(ParameterError):
        assert len(logs.read(path).series["loss"]) > 0


# -- following ------------------------------------------------------------------------------


def test_a_growing_log_is_read_again_and_a_half_written_one_waited_for(tmp_path):
    path = write(tmp_path / "log.csv", lines("step,loss", "1,2.0"))
    grows = iter([lines("step,loss", "1,2.0", "2,1.9"), "", lines("step,loss", "1,2.0", "2,1.9", "3,nan")])
    seen = logs.follow(path, wait=lambda: path.write_text(next(grows)))
    assert [len(next(seen).series["loss"]) for _ in range(3)] == [1, 2, 3]


def test_what_cannot_be_read_at_first_is_not_waited_for(tmp_path):
    with pytest.raises(ParameterError):
        next(logs.follow(tmp_path / "none.csv"))
