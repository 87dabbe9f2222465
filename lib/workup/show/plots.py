"""The figures: ``draw(table, *, ax=None) -> Axes``. They draw what was measured and judged, and measure nothing.

Where a Finding is given, the title states it. Infeasible trials are crosses at the top of the
axis, the best is a star, what is statistically as good is shaded green, what is unstable red.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from workup.finding import Finding
from workup.show import style
from workup.trace import Trace


def axis_plot(
    trials: pd.DataFrame, *, best: Finding | None = None, unstable: Finding | None = None, ax: Axes | None = None
) -> Axes:
    """Final loss against learning rate, all trials of a sweep (playbook: C6).

    Args:
        trials: columns lr, seed, status, final (mean loss at the end of the trial).
        best: ``best_lr``; its interval is shaded, and the rates of its evidence["infeasible"] are crossed.
        unstable: ``unstable_lr``, where what is unstable begins.
    """
    ax = style.axes(ax)
    failed = ~_finished(trials) | trials["lr"].isin(best.evidence.get("infeasible", ()) if best else ())
    fine = trials[~failed]
    middle = fine.groupby("lr")["final"].median()
    style.scale(ax.yaxis, fine["final"])
    ax.set_xlim(trials["lr"].min() / 1.5, trials["lr"].max() * 1.5)
    style.scale(ax.xaxis, ax.get_xlim())
    if best and best.interval:
        style.band(ax, *best.interval, style.GREEN, "as good")
    if edge := _value(unstable):
        style.band(ax, edge, ax.get_xlim()[1], style.VERMILLION, "unstable")
    ax.plot(middle.index, middle, "-", color=style.BLUE, linewidth=1.6)
    ax.plot(fine["lr"], fine["final"], "o", color=style.BLUE, **style.DOT)
    style.crosses(ax, trials.loc[failed, "lr"])
    if (rate := _value(best)) and len(middle):
        style.star(ax, rate, float(np.interp(np.log(rate), np.log(middle.index), middle)), style.number(rate))
    ax.margins(y=0.14)
    return style.dress(ax, best or "Final loss by learning rate", "learning rate", "final training loss")


def loss_curves(traces: Sequence[Trace] | Mapping[str, Trace], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Training loss against step, one curve a trial: raw and faint, smoothed on top (playbook: C3).

    Args:
        traces: coloured by learning rate; a mapping is coloured and named by its keys.
    """
    ax = style.axes(ax)
    named = dict(traces) if isinstance(traces, Mapping) else _by_rate(traces)
    looks = style.LOOKS if isinstance(traces, Mapping) else [(colour, "-") for colour in style.ramp(len(named))]
    curves = [_series(trace, "loss") for trace in named.values()]
    top, ends = _loss_axis(ax, curves), []
    for (name, trace), curve, (colour, dashes) in zip(named.items(), curves, cycle(looks), strict=False):
        end, mark = _curve(ax, *curve, colour, top, dashes), ""
        if trace.status != "finished":
            last = int(trace.steps["step"].max()) if len(trace.steps) else 0
            ax.plot([last], [end], "X", color=colour, markersize=8, markeredgecolor="white", zorder=5)
            mark = f"  ✕ at {last:,}"
        ends.append((end, name + mark, colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends)
    if not isinstance(traces, Mapping):
        style.note(ax, 1.025, 1.03, "learning rate", at="axes")
    return style.dress(ax, title or "Training loss by step", "step", "training loss")


def stability(trace: Trace, finding: Finding, *, ax: Axes | None = None) -> Axes:
    """A trial's loss with the finding's events shaded from begin to end (playbook: C2, C5).

    ``finding.evidence["events"]``: mappings of begin, end (steps; None while it lasts) and size (noise
    units). The evaluation loss is drawn beside the training loss where it was taken at most steps.
    """
    ax = style.axes(ax)
    evaluated = trace.steps["eval_loss"].notna().mean() > 0.5
    shown = {"training": "loss", "evaluation": "eval_loss"} if evaluated else {"training": "loss"}
    curves = [_series(trace, column) for column in shown.values()]
    top, ends = _loss_axis(ax, curves), []
    for name, curve, (colour, dashes) in zip(shown, curves, style.LOOKS, strict=False):
        ends.append((_curve(ax, *curve, colour, top, dashes, raw=0.5), name, colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends)
    last = trace.steps["step"].max()
    row, before = 0, -np.inf
    for event in list(finding.evidence.get("events", ()))[:6]:
        begin = event["begin"]
        end = max(last if event.get("end") is None else event["end"], begin + 1)
        row = (row + 1) % 3 if (begin + end) / 2 - before < 0.14 * last else 0  # names must not lie on one another
        before, size = (begin + end) / 2, _value(event.get("size"))
        name = f"{style.number(size)} × noise" if size else "not finite"
        style.band(ax, begin, end, style.VERMILLION, name, row=row)
    style.crosses(ax, [last] * (trace.status != "finished"))
    return style.dress(ax, finding.summary, "step", f"loss at learning rate {style.number(trace.trial.lr)}")


def grad_norms(trace: Trace, threshold: Finding | None = None, *, ax: Axes | None = None) -> Axes:
    """Unclipped gradient norm against step, log scale, the threshold across (playbook: C4, E2)."""
    ax = style.axes(ax)
    step, norm = trace.steps["step"].to_numpy(), trace.steps["grad_norm"].to_numpy(float)
    fine, line = np.isfinite(norm) & (norm > 0), _value(threshold)
    over = fine & (norm > (line or np.inf))
    style.scale(ax.yaxis, norm[fine])
    for which, colour, alpha in ((fine & ~over, style.BLUE, 0.35), (over, style.VERMILLION, 0.8)):
        ax.plot(step[which], norm[which], ".", color=colour, alpha=alpha, markersize=4)
    ax.plot(step[fine], _smooth(norm[fine]), "-", color=style.BLUE, linewidth=1.6)
    style.crosses(ax, step[~np.isfinite(norm)])
    if not fine.any():
        style.note(ax, 0.5, 0.5, f"none of {len(norm)} norms is positive and finite", at="axes", ha="center")
    if line:
        ax.axhline(line, color=style.VERMILLION, linewidth=1.2, linestyle="--")
        style.label_ends(ax, [(line, _clips(norm, line).replace(": ", "\n"), style.VERMILLION)])
    return style.dress(ax, "Gradient norm by step", "step", "gradient norm (L2, unclipped)")


def norm_histogram(trace: Trace, threshold: Finding | None = None, *, ax: Axes | None = None) -> Axes:
    """How often each gradient norm occurred, bins equal on a log scale (playbook: E2, E3)."""
    ax = style.axes(ax)
    norm = trace.steps["grad_norm"].to_numpy(float)
    fine = norm[np.isfinite(norm) & (norm > 0)]
    if len(fine):
        edges = np.geomspace(fine.min() / 1.05, fine.max() * 1.05, 41)
        style.scale(ax.xaxis, edges, least=1.0)
        counts = ax.hist(fine, list(edges), color=style.BLUE, alpha=0.8, edgecolor="white")[0]
        ax.set_ylim(0, np.max(counts) * 1.2)
        median, ninetieth = (float(value) for value in np.percentile(fine, [50, 90]))
        line = _value(threshold)
        text = _clips(norm, line) if line else f"90th percentile {style.number(ninetieth)}"
        marks = [(median, f"median {style.number(median)}", style.GREY), (line or ninetieth, text, style.VERMILLION)]
        for (x, text, colour), side in zip(sorted(marks), ("right", "left"), strict=True):
            ax.axvline(x, color=colour, linewidth=1.3, linestyle="--")
            style.note(ax, x, 0.94, f"  {text}  ", colour, at="top", ha=side)
    if left := len(norm) - len(fine):
        note = f"not drawn: {left} of {len(norm)},\nzero or not finite"
        style.note(ax, 1, 0.86, note, style.VERMILLION, at="axes", ha="right", va="top")
    return style.dress(ax, "Gradient norms over all steps", "gradient norm (L2, unclipped)", "number of steps")


def _clips(norm: np.ndarray, line: float) -> str:
    return f"threshold {style.number(line)}: would clip {np.mean(~(norm <= line)):.0%}"


def throughput(table: pd.DataFrame, *, saturation: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Throughput against batch size, time per step beside each point (playbook: B2 to B5).

    Args:
        table: columns batch_size, examples_per_second, low, high (its interval), step_seconds;
            a row without a finite throughput did not fit in memory.
        saturation: ``saturation_batch_size``; its interval or value is shaded.
    """
    ax = style.axes(ax)
    fits = np.isfinite(table["examples_per_second"].astype(float))
    fine = table[fits].astype(float)
    style.sizes(ax, table["batch_size"])
    if len(fine):
        size, speed = fine["batch_size"].to_numpy(), fine["examples_per_second"].to_numpy()
        bottom, top = fine["low"].min() / 1.7, fine["high"].max() * 1.9
        style.scale(ax.yaxis, [bottom, top])
        ax.set_ylim(bottom, top)
        doubling = np.array([1, min(size[-1] / size[0], top / speed[0])])
        x, y = size[0] * doubling, speed[0] * doubling
        ax.plot(x, y, ":", color=style.GREY, linewidth=1.2)
        style.note(ax, x[1] / 1.12, y[1] / 1.05, "doubling with the batch", ha="right", va="top")
        ax.fill_between(size, fine["low"], fine["high"], color=style.BLUE, alpha=0.18, linewidth=0)
        ax.plot(size, speed, "o-", color=style.BLUE, linewidth=1.6, **style.DOT)
        for x, y, seconds in zip(size, speed, fine["step_seconds"], strict=True):
            unit = " a step" if x == size[0] else ""
            style.note(ax, x * 1.06, y / 1.03, style.duration(seconds) + unit, style.BLUE, va="top")
    style.crosses(ax, table.loc[~fits, "batch_size"])
    if saturation is not None and saturation.is_conclusive:
        _shade(ax, saturation, "saturates")
    title = saturation or "Throughput and time per step by batch size"
    return style.dress(ax, title, "batch size (examples)", "throughput (examples per second)")


def schedules(rates: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """Learning rate at every step, one line a schedule, linear (playbook: D2, D3, D5)."""
    ax = style.axes(ax)
    for (name, values), (colour, dashes) in zip(rates.items(), cycle(style.LOOKS), strict=False):
        ax.plot(values, dashes, color=colour, linewidth=2, label=name)
    ax.margins(x=0.01)
    ax.set_ylim(0)
    ax.legend(frameon=False, fontsize=style.SMALL)
    return style.dress(ax, "Learning-rate schedules", "step", "learning rate")


def warmup_grid(trials: pd.DataFrame, *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Final loss for each warmup length and peak rate (playbook: D4).

    Args:
        trials: columns warmup_steps, lr, final, status; over seeds the median, a cross where any failed.
        finding: ``warmup_steps``, its evidence with peak_lr, or with baseline_lr where no peak is worth it.
    """
    import seaborn  # slow to import, and needed here alone

    ax = style.axes(ax)
    cells = trials.assign(final=trials["final"].where(_finished(trials))).groupby(["lr", "warmup_steps"])["final"]
    grid = cells.agg(lambda finals: finals.median(skipna=False)).unstack()
    shown = grid.rename(index=style.number, columns=lambda steps: f"{steps:,.0f}").astype(float)
    shade = shown if (shown <= 0).any(axis=None) else np.log(shown)
    seaborn.heatmap(shade, annot=shown.map(style.number), fmt="", cmap="cividis", cbar=False, ax=ax)
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelrotation=0)
    for row, column in np.argwhere(cells.size().unstack().notna() & grid.isna()):
        ax.plot(column + 0.5, row + 0.5, "X", color=style.VERMILLION, markersize=10, markeredgecolor="white")
    evidence = finding.evidence if finding and finding.value in grid.columns else {}
    if finding and (peak := _value(evidence.get("peak_lr") or evidence.get("baseline_lr"))):
        row = int(np.abs(np.log(grid.index / peak)).argmin())
        style.star(ax, list(grid.columns).index(finding.value) + 0.5, row + 0.78)
    title = finding or "Final loss by warmup length and peak rate"
    style.dress(ax, title, "warmup (steps); in each cell the final training loss", "peak learning rate").grid(False)
    return ax


def compare(groups: Mapping[str, Sequence[Trace]], *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Mean loss and range over seeds, one colour a group; a star at their mean best checkpoint (playbook: F4).

    Labels give their mean and standard deviation.
    """
    ax = style.axes(ax)
    every = [trace for traces in groups.values() for trace in traces]
    evaluated = any(trace.steps["eval_loss"].notna().any() for trace in every)
    column, smooth = ("eval_loss", np.asarray) if evaluated else ("loss", _smooth)
    top, ends = _loss_axis(ax, [_series(trace, column) for trace in every]), []
    for (name, traces), (colour, dashes) in zip(groups.items(), cycle(style.LOOKS), strict=False):
        whole = [_series(trace, column) for trace in traces if trace.status == "finished"]
        seeds = f"{len(whole)} of {len(traces)} seeds finished" if len(whole) < len(traces) else f"{len(whole)} seeds"
        if not whole:
            ends.append((top, f"{name}\n{seeds}", colour))
            continue
        runs = pd.concat([pd.Series(smooth(loss), step) for step, loss in whole], axis=1)
        mean, best = runs.mean(axis=1), runs.min()
        ax.fill_between(runs.index, runs.min(axis=1), runs.max(axis=1), color=colour, alpha=0.2, linewidth=0)
        ax.plot(mean.index, mean, dashes, color=colour, linewidth=1.8)
        style.star(ax, runs.idxmin().mean(), best.mean())
        spread = f" (sd {best.std():.1g})" if len(whole) > 1 else ""
        ends.append((mean.iloc[-1], f"{name}\nbest {style.number(best.mean())}{spread}\n{seeds}", colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends, gap=0.17)
    what = "evaluation loss" if evaluated else "training loss"
    return style.dress(ax, finding or f"{what.capitalize()} by group", "step", f"{what} (mean and range)")


def time_to_target(table: pd.DataFrame, *, critical: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Steps and time to reach one loss, relative to the smallest batch size (playbook: B8 to B10).

    On one device the time is the resource use too.

    Args:
        table: columns batch_size, steps, seconds.
        critical: ``critical_batch_size``; its interval or value is shaded.
    """
    ax = style.axes(ax)
    table = table.sort_values("batch_size").astype(float).reset_index()
    size, last = table["batch_size"], len(table) - 1
    perfect, steps, seconds = size[0] / size, table["steps"] / table["steps"][0], table["seconds"] / table["seconds"][0]
    style.sizes(ax, size)
    style.scale(ax.yaxis, [*perfect, *steps, *seconds], least=1.0)
    ax.plot(size, perfect, ":", color=style.GREY, linewidth=1.2)
    ends = [(perfect[last], "perfect scaling", style.GREY)]
    says = [(steps, [f"{n:,.0f} steps" for n in table["steps"]])]
    says += [(seconds, [f"{style.duration(s)} of time" for s in table["seconds"]])]
    for (relative, words), (colour, dashes) in zip(says, style.LOOKS, strict=False):
        ax.plot(size, relative, "o" + dashes, color=colour, linewidth=1.8, **style.DOT)
        ends.append((relative[last], f"{words[0]} →\n{words[last]}", colour))
    style.label_ends(ax, ends, gap=0.11)
    _shade(ax, critical, "critical batch size")
    title = critical or "What it takes to reach the same loss"
    what = f"steps and time, relative to batch size {style.number(size[0])}"
    return style.dress(ax, title, "batch size (examples)", what)


def durations(
    table: pd.DataFrame, names: str, seconds: str, *, finding: Finding | None = None, ax: Axes | None = None
) -> Axes:
    """A row for each name, in the order of the table: a dot for each duration, the median with its value.

    Args:
        table: one row a measurement.
        names, seconds: its columns with the name of what was measured and how long it took; rows
            without a duration are left out.
    """
    ax = style.axes(ax)
    table = table[table[seconds] > 0]
    style.scale(ax.xaxis, table[seconds] * 1000, least=5.0)
    order = table[names].unique().tolist()
    for row, name in enumerate(order):
        taken = table.loc[table[names] == name, seconds]
        middle = float(taken.median())
        if len(taken) > 1:
            ax.plot(taken * 1000, [row] * len(taken), "o", color=style.SKY, **style.DOT)
        ax.plot([middle * 1000], [row], "|", color=style.BLUE, markersize=18, markeredgewidth=2.5)
        style.note(ax, middle * 1000, row - 0.42, style.duration(middle), style.BLUE, ha="center", va="center")
    ax.set_yticks(range(len(order)), [textwrap.fill(name, 20) for name in order])
    ax.set_ylim(len(order) - 0.4, -0.75)
    ax.margins(x=0.08)
    if ax.get_xscale() == "linear":
        ax.set_xlim(0, table[seconds].max() * 1080)
    return style.dress(ax, finding or "Durations", "time (ms)", "")


def _value(given: Any) -> float | None:
    """The finite number in a finding or its evidence; None where there is none."""
    try:
        value = float(given.value if isinstance(given, Finding) else given)
    except (TypeError, ValueError):
        return None
    return value if np.isfinite(value) else None


def _shade(ax: Axes, finding: Finding | None, name: str) -> None:
    """A finding's interval on the x axis, or its value."""
    value = _value(finding)
    pair = finding.interval if finding and finding.interval else (value, value)
    if pair[0] is not None and pair[1] is not None:
        end = pair[1] if np.isfinite(pair[1]) else ax.get_xlim()[1]
        style.band(ax, pair[0], end, style.ORANGE, name)


def _finished(trials: pd.DataFrame) -> pd.Series:
    return (trials["status"] == "finished") & np.isfinite(trials["final"].astype(float))


def _by_rate(traces: Iterable[Trace]) -> dict[str, Trace]:
    ordered = sorted(traces, key=lambda trace: (trace.trial.lr, trace.trial.seed))
    repeated = len({trace.trial.lr for trace in ordered}) < len(ordered)
    return {style.number(t.trial.lr) + (f", seed {t.trial.seed}" if repeated else ""): t for t in ordered}


def _series(trace: Trace, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a column is finite, and its values there."""
    fine = trace.steps[np.isfinite(trace.steps[column])]
    return fine["step"].to_numpy(), fine[column].to_numpy(float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running median, then a running mean over as many steps: outliers go, and no stairs stay."""
    window = max(1, len(values) // 40) | 1
    median = pd.Series(values).rolling(window, center=True, min_periods=1).median()
    return median.rolling(window, center=True, min_periods=1).mean().to_numpy()


def _loss_axis(ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Scale the y axis for losses and return its top: what explodes leaves through it and squeezes nothing."""
    losses = [loss for _, loss in curves if len(loss)]
    if not losses:
        return 1.0
    low, high = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
    start = max(loss[0] for loss in losses)
    top = 6 * start if low > 0 else start + 2 * max(start - low, abs(start)) or high
    top = min(high, max(top, 1.5 * min(float(np.median(loss)) for loss in losses)))  # the calmest one is to be seen
    logarithmic = style.scale(ax.yaxis, [low, top])
    room = (top / low) ** 0.05 if logarithmic else (top - low) * 0.05 + 1e-6 * abs(top) + 1e-12
    ax.set_ylim((low / room, top * room) if logarithmic else (low - room, top + room))
    return float(top)


def _curve(ax: Axes, step: Any, loss: Any, colour: Any, top: float, dashes: str = "-", raw: float = 0.28) -> float:
    """A faint raw line under its smoothed one; returns the height it ends at, within the axis."""
    smooth = _smooth(loss) if len(loss) > 60 else loss
    ax.plot(step, loss, color=colour, linewidth=0.7, alpha=raw)
    ax.plot(step, smooth, dashes, color=colour, linewidth=1.7)
    return float(min(smooth[-1], top)) if len(loss) else top
