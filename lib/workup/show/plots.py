"""The figures: ``draw(table, *, ax=None) -> Axes``. They draw what was measured and judged, and measure nothing.

Where a Finding is given, the title states it. Infeasible trials are crosses at the top of the
axis, the best is a star, what is statistically as good is shaded green, what is unstable red.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from workup.finding import Finding
from workup.show import style
from workup.trace import Trace

Told = Finding | float | None
BROKEN = ("diverged", "failed", "out_of_memory")


def axis_plot(trials: pd.DataFrame, *, best: Told = None, unstable: Told = None, ax: Axes | None = None) -> Axes:
    """Final loss against learning rate, all trials of a sweep (playbook: C6).

    Args:
        trials: columns lr, seed, status, final (mean loss at the end of the trial).
        best: the finding ``best_lr`` (its evidence may give region and unstable_lr), or a rate.
        unstable: the finding ``unstable_lr``, or a rate.
    """
    ax = style.axes(ax)
    fine = trials[_feasible(trials)]
    middle = fine.groupby("lr")["final"].median()
    evidence = best.evidence if isinstance(best, Finding) else {}
    edge = _value(unstable) or _value(evidence.get("unstable_lr"))
    region = evidence.get("region") or (best.interval if isinstance(best, Finding) else None)
    style.scale(ax.yaxis, fine["final"])
    style.scale(ax.xaxis, trials["lr"], least=1.0)
    ax.set_xlim(trials["lr"].min() / 1.5, trials["lr"].max() * 1.5)
    if region is not None:
        style.band(ax, region[0] / 1.08, region[1] * 1.08, style.GREEN, "as good")
    if edge:
        style.band(ax, edge, ax.get_xlim()[1], style.VERMILLION, "unstable")
    ax.plot(middle.index, middle, "-", color=style.BLUE, linewidth=1.6)
    ax.plot(fine["lr"], fine["final"], "o", color=style.BLUE, markersize=5, markeredgecolor="white")
    style.crosses(ax, trials.loc[~_feasible(trials), "lr"])
    if (rate := _value(best)) and len(middle):
        style.star(ax, rate, float(np.interp(np.log(rate), np.log(middle.index), middle)), style.number(rate))
    ax.margins(y=0.14)
    return style.dress(ax, _title(best, "Final loss by learning rate"), "learning rate", "final training loss")


def loss_curves(
    traces: Sequence[Trace] | Mapping[str, Trace],
    *,
    eval: bool = False,
    title: Finding | str = "",
    ax: Axes | None = None,
) -> Axes:
    """Loss against step, one curve a trial: raw and faint, smoothed on top (running median; playbook: C3).

    Args:
        traces: coloured by learning rate; a mapping is coloured and named by its keys.
        eval: the evaluation loss (where it was taken) instead of the training loss.
    """
    ax = style.axes(ax)
    by_key = isinstance(traces, Mapping)
    named = dict(traces) if isinstance(traces, Mapping) else _by_rate(traces)
    curves = {name: _series(trace, "eval_loss" if eval else "loss") for name, trace in named.items()}
    top = _loss_axis(ax, [loss for _, loss in curves.values()])
    ends = []
    for (name, (step, loss)), colour in zip(
        curves.items(), cycle(style.CATEGORIES if by_key else style.ramp(len(named)))
    ):
        end = _curve(ax, step, loss, colour, top)
        if named[name].status in BROKEN:
            last = int(named[name].steps["step"].max()) if len(named[name].steps) else 0
            ax.plot([last], [end], "X", color=colour, markersize=8, markeredgecolor="white", zorder=5)
            name += f"  ✕ at {last:,}"
        ends.append((end, name, colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends)
    if not by_key:
        style.note(ax, 1.025, 1.03, "learning rate", at="axes")
    what = "evaluation loss" if eval else "training loss"
    return style.dress(ax, _title(title, f"{what.capitalize()} by step"), "step", what)


def stability(trace: Trace, finding: Finding, *, ax: Axes | None = None) -> Axes:
    """A trial's loss with the finding's events shaded from begin to end (playbook: C2, C5).

    ``finding.evidence["events"]`` is a list of mappings: begin, peak, end (steps), size (noise units).
    The evaluation loss is drawn where it was taken at most steps, else the training loss.
    """
    ax = style.axes(ax)
    column = "eval_loss" if trace.steps["eval_loss"].notna().mean() > 0.5 else "loss"
    step, loss = _series(trace, column)
    _curve(ax, step, loss, style.BLUE, _loss_axis(ax, [loss]))
    ax.margins(x=0.01)
    for event in list(finding.evidence.get("events", ()))[:6]:
        end = event.get("end") if event.get("end") is not None else trace.steps["step"].max()
        size = _value(event.get("size"))
        name = f"{style.number(size)} × noise" if size else "unstable"
        style.band(ax, event["begin"], max(end, event["begin"] + 1), style.VERMILLION, name)
    if trace.status in BROKEN:
        style.crosses(ax, [trace.steps["step"].max()])
    what = "evaluation" if column == "eval_loss" else "training"
    return style.dress(ax, finding.summary, "step", f"{what} loss, learning rate {style.number(trace.trial.lr)}")


def grad_norms(trace: Trace | Iterable[float], threshold: Told = None, *, ax: Axes | None = None) -> Axes:
    """Unclipped gradient norm against step, log scale, the threshold across (playbook: C4, E2)."""
    ax = style.axes(ax)
    step, norm = _norms(trace)
    fine, line = np.isfinite(norm) & (norm > 0), _value(threshold)
    over = fine & (norm > (line or np.inf))
    style.scale(ax.yaxis, norm[fine])
    ax.plot(step[fine & ~over], norm[fine & ~over], ".", color=style.BLUE, alpha=0.35, markersize=4)
    ax.plot(step[over], norm[over], ".", color=style.VERMILLION, alpha=0.8, markersize=5)
    ax.plot(step[fine], _smooth(norm[fine]), "-", color=style.BLUE, linewidth=1.6)
    style.crosses(ax, step[~np.isfinite(norm)])
    if line:
        ax.axhline(line, color=style.VERMILLION, linewidth=1.2, linestyle="--")
        share = f"threshold {style.number(line)}\nclips {over.sum() / max(fine.sum(), 1):.0%}"
        style.label_ends(ax, [(line, share, style.VERMILLION)])
    return style.dress(ax, _title(threshold, "Gradient norm by step"), "step", "gradient norm (L2, unclipped)")


def norm_histogram(trace: Trace | Iterable[float], threshold: Told = None, *, ax: Axes | None = None) -> Axes:
    """How often each gradient norm occurred, bins equal on a log scale (playbook: E2, E3)."""
    ax = style.axes(ax)
    norm = _norms(trace)[1]
    fine = norm[np.isfinite(norm) & (norm > 0)]
    if len(fine):
        low, high, median = fine.min() / 1.05, fine.max() * 1.05, float(np.median(fine))
        style.scale(ax.xaxis, [low, high], least=1.0)
        counts = ax.hist(fine, np.geomspace(low, high, 41), color=style.BLUE, alpha=0.8, edgecolor="white")[0]
        line = _value(threshold) or float(np.percentile(fine, 90))
        name = f"threshold {style.number(line)}: clips {(fine > line).mean():.0%}"
        name = name if _value(threshold) else f"90th percentile {style.number(line)}"
        sides = ("right", "left") if median <= line else ("left", "right")
        ax.set_ylim(0, counts.max() * 1.2)
        for x, text, colour, side in (
            (median, f"median {style.number(median)}", style.GREY, sides[0]),
            (line, name, style.VERMILLION, sides[1]),
        ):
            ax.axvline(x, color=colour, linewidth=1.3, linestyle="--")
            style.note(ax, x, 0.94, f"  {text}  ", colour, at="top", ha=side)
    if left := len(norm) - len(fine):
        style.note(ax, 1, 0.86, f"not drawn: {left} of {len(norm)},\nzero or not finite", style.VERMILLION, at="axes",
                   ha="right", va="top")  # fmt: skip
    title = _title(threshold, "Gradient norms over all steps")
    return style.dress(ax, title, "gradient norm (L2, unclipped)", "number of steps")


def throughput(table: pd.DataFrame, *, saturation: Any = None, ax: Axes | None = None) -> Axes:
    """Throughput against batch size, time per step beside each point (playbook: B2 to B5).

    Args:
        table: columns batch_size, examples_per_second, low, high (its interval), step_seconds;
            a row without a finite throughput did not fit in memory.
        saturation: the finding (its interval or value), or (low, high) batch sizes.
    """
    ax = style.axes(ax)
    fits = np.isfinite(table["examples_per_second"].astype(float))
    fine = table[fits]
    style.sizes(ax, table["batch_size"])
    if len(fine):
        size, speed = fine["batch_size"].to_numpy(float), fine["examples_per_second"].to_numpy(float)
        style.scale(ax.yaxis, [fine["low"].min(), fine["high"].max()], least=1.0)
        ax.set_ylim(fine["low"].min() / 1.7, fine["high"].max() * 1.9)
        ends = np.array([1.0, min(size[-1] / size[0], ax.get_ylim()[1] / speed[0])])
        ax.plot(size[0] * ends, speed[0] * ends, ":", color=style.GREY, linewidth=1.2)
        style.note(
            ax, size[0] * ends[1] / 1.12, speed[0] * ends[1] / 1.05, "doubling with the batch", ha="right", va="top"
        )
        ax.fill_between(size, fine["low"], fine["high"], color=style.BLUE, alpha=0.18, linewidth=0)
        ax.plot(size, speed, "o-", color=style.BLUE, linewidth=1.6, markersize=5, markeredgecolor="white")
        for x, y, seconds in zip(size, speed, fine["step_seconds"], strict=True):
            ax.annotate(style.duration(seconds), (x, y), (0, -15), textcoords="offset points", ha="center",
                        fontsize=style.SMALL, color=style.BLUE)  # fmt: skip
    style.crosses(ax, table.loc[~fits, "batch_size"])
    if (where := _interval(saturation)) is not None:
        style.band(ax, *where, style.ORANGE, "saturates")
    title = _title(saturation, "Throughput and time per step by batch size")
    return style.dress(ax, title, "batch size (examples)", "throughput (examples per second)")


def schedules(rates: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """Learning rate at every step, one line a schedule (playbook: D2, D3, D5)."""
    ax = style.axes(ax)
    peaks = [max(values) for values in rates.values()]
    if max(peaks) > 20 * min(peaks):
        style.scale(ax.yaxis, [value for values in rates.values() for value in values if value > 0])
    for values, colour in zip(rates.values(), cycle(style.CATEGORIES)):
        ax.plot(np.arange(len(values)), values, color=colour, linewidth=1.8)
    ax.margins(x=0.01)
    style.label_ends(ax, [(float(v[-1]), k, c) for (k, v), c in zip(rates.items(), cycle(style.CATEGORIES))])
    return style.dress(ax, "Learning-rate schedules", "step", "learning rate")


def warmup_grid(trials: pd.DataFrame, *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Final loss for each warmup length and peak rate (playbook: D4).

    Args:
        trials: columns warmup_steps, lr, final, status; over seeds the median, a cross where any failed.
        finding: ``warmup_steps``, its evidence with peak_lr.
    """
    ax = style.axes(ax)
    finals = trials.assign(final=trials["final"].where(_feasible(trials)))
    grid = finals.groupby(["lr", "warmup_steps"])["final"].agg(lambda v: v.median(skipna=False)).unstack()
    tried = trials.groupby(["lr", "warmup_steps"]).size().unstack().notna().to_numpy()
    values = grid.to_numpy(float)
    shown = np.log(values) if (values[np.isfinite(values)] > 0).all() else values
    image = ax.imshow(np.ma.masked_invalid(shown), cmap="cividis", origin="lower", aspect="auto", alpha=0.9)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if image.norm(shown[row, column]) < 0.55 else "black"
            ax.text(column, row, style.number(value), ha="center", va="center", fontsize=style.TEXT, color=ink)
        elif tried[row, column]:
            ax.plot(column, row, "X", color=style.VERMILLION, markersize=10, markeredgecolor="white")
    if finding is not None and finding.value in grid.columns and (peak := _value(finding.evidence.get("peak_lr"))):
        style.star(ax, list(grid.columns).index(finding.value), int(np.abs(np.log(grid.index / peak)).argmin()) + 0.28)
    ax.set_xticks(range(len(grid.columns)), [f"{int(steps):,}" for steps in grid.columns])
    ax.set_yticks(range(len(grid.index)), [style.number(lr) for lr in grid.index])
    title = _title(finding, "Final loss by warmup length and peak rate")
    style.dress(ax, title, "warmup (steps); in each cell the final training loss", "peak learning rate").grid(False)
    return ax


def compare(groups: Mapping[str, Sequence[Trace]], *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Mean loss and range over seeds, one colour a group, the best checkpoint of each mean starred (playbook: F4).

    Labels give the mean and standard deviation over seeds of each seed's own best checkpoint.
    """
    ax = style.axes(ax)
    every = [trace for traces in groups.values() for trace in traces]
    column = "eval_loss" if any(trace.steps["eval_loss"].notna().any() for trace in every) else "loss"
    top = _loss_axis(ax, [_series(trace, column)[1] for trace in every])
    ends = []
    for (name, traces), colour in zip(groups.items(), cycle(style.CATEGORIES)):
        whole = [_series(trace, column) for trace in traces if trace.status == "finished"]
        seeds = f"{len(whole)} of {len(traces)} seeds finished" if len(whole) < len(traces) else f"{len(whole)} seeds"
        if not whole:
            ends.append((top, f"{name}\nno seed finished", colour))
            continue
        smooth = (lambda loss: loss) if column == "eval_loss" else _smooth
        runs = pd.concat([pd.Series(smooth(loss), step) for step, loss in whole], axis=1)
        mean, best = runs.mean(axis=1), runs.min()
        ax.fill_between(runs.index, runs.min(axis=1), runs.max(axis=1), color=colour, alpha=0.2, linewidth=0)
        ax.plot(mean.index, mean, color=colour, linewidth=1.8)
        style.star(ax, mean.idxmin(), mean.min())
        spread = f" (sd {best.std():.1g})" if len(whole) > 1 else ""
        ends.append((mean.iloc[-1], f"{name}\nbest {style.number(best.mean())}{spread}\n{seeds}", colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends, gap=0.17)
    what = "evaluation loss" if column == "eval_loss" else "training loss"
    return style.dress(ax, _title(finding, f"{what.capitalize()} by group"), "step", f"{what} (mean and range)")


def time_to_target(table: pd.DataFrame, *, critical: Any = None, ax: Axes | None = None) -> Axes:
    """Steps, time and resource use to reach one loss, relative to the smallest batch size (playbook: B8 to B10).

    Args:
        table: columns batch_size, steps, seconds, and resources (device-seconds) if they differ from time.
        critical: the finding ``critical_batch_size``, a size, or (low, high).
    """
    ax = style.axes(ax)
    table = table.sort_values("batch_size").astype(float)
    size, first, last = table["batch_size"].to_numpy(), table.iloc[0], table.iloc[-1]
    says = {
        "steps": lambda v: f"{v:,.0f} steps",
        "seconds": style.duration,
        "resources": lambda v: f"{v:,.0f} device s",
    }
    drawn = [name for name in says if name in table]
    relative = table[drawn] / first[drawn]
    style.sizes(ax, size)
    style.scale(ax.yaxis, [*relative.to_numpy().ravel(), size[0] / size[-1]], least=1.0)
    ax.plot(size, size[0] / size, ":", color=style.GREY, linewidth=1.2)
    ends = [(size[0] / size[-1], "perfect scaling", style.GREY)]
    for name, colour in zip(drawn, style.CATEGORIES, strict=False):
        ax.plot(size, relative[name], "o-", color=colour, linewidth=1.8, markersize=5, markeredgecolor="white")
        ends.append((relative[name].iloc[-1], f"{says[name](first[name])} →\n{says[name](last[name])}", colour))
    fastest = int(table["seconds"].argmin())
    style.star(ax, size[fastest], relative["seconds"].iloc[fastest], style.duration(table["seconds"].iloc[fastest]))
    style.label_ends(ax, ends, gap=0.11)
    if (where := _interval(critical)) is not None:
        style.band(ax, *where, style.ORANGE, "critical batch size")
    title = _title(critical, "What it takes to reach the same loss")
    return style.dress(ax, title, "batch size (examples)", f"relative to batch size {style.number(size[0])}")


def _title(told: Any, otherwise: str) -> str:
    return told.summary if isinstance(told, Finding) else told if told and isinstance(told, str) else otherwise


def _value(told: Any) -> float | None:
    """The finite number in a finding, its evidence or the caller's hand; None where there is none."""
    try:
        value = float(told.value if isinstance(told, Finding) else told)
    except (TypeError, ValueError):
        return None
    return value if np.isfinite(value) else None


def _interval(told: Any) -> tuple[float, float] | None:
    pair = told.interval if isinstance(told, Finding) else told
    if isinstance(pair, (tuple, list)):
        return (float(pair[0]), float(pair[1]))
    return None if (value := _value(told)) is None else (value, value)


def _feasible(trials: pd.DataFrame) -> pd.Series:
    return (trials["status"] == "finished") & np.isfinite(trials["final"].astype(float))


def _by_rate(traces: Iterable[Trace]) -> dict[str, Trace]:
    ordered = sorted(traces, key=lambda trace: (trace.trial.lr, trace.trial.seed))
    repeated = len({trace.trial.lr for trace in ordered}) < len(ordered)
    return {style.number(t.trial.lr) + (f", seed {t.trial.seed}" if repeated else ""): t for t in ordered}


def _series(trace: Trace, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a column is finite, and its values there."""
    fine = trace.steps[np.isfinite(trace.steps[column])]
    return fine["step"].to_numpy(), fine[column].to_numpy(float)


def _norms(trace: Trace | Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(trace, Trace):
        return trace.steps["step"].to_numpy(), trace.steps["grad_norm"].to_numpy(float)
    norm = np.asarray(list(trace), dtype=float)
    return np.arange(len(norm)), norm


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running median, then a running mean over as many steps: outliers go, and no stairs stay."""
    window = {"window": max(1, len(values) // 40) | 1, "center": True, "min_periods": 1}
    return pd.Series(values).rolling(**window).median().rolling(**window).mean().to_numpy()


def _loss_axis(ax: Axes, curves: Sequence[np.ndarray]) -> float:
    """Scale the y axis for losses and return its top: what explodes leaves through it and squeezes nothing."""
    losses = [loss for loss in curves if len(loss)]
    if not losses:
        return 1.0
    low, high = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
    start = max(np.median(loss[:5]) for loss in losses)
    top = min(high, 6 * start if low > 0 else start + 2 * (start - low) + 1e-12)
    logarithmic = style.scale(ax.yaxis, [low, top])
    room = (top / low) ** 0.05 if logarithmic else (top - low) * 0.05 + 1e-12
    ax.set_ylim((low / room, top * room) if logarithmic else (low - room, top + room))
    return float(top)


def _curve(ax: Axes, step: np.ndarray, loss: np.ndarray, colour: Any, top: float) -> float:
    """A faint raw line under its smoothed one; returns the height it ends at, within the axis."""
    smooth = _smooth(loss) if len(loss) > 60 else loss
    ax.plot(step, loss, color=colour, linewidth=0.7, alpha=0.28)
    ax.plot(step, smooth, color=colour, linewidth=1.7)
    return float(min(smooth[-1], top)) if len(loss) else top
