"""The figures, by what is in them: data, scales, artists, words."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from workup.finding import NO_MATTER, Finding
from workup.show import plots, style
from workup.trace import Trace, Trial


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def trace(loss, *, lr=0.1, seed=0, status="finished", norm=None, evals=None):
    n = len(loss)
    steps = pd.DataFrame(
        {
            "step": np.arange(n),
            "lr": lr,
            "loss": np.asarray(loss, float),
            "grad_norm": np.ones(n) if norm is None else np.asarray(norm, float),
            "clipped": False,
            "eval_loss": np.full(n, np.nan) if evals is None else np.asarray(evals, float),
            "seconds": 0.01,
            "data_seconds": 0.001,
            "examples": 64,
        }
    )
    return Trace(trial=Trial(lr=lr, steps=max(n, 1), batch_size=64, seed=seed), steps=steps, status=status)


def sweep(finals, statuses=None):
    statuses = statuses or ["finished"] * len(finals)
    rows = zip(10.0 ** np.arange(-3, -3 + len(finals)), finals, statuses, strict=True)
    return pd.DataFrame([{"lr": lr, "seed": 0, "status": s, "final": f} for lr, f, s in rows])


def texts(ax):
    return [text.get_text() for text in ax.texts]


def points(ax, marker):
    return [line for line in ax.lines if line.get_marker() == marker and len(line.get_xdata())]


def best_lr(**changes):
    given = {"name": "best_lr", "value": 0.01, "rule": "playbook: C1", "summary": "0.01 trains best."}
    return Finding(**{**given, "interval": (0.005, 0.05), **changes})


# -- axis plot ------------------------------------------------------------------------------


def test_axis_plot_draws_trials_on_log_axes_with_failed_ones_as_crosses_at_the_top():
    ax = plots.axis_plot(sweep([2.0, 0.1, 0.5, np.nan, np.nan], ["finished"] * 3 + ["diverged"] * 2))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    (dots,), (crosses,) = points(ax, "o"), points(ax, "X")
    assert dots.get_xdata().tolist() == pytest.approx([0.001, 0.01, 0.1])
    assert dots.get_ydata().tolist() == [2.0, 0.1, 0.5]
    assert crosses.get_xdata() == pytest.approx([1.0, 10.0])
    top = crosses.get_transform().transform([(1.0, crosses.get_ydata()[0])])[0, 1]
    assert top > ax.transData.transform((1.0, 2.0))[1]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("learning rate", "final training loss")


def test_axis_plot_stars_the_best_shades_both_regions_and_states_the_finding():
    finding = best_lr(evidence={"infeasible": [1.0]})
    unstable = Finding(name="unstable_lr", value=1.0, rule="playbook: C3", summary="It rises at 1.")
    ax = plots.axis_plot(sweep([2.0, 0.1, 0.5, 9.0]), best=finding, unstable=unstable)
    (star,), (cross,) = points(ax, "*"), points(ax, "X")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((0.01, 0.1))
    assert cross.get_xdata() == pytest.approx([1.0])  # finished, and still judged infeasible
    spans = {to_hex(patch.get_facecolor()).upper(): patch.get_extents() for patch in ax.patches}
    assert set(spans) == {style.GREEN, style.VERMILLION}
    assert {"as good", "unstable"} <= set(texts(ax))
    assert ax.get_title(loc="left") == "0.01 trains best."


def test_axis_plot_of_negative_losses_is_linear_in_the_loss():
    ax = plots.axis_plot(sweep([-1.0, -3.0, -2.0]))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")


def test_axis_plot_joins_the_medians_over_seeds():
    table = pd.concat([sweep([2.0, 0.1]), sweep([4.0, 0.3]), sweep([3.0, 0.9])])
    line = next(line for line in plots.axis_plot(table).lines if line.get_linestyle() == "-")
    assert line.get_ydata().tolist() == [3.0, 0.3]


def test_axis_plot_where_every_trial_failed_shows_only_crosses():
    ax = plots.axis_plot(
        sweep([np.nan, np.nan], ["diverged"] * 2), best=best_lr(value=None, interval=None, settle="Lower.")
    )
    assert [line.get_marker() for line in ax.lines if len(line.get_xdata())] == ["X"]


# -- curves ---------------------------------------------------------------------------------


def test_loss_curves_are_labelled_by_rate_in_order_and_marked_where_they_end():
    traces = [trace(np.geomspace(2, 0.1, 100), lr=0.1), trace(np.geomspace(2, 1, 100), lr=0.01)]
    traces.append(trace([2.0, 50.0, 900.0, np.nan], lr=1.0, status="diverged"))
    ax = plots.loss_curves(traces)
    assert set(texts(ax)) == {"0.01", "0.1", "1  ✕ at 3", "learning rate"}
    (cross,) = points(ax, "X")
    assert cross.get_xdata()[0] == 3
    assert cross.get_ydata()[0] <= ax.get_ylim()[1] < 50  # what explodes does not squeeze the rest
    assert (ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "step", "training loss")


def test_where_every_curve_stays_high_the_calmest_is_still_seen():
    traces = [trace([2.0, *[30.0] * 50], lr=1.0), trace([2.0, *[1e9] * 50], lr=2.0)]
    assert 30 < plots.loss_curves(traces).get_ylim()[1] < 60


def test_loss_curves_draw_the_raw_loss_and_one_outlier_leaves_the_smooth_line_alone():
    loss = np.ones(200)
    loss[100] = 8.0
    raw, smooth = plots.loss_curves([trace(loss)]).lines[:2]
    assert raw.get_ydata().max() == 8.0
    assert smooth.get_ydata().tolist() == pytest.approx([1.0] * 200)


def test_loss_curves_by_name_keep_the_order_and_take_apart_colours():
    ax = plots.loss_curves({"warmup": trace([2.0, 1.0]), "clipping": trace([2.0, 1.5])}, title="Warmup helps more.")
    colours = [to_hex(line.get_color()).upper() for line in ax.lines]
    assert list(dict.fromkeys(colours)) == [style.BLUE, style.VERMILLION]
    assert [line.get_linestyle() for line in ax.lines if line.get_linewidth() > 1] == ["-", "--"]  # apart in grey too
    assert set(texts(ax)) == {"warmup", "clipping"}
    assert ax.get_title(loc="left") == "Warmup helps more."


def test_repeated_rates_are_told_apart_by_seed():
    ax = plots.loss_curves([trace([2.0, 1.0], seed=0), trace([2.0, 1.1], seed=1)])
    assert {"0.1, seed 0", "0.1, seed 1"} <= set(texts(ax))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=90))
@settings(max_examples=25, deadline=None)
def test_any_curve_can_be_drawn(loss):
    plt.close("all")
    ax = plots.loss_curves([trace(loss, status="diverged")])
    low, high = ax.get_ylim()
    assert np.isfinite([low, high]).all()
    assert low < high


def test_stability_shades_every_event_with_its_size_and_states_the_finding():
    events = [
        {"begin": 20, "peak": 25, "end": 40, "size": 28.31},
        {"begin": 80, "peak": 90, "end": None, "size": "inf"},
    ]
    finding = Finding(name="stability", value="mid", rule="C2", summary="It rises twice.", evidence={"events": events})
    ax = plots.stability(trace(np.geomspace(2, 1, 100)), finding)
    spans = sorted((p.get_x(), p.get_x() + p.get_width()) for p in ax.patches)
    assert spans == [(20, 40), (80, 99)]
    assert {"28.3 × noise", "not finite"} <= set(texts(ax))
    assert ax.get_title(loc="left") == "It rises twice."


def test_stability_draws_the_evaluation_beside_the_training_loss_it_was_judged_by():
    finding = Finding(name="stability", value="stable", rule="C2", summary="Stable.")
    ax = plots.stability(trace(np.ones(100), evals=np.full(100, 2.0)), finding)
    smooth = [line for line in ax.lines if line.get_linewidth() > 1 and len(line.get_xdata())]
    assert [(line.get_ydata()[-1], line.get_linestyle()) for line in smooth] == [(1.0, "-"), (2.0, "--")]
    assert texts(ax) == ["training", "evaluation"]


def test_the_names_of_events_close_together_stand_on_lines_of_their_own():
    events = [{"begin": begin, "end": begin + 3, "size": 9.0} for begin in (20, 26, 70)]
    finding = Finding(name="stability", value="mid", rule="C2", summary="It rises.", evidence={"events": events})
    ax = plots.stability(trace(np.ones(100)), finding)
    first, second, apart = (text.get_position()[1] for text in ax.texts if "noise" in text.get_text())
    assert first == apart < second - 0.05


# -- gradient norms -------------------------------------------------------------------------


def test_grad_norms_part_at_the_threshold_and_count_what_is_not_finite_as_clipped():
    norm = np.array([1.0, 2.0, 8.0, np.nan, 1.0, np.inf, 9.0, 1.0, 1.0, 1.0])
    finding = Finding(name="clip_norm", value=4.0, rule="E3", summary="Clip at 4.")
    ax = plots.grad_norms(trace(np.ones(10), norm=norm), finding)
    below, above = (line.get_ydata().tolist() for line in ax.lines[:2])
    assert (above, len(below)) == ([8.0, 9.0], 6)
    assert list(points(ax, "X")[0].get_xdata()) == [3, 5]
    assert texts(ax) == ["threshold 4\nwould clip 40%"]
    assert (ax.get_yscale(), ax.get_ylabel()) == ("log", "gradient norm (L2, unclipped)")


def test_the_histogram_counts_every_finite_norm_once_in_bins_equal_on_a_log_scale():
    norm = np.concatenate([np.geomspace(0.1, 100, 200), [np.nan, np.inf, 0.0]])
    ax = plots.norm_histogram(trace(np.ones(203), norm=norm))
    edges = np.array([patch.get_x() for patch in ax.patches])
    assert sum(patch.get_height() for patch in ax.patches) == 200
    assert np.ptp(np.diff(np.log(edges))) < 1e-9
    percentile = np.percentile(np.geomspace(0.1, 100, 200), 90)
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([np.sqrt(10), percentile], rel=0.02)
    assert any(text.startswith("not drawn: 3 of 203") for text in texts(ax))
    assert (ax.get_xscale(), ax.get_ylabel()) == ("log", "number of steps")


def test_the_histogram_at_a_threshold_says_the_share_it_clips():
    finding = Finding(name="clip_norm", value=2.5, rule="E3", summary="Clip at 2.5.")
    ax = plots.norm_histogram(trace(np.ones(4), norm=[1.0, 2.0, 3.0, 4.0]), finding)
    assert any("threshold 2.5: would clip 50%" in text for text in texts(ax))


def test_norms_that_are_all_lost_are_said_to_be():
    assert "not drawn: 2 of 2" in texts(plots.norm_histogram(trace(np.ones(2), norm=[np.nan, np.inf])))[0]


# -- tables ---------------------------------------------------------------------------------


def speeds():
    size = np.array([8, 16, 32, 64])
    speed = np.array([4000.0, 7900.0, 12000.0, np.nan])
    return pd.DataFrame(
        {
            "batch_size": size,
            "examples_per_second": speed,
            "low": speed * 0.9,
            "high": speed * 1.1,
            "step_seconds": size / speed,
        }
    )


def test_throughput_shows_speeds_step_times_and_the_size_that_did_not_fit():
    finding = Finding(name="saturation_batch_size", value=16, interval=(16, 32), rule="B5", summary="It saturates.")
    ax = plots.throughput(speeds(), saturation=finding)
    assert (ax.patches[0].get_x(), ax.patches[0].get_width()) == (16, 16)
    assert ax.get_title(loc="left") == "It saturates."
    assert points(ax, "o")[0].get_ydata().tolist() == [4000.0, 7900.0, 12000.0]
    assert points(ax, "X")[0].get_xdata() == [64]
    assert {"2 ms a step", "2.7 ms", "saturates"} <= set(texts(ax))
    guide = next(line for line in ax.lines if line.get_linestyle() == ":")
    assert guide.get_ydata()[1] / guide.get_ydata()[0] == pytest.approx(guide.get_xdata()[1] / guide.get_xdata()[0])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "16", "32", "64"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch size (examples)", "throughput (examples per second)")


def test_schedules_are_drawn_as_given_from_zero_and_named_in_a_legend():
    rates = Trial(lr=1.0, steps=100, batch_size=8, warmup_steps=10).learning_rates()
    ax = plots.schedules({"no warmup": np.full(100, 0.1), "10 steps": rates})
    assert ax.lines[1].get_ydata().tolist() == rates.tolist()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["no warmup", "10 steps"]
    assert ax.get_ylim()[0] == 0


def test_the_warmup_grid_writes_medians_crosses_any_failure_and_stars_the_choice():
    rows = [(0, 0.1, 0.5, "finished"), (0, 0.1, 0.7, "finished"), (0, 1.0, np.nan, "diverged")]
    rows += [(10, 0.1, 0.55, "finished"), (10, 1.0, 0.2, "finished"), (10, 1.0, np.nan, "diverged")]
    rows += [(50, 1.0, 0.3, "finished")]
    table = pd.DataFrame(rows, columns=["warmup_steps", "lr", "final", "status"])
    finding = Finding(name="warmup_steps", value=50, rule="D4", summary="50 steps.", evidence={"peak_lr": 1.0})
    ax = plots.warmup_grid(table, finding=finding)
    assert {(text.get_position(), text.get_text()) for text in ax.texts if text.get_text()} == {
        ((0.5, 0.5), "0.6"),
        ((1.5, 0.5), "0.55"),
        ((2.5, 1.5), "0.3"),
    }
    assert sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in points(ax, "X")) == [(0.5, 1.5), (1.5, 1.5)]
    assert points(ax, "*")[0].get_xdata()[0] == 2.5
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "10", "50"]
    assert ax.get_ylabel() == "peak learning rate"
    kept = Finding(name="warmup_steps", value=0, rule="D4", summary="None.", evidence={"baseline_lr": 0.1})
    (star,) = points(plots.warmup_grid(table, finding=kept), "*")
    assert (star.get_xdata()[0], int(star.get_ydata()[0])) == (0.5, 0)  # the rate kept, without warmup


def test_compare_draws_mean_and_range_and_gives_each_groups_best_checkpoints():
    def run(*evals):
        return trace(np.ones(3), evals=evals)

    groups = {"prescribed": [run(1.0, 0.2, 0.4), run(1.0, 0.4, 0.2)], "present": [run(1.0, 0.8, 0.6)]}
    groups["lost"] = [trace([1.0, np.nan], status="diverged")]
    ax = plots.compare(groups)
    assert set(texts(ax)) >= {
        "prescribed\nbest 0.2 (sd 0)\n2 seeds",
        "present\nbest 0.6\n1 seeds",
        "lost\n0 of 1 seeds finished",
    }
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([1.0, 0.3, 0.3])
    stars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in points(ax, "*")]
    assert stars == [(1.5, pytest.approx(0.2)), (2, 0.6)]
    assert ax.get_ylabel() == "evaluation loss (mean and range)"


def test_time_to_target_is_relative_to_the_smallest_size_and_names_both_ends():
    table = pd.DataFrame({"batch_size": [64, 16, 32], "steps": [400, 1000, 500], "seconds": [12.0, 10.0, 6.0]})
    finding = Finding(name="critical_batch_size", value=40, rule="B8", summary="About 40.")
    ax = plots.time_to_target(table, critical=finding)
    steps, seconds = points(ax, "o")
    assert steps.get_ydata().tolist() == [1.0, 0.5, 0.4]
    assert seconds.get_ydata().tolist() == [1.0, 0.6, 1.2]
    ends = {"1,000 steps →\n400 steps", "10 s of time →\n12 s of time"}
    assert {*ends, "perfect scaling", "critical batch size"} <= set(texts(ax))
    assert ax.get_ylabel() == "steps and time, relative to batch size 16"


def test_a_critical_size_without_an_end_is_shaded_to_the_edge():
    table = pd.DataFrame({"batch_size": [16, 32, 64], "steps": [1000, 500, 400], "seconds": [10.0, 6.0, 12.0]})
    ends = []
    for interval in ((20.0, np.inf), (20.0, 64.0)):
        finding = Finding(name="critical_batch_size", value=NO_MATTER, interval=interval, rule="B8", summary="Any.")
        ax = plots.time_to_target(table, critical=finding)
        ax.figure.canvas.draw()
        ends.append(ax.get_xlim())
        assert "critical batch size" in texts(ax)
    assert ends[0] == pytest.approx(ends[1])


def test_each_name_has_a_row_in_the_tables_order_with_its_median():
    rows = [("step", 0.010), ("loader", 0.001), ("step", 0.030), ("loader", float("nan")), ("step", 0.020)]
    finding = Finding(name="input_bound", value=False, rule="playbook: F1", summary="Not input-bound.")
    ax = plots.durations(pd.DataFrame(rows, columns=["what", "seconds"]), "what", "seconds", finding=finding)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step", "loader"]
    assert [text.get_text() for text in ax.texts] == ["20 ms", "1 ms"]
    assert [line.get_xdata().tolist() for line in ax.lines] == [[10, 30, 20], [20], [1]]
    assert ax.get_title(loc="left") == "Not input-bound."
    assert ax.get_xlabel() == "time (ms)"
    assert ax.get_xscale() == "log"


# -- style ----------------------------------------------------------------------------------


def test_a_plot_goes_into_the_axes_it_is_given_and_else_onto_paper_of_7_by_4_2_inches():
    _, mine = plt.subplots()
    assert plots.schedules({"a": [0.1, 0.2]}, ax=mine) is mine
    new = plots.schedules({"a": [0.1, 0.2]})
    assert new.figure.get_size_inches().tolist() == [7.0, 4.2]


def test_labels_at_the_right_stand_apart_and_in_order():
    _, ax = plt.subplots()
    ax.set_ylim(0, 1)
    style.label_ends(ax, [(0.5, "a", "k"), (0.501, "b", "k"), (0.502, "c", "k"), (0.9, "d", "k")])
    heights = [text.xyann[1] for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c", "d"]
    assert min(np.diff(heights)) >= 0.061


def test_labels_of_what_leaves_through_the_top_stay_beside_the_axis():
    _, ax = plt.subplots()
    style.label_ends(ax, [(99.0, "a", "k"), (98.0, "b", "k"), (97.0, "c", "k")])
    heights = [text.xyann[1] for text in ax.texts]
    assert max(heights) == pytest.approx(1.0)
    assert min(np.diff(heights)) >= 0.06


@given(st.floats(-9, 6), st.floats(0.05, 30))
@settings(max_examples=200, deadline=None)
def test_a_log_axis_of_any_span_has_three_to_nine_ticks_told_apart(exponent, decades):
    low, high = 10**exponent, 10 ** (exponent + decades)
    ticks = [tick for tick in style.ticks(low, high) if low <= tick <= high]
    assert 3 <= len(ticks) <= 9
    labels = [style.number(tick) for tick in ticks]
    assert len(set(labels)) == len(labels)
    assert np.diff(np.log10(ticks)).min() >= 0.1 * decades  # a label has room beside the next


def test_the_axes_of_a_sweep_and_of_norms_within_a_decade_are_labelled():
    trials = sweep([0.9, 0.5, 0.3]).assign(lr=[0.03, 0.06, 0.1])
    norm = np.geomspace(1.3, 14, 100)
    axes = [(plots.axis_plot(trials).xaxis, 0.02, 0.15), (plots.norm_histogram(trace(norm, norm=norm)).xaxis, 1.2, 15)]
    axes.append((plots.grad_norms(trace(norm, norm=norm)).yaxis, 1.3, 14))
    for axis, low, high in axes:
        shown = [text.get_text() for text in axis.get_ticklabels() if low <= axis_value(axis, text) <= high]
        assert len(shown) >= 3
        assert all(shown)


def axis_value(axis, text):
    return text.get_position()[0 if axis.axis_name == "x" else 1]


def test_no_more_curves_are_named_than_can_be_read():
    _, ax = plt.subplots()
    style.label_ends(ax, [(i / 30, str(i), "k") for i in range(30)])
    assert len(ax.texts) == style.MOST_LABELS
    assert {"0", "29"} <= set(texts(ax))


@pytest.mark.parametrize("colour", [*style.CATEGORIES, style.GREY, *style.ramp(5)])
def test_every_colour_used_for_text_reads_on_white(colour):
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in style.ink(colour))
    contrast = 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    assert contrast >= 4.5


@given(st.floats(1e-12, 1e12))
@settings(max_examples=60, deadline=None)
def test_a_number_keeps_three_digits(value):
    assert float(style.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)
