"""The figures: ``draw(table, *, ax=None) -> Axes``. They draw what was measured and judged, and measure nothing.

Where a Finding is given, the title states it. Infeasible trials are crosses at the top of the
axis, the best is a star, what is statistically as good is shaded green, what is unstable red.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from workup.finding import Finding
from workup.show import style
from workup.trace import Trace

Told = Finding | float | None


def axis_plot(trials: pd.DataFrame, *, best: Told = None, unstable: Told = None, ax: Axes | None = None) -> Axes:
    """Final loss against learning rate, all trials of a sweep (playbook: C6).

    Args:
        trials: columns lr, seed, status, final (mean loss at the end of the trial).
        best: the finding ``best_lr`` (its evidence gives the region and the edge), or a rate.
        unstable: the finding ``unstable_lr``, or a rate.
    """
    ax = style.axes(ax)
    rates, fine = trials["lr"].to_numpy(float), _feasible(trials)
    style.scale(ax.yaxis, trials["final"][fine])
    if not style.scale(ax.xaxis, rates):
        ax.set_xscale("log")
    ax.set_xlim(rates.min() / 1.5, rates.max() * 1.5)
    star, edge = _value(best), _value(unstable)
    if isinstance(best, Finding):
        edge = _value(best.evidence.get("unstable_lr")) if edge is None else edge
        region = best.evidence.get("region") or best.interval
        if region is not None and _value(region[1]) is not None:
            style.band(ax, region[0] / 1.08, region[1] * 1.08, style.GREEN, "as good")
    if edge is not None:
        style.band(ax, edge, ax.get_xlim()[1], style.VERMILLION, "unstable")
    middle = trials[fine].groupby("lr")["final"].median()
    ax.plot(middle.index, middle, "-", color=style.BLUE, linewidth=1.6)
    ax.plot(rates[fine], trials["final"][fine], "o", color=style.BLUE, markersize=5, markeredgecolor="white")
    style.crosses(ax, rates[~fine])
    if star is not None and len(middle):
        style.star(ax, star, float(np.interp(np.log(star), np.log(middle.index), middle)), style.number(star))
    ax.margins(y=0.14)
    return style.dress(ax, _title(best, "Final loss by learning rate"), "learning rate", "final training loss")


def loss_curves(
    traces: Sequence[Trace] | Mapping[str, Trace], *, eval: bool = False, title: str = "", ax: Axes | None = None
) -> Axes:
    """Loss against step, one curve a trial: raw and faint, its running median on top (playbook: C3).

    Args:
        traces: coloured by learning rate; a mapping is coloured and named by its keys.
        eval: the evaluation loss (where it was taken) instead of the training loss.
    """
    ax = style.axes(ax)
    named = dict(traces) if isinstance(traces, Mapping) else _by_rate(traces)
    colours = style.CATEGORIES if isinstance(traces, Mapping) else style.ramp(len(named))
    column = "eval_loss" if eval else "loss"
    curves = {name: _series(trace, column) for name, trace in named.items()}
    top = _loss_axis(ax, list(curves.values()))
    ends = []
    for (name, trace), colour in zip(named.items(), _cycle(colours), strict=False):
        step, loss = curves[name]
        broken = trace.status in ("diverged", "failed")
        end = _curve(ax, step, loss, colour, top, raw=not eval or len(step) > 60)
        if broken and len(step):
            ax.plot([step[-1]], [end], "X", color=colour, markersize=8, markeredgecolor="white", zorder=5)
            name += f" ended at step {int(trace.steps['step'].iloc[-1]):,}"
        ends.append((end, name, colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends)
    if not isinstance(traces, Mapping):
        ax.text(1.025, 1.03, "learning rate", transform=ax.transAxes, fontsize=style.SMALL, color=style.GREY)
    what = "evaluation loss" if eval else "training loss"
    return style.dress(ax, title or f"{what.capitalize()} by step", "step", what)


def stability(trace: Trace, finding: Finding, *, ax: Axes | None = None) -> Axes:
    """A trial's loss with the finding's events shaded from their begin to their end (playbook: C2, C5).

    ``finding.evidence["events"]`` is a list of mappings: begin, peak, end (steps), size (noise units).
    """
    ax = style.axes(ax)
    column = "eval_loss" if np.isfinite(trace.steps["eval_loss"]).sum() > 0.5 * len(trace.steps) else "loss"
    step, loss = _series(trace, column)
    top = _loss_axis(ax, [(step, loss)])
    _curve(ax, step, loss, style.BLUE, top)
    ax.margins(x=0.01)
    for event in list(finding.evidence.get("events", ()))[:6]:
        end = event["end"] if event.get("end") is not None else (step[-1] if len(step) else event["begin"])
        style.band(ax, event["begin"], end, style.VERMILLION, f"{_finite(event['size']):.3g} × noise")
    if trace.status in ("diverged", "failed") and len(step):
        style.crosses(ax, [trace.steps["step"].iloc[-1]])
    what = "evaluation loss" if column == "eval_loss" else "training loss"
    return style.dress(ax, finding.summary, "step", f"{what} at learning rate {style.number(trace.trial.lr)}")


def grad_norms(trace: Trace | Iterable[float], threshold: Told = None, *, ax: Axes | None = None) -> Axes:
    """Unclipped gradient norm against step, log scale, the threshold across (playbook: C4, E2)."""
    ax = style.axes(ax)
    step, norm = _norms(trace)
    fine, line = np.isfinite(norm) & (norm > 0), _value(threshold)
    style.scale(ax.yaxis, norm[fine])
    over = fine & (norm > line) if line is not None else np.zeros(len(norm), bool)
    ax.plot(step[fine & ~over], norm[fine & ~over], ".", color=style.BLUE, alpha=0.35, markersize=4)
    ax.plot(step[over], norm[over], ".", color=style.VERMILLION, alpha=0.8, markersize=5)
    ax.plot(step[fine], _median(norm[fine]), "-", color=style.BLUE, linewidth=1.6)
    style.crosses(ax, step[~np.isfinite(norm)])
    if line is not None:
        ax.axhline(line, color=style.VERMILLION, linewidth=1.2, linestyle="--")
        style.label_ends(ax, [(line, f"threshold {style.number(line)}:\nclips {over.mean():.0%}", style.VERMILLION)])
    title = _title(threshold, "Gradient norm by step")
    return style.dress(ax, title, "step", "gradient norm (L2, unclipped)")


def norm_histogram(trace: Trace | Iterable[float], threshold: Told = None, *, ax: Axes | None = None) -> Axes:
    """How often each gradient norm occurred, bins equal on a log scale (playbook: E2, E3)."""
    ax = style.axes(ax)
    norm = _norms(trace)[1]
    fine, line = norm[np.isfinite(norm) & (norm > 0)], _value(threshold)
    if len(fine):
        low, high = fine.min() / 1.05, fine.max() * 1.05
        style.scale(ax.xaxis, [low, high], least=1.0)
        ax.hist(fine, np.geomspace(low, high, 41), color=style.BLUE, alpha=0.75, edgecolor="white", linewidth=0.4)
        marks = [(float(np.median(fine)), "median", style.GREY, 0.97)]
        if line is None:
            marks.append((float(np.percentile(fine, 90)), "90th percentile", style.VERMILLION, 0.9))
        else:
            marks.append((line, f"threshold: clips {(fine > line).mean():.0%}", style.VERMILLION, 0.9))
        for x, name, colour, height in marks:
            ax.axvline(x, color=colour, linewidth=1.3, linestyle="--")
            ax.text(x, height, f" {name} {style.number(x)}", transform=ax.get_xaxis_transform(), color=colour,
                    fontsize=style.SMALL, ha="left" if x < np.sqrt(low * high) else "right")  # fmt: skip
    if left := len(norm) - len(fine):
        ax.text(1, 1.0, f"{left} not finite or zero: not drawn", transform=ax.transAxes, ha="right", va="bottom",
                fontsize=style.SMALL, color=style.VERMILLION)  # fmt: skip
    title = _title(threshold, "Gradient norms over all steps")
    return style.dress(ax, title, "gradient norm (L2, unclipped)", "number of steps")


def throughput(table: pd.DataFrame, *, saturation: Any = None, ax: Axes | None = None) -> Axes:
    """Throughput against batch size, step times beside the points (playbook: B2 to B5).

    Args:
        table: columns batch_size, examples_per_second, low, high (its interval), step_seconds;
            a row without a finite throughput did not fit in memory.
        saturation: the finding (value or interval), or (low, high) batch sizes.
    """
    ax = style.axes(ax)
    fine = table[np.isfinite(table["examples_per_second"].astype(float))]
    size, speed = fine["batch_size"].to_numpy(float), fine["examples_per_second"].to_numpy(float)
    ax.set(xscale="log", yscale="log")
    style.scale(ax.yaxis, [*fine["low"], *fine["high"]])
    ax.set_xlim(table["batch_size"].min() / 1.4, table["batch_size"].max() * 1.4)
    ax.set_xticks(table["batch_size"], [style.number(b) for b in table["batch_size"]])
    ax.set_xticks([], minor=True)
    if len(fine):
        ax.plot(size, speed[0] * size / size[0], ":", color=style.GREY, linewidth=1.2, scaley=False)
        ax.text(size[0] * 1.1, speed[0] * 1.35, "doubling with the batch", color=style.GREY, fontsize=style.SMALL,
                ha="left", va="bottom")  # fmt: skip
        ax.fill_between(size, fine["low"], fine["high"], color=style.BLUE, alpha=0.18, linewidth=0)
        ax.plot(size, speed, "o-", color=style.BLUE, linewidth=1.6, markersize=5, markeredgecolor="white")
        for x, y, seconds in zip(size, speed, fine["step_seconds"], strict=True):
            ax.annotate(style.duration(seconds), (x, y), (0, -15), textcoords="offset points", ha="center",
                        fontsize=style.SMALL, color=style.BLUE)  # fmt: skip
        ax.margins(y=0.18)
    style.crosses(ax, table.loc[~table.index.isin(fine.index), "batch_size"])
    if (where := _interval(saturation)) is not None:
        low, high = where if where[0] < where[1] else (where[0] / 1.15, where[1] * 1.15)
        style.band(ax, low, high, style.ORANGE, "saturates here")
    return style.dress(ax, _title(saturation, "Throughput and time per step by batch size"), "batch size (examples)",
                       "throughput (examples per second)")  # fmt: skip


def schedules(rates: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Axes:
    """Learning rate at every step, one line a schedule (playbook: D2, D3, D5)."""
    ax = style.axes(ax)
    peaks = [max(values) for values in rates.values()]
    if max(peaks) > 20 * min(peaks):
        style.scale(ax.yaxis, [v for values in rates.values() for v in values if v > 0])
    ends = []
    for (name, values), colour in zip(rates.items(), _cycle(style.CATEGORIES), strict=False):
        ax.plot(np.arange(len(values)), values, color=colour, linewidth=1.8)
        ends.append((float(values[-1]), name, colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends)
    return style.dress(ax, "Learning-rate schedules", "step", "learning rate")


def warmup_grid(trials: pd.DataFrame, *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Final loss for each warmup length and peak rate, crosses where a trial failed (playbook: D4).

    Args:
        trials: columns warmup_steps, lr, final, status; over seeds the median, a cross where any failed.
    """
    ax = style.axes(ax)
    table = trials.assign(final=trials["final"].where(_feasible(trials)))
    grid = table.pivot_table(index="lr", columns="warmup_steps", values="final", aggfunc=_all_or_nan, dropna=False)
    values = grid.to_numpy(float)
    positive = bool(np.nanmin(values, initial=np.inf) > 0)
    shown = np.log(values) if positive else values
    ax.imshow(np.ma.masked_invalid(shown), cmap="cividis", origin="lower", aspect="auto", alpha=0.9)
    dark = np.nanmean([np.nanmin(shown, initial=np.inf), np.nanmax(shown, initial=-np.inf)])
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if shown[row, column] <= dark else "black"
            ax.text(column, row, style.number(value), ha="center", va="center", fontsize=style.LABEL, color=ink)
        elif len(trials[(trials.lr == grid.index[row]) & (trials.warmup_steps == grid.columns[column])]):
            ax.plot(column, row, "X", color=style.VERMILLION, markersize=10, markeredgecolor="white")
    if finding is not None and finding.told and finding.value in grid.columns:
        column, peak = list(grid.columns).index(finding.value), finding.evidence.get("peak_lr")
        row = int(np.argmin(abs(np.log(grid.index / peak)))) if peak else int(np.nanargmin(values[:, column]))
        ax.plot(column, row + 0.28, "*", color=style.ORANGE, markersize=15, markeredgecolor=style.BLACK)
    ax.set_xticks(range(len(grid.columns)), [f"{int(w):,}" for w in grid.columns])
    ax.set_yticks(range(len(grid.index)), [style.number(lr) for lr in grid.index])
    style.dress(ax, _title(finding, "Final loss by warmup length and peak rate"), "warmup (steps)",
                "peak learning rate")  # fmt: skip
    ax.grid(False)
    return ax


def compare(groups: Mapping[str, Sequence[Trace]], *, finding: Finding | None = None, ax: Axes | None = None) -> Axes:
    """Mean loss and its range over seeds, one colour a group, each group's best checkpoint starred (playbook: F4)."""
    ax = style.axes(ax)
    every = [trace for traces in groups.values() for trace in traces]
    column = "eval_loss" if any(np.isfinite(t.steps["eval_loss"]).any() for t in every) else "loss"
    top = _loss_axis(ax, [_series(trace, column) for trace in every])
    ends = []
    for (name, traces), colour in zip(groups.items(), _cycle(style.CATEGORIES), strict=False):
        whole = [t for t in traces if t.status == "finished"]
        if not whole:
            ends.append((top, f"{name}\nno seed finished", colour))
            continue
        runs = pd.concat([pd.Series(*_series(t, column)[::-1]) for t in whole], axis=1)
        shown = runs if column == "eval_loss" else runs.apply(lambda run: pd.Series(_median(run.to_numpy()), run.index))
        ax.fill_between(shown.index, shown.min(axis=1), shown.max(axis=1), color=colour, alpha=0.2, linewidth=0)
        mean, best = shown.mean(axis=1), shown.min()
        ax.plot(mean.index, mean, color=colour, linewidth=1.8)
        style.star(ax, mean.idxmin(), mean.min())
        spread = f" ± {style.number(float(f'{best.std(ddof=1):.1g}'))}" if len(whole) > 1 else ""
        count = f"{len(whole)} of {len(traces)} seeds" if len(whole) < len(traces) else f"{len(traces)} seeds"
        ends.append((mean.iloc[-1], f"{name}\nbest {style.number(best.mean())}{spread}\n{count}", colour))
    ax.margins(x=0.01)
    style.label_ends(ax, ends, gap=0.17)
    what = "evaluation loss" if column == "eval_loss" else "training loss"
    return style.dress(ax, _title(finding, "Prescription against present settings"), "step", f"{what} (mean, range)")


def time_to_target(table: pd.DataFrame, *, critical: Told = None, ax: Axes | None = None) -> Axes:
    """Steps, time and resource use to reach one loss, relative to the smallest batch size (playbook: B8 to B10).

    Args:
        table: columns batch_size, steps, seconds, and resources (device-seconds) if they differ from time.
        critical: the finding ``critical_batch_size``, or a size.
    """
    ax = style.axes(ax)
    table = table.sort_values("batch_size")
    size, names = table["batch_size"].to_numpy(float), ("steps", "seconds", "resources")
    first = table.iloc[0]
    drawn = {name: table[name].to_numpy(float) / float(first[name]) for name in names if name in table}
    ax.set(xscale="log", yscale="log", xlim=(size.min() / 1.2, size.max() * 1.2))
    ax.set_xticks(size, [style.number(b) for b in size])
    ax.set_xticks([], minor=True)
    style.scale(ax.yaxis, [v for values in drawn.values() for v in values], least=1.0)
    ax.plot(size, size[0] / size, ":", color=style.GREY, linewidth=1.2, scaley=False)
    ends = []
    for (name, values), colour in zip(drawn.items(), (style.BLUE, style.GREEN, style.PURPLE), strict=False):
        ax.plot(size, values, "o-", color=colour, linewidth=1.8, markersize=5, markeredgecolor="white")
        end = table[name].iloc[-1]
        says = {"steps": f"{end:,.0f} steps", "seconds": style.duration(end), "resources": f"{end:,.0f} device s"}
        ends.append((values[-1], says[name], colour))
    style.label_ends(ax, [*ends, (size[0] / size[-1], "perfect scaling", style.GREY)])
    if (where := _interval(critical)) is not None:
        low, high = where if where[0] < where[1] else (where[0] / 1.05, where[1] * 1.05)
        style.band(ax, low, high, style.ORANGE, "critical batch size")
    return style.dress(ax, _title(critical, "What it takes to reach the same loss"), "batch size (examples)",
                       f"relative to batch size {style.number(size[0])} (= 1)")  # fmt: skip


def _title(told: Any, otherwise: str) -> str:
    return told.summary if isinstance(told, Finding) else otherwise


def _value(told: Any) -> float | None:
    """The number in a finding, its evidence or the caller's hand; None where there is none."""
    value = told.value if isinstance(told, Finding) else told
    try:
        return float(value) if np.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


def _interval(told: Any) -> tuple[float, float] | None:
    if isinstance(told, (tuple, list)):
        return (float(told[0]), float(told[1]))
    if isinstance(told, Finding) and told.interval is not None:
        return told.interval
    value = _value(told)
    return None if value is None else (value, value)


def _finite(value: Any) -> float:
    return float(value) if value is not None else float("nan")


def _feasible(trials: pd.DataFrame) -> np.ndarray:
    return ((trials["status"] == "finished") & np.isfinite(trials["final"].astype(float))).to_numpy()


def _all_or_nan(values: pd.Series) -> float:
    return float("nan") if values.isna().any() else float(values.median())


def _cycle(colours: Sequence[Any]) -> list[Any]:
    return [*colours] * 20


def _by_rate(traces: Iterable[Trace]) -> dict[str, Trace]:
    ordered = sorted(traces, key=lambda t: (t.trial.lr, t.trial.seed))
    rates = [t.trial.lr for t in ordered]
    repeated = len(set(rates)) < len(rates)
    return {style.number(t.trial.lr) + (f", seed {t.trial.seed}" if repeated else ""): t for t in ordered}


def _series(trace: Trace, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The finite values of a column and their steps."""
    values = trace.steps[column].to_numpy(float)
    fine = np.isfinite(values)
    return trace.steps["step"].to_numpy()[fine], values[fine]


def _norms(trace: Trace | Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(trace, Trace):
        return trace.steps["step"].to_numpy(), trace.steps["grad_norm"].to_numpy(float)
    norm = np.asarray(list(trace), dtype=float)
    return np.arange(len(norm)), norm


def _median(values: np.ndarray) -> np.ndarray:
    window = max(1, len(values) // 40) | 1
    return pd.Series(values).rolling(window, center=True, min_periods=1).median().to_numpy()


def _loss_axis(ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Scale the y axis for losses and return its top: what explodes leaves through it instead of squeezing the rest."""
    losses = [loss for _, loss in curves if len(loss)]
    if not losses:
        return 1.0
    every, starts = np.concatenate(losses), [loss[0] for loss in losses]
    logarithmic = style.scale(ax.yaxis, np.minimum(every, max(starts) * 20 if min(starts) > 0 else np.inf))
    if not logarithmic:
        reach = 2 * (max(starts) - every.min()) + 1e-12
        top = min(every.max(), max(starts) + reach)
    else:
        top = min(every.max(), max(starts) * 20)
    room = (top / every.min()) ** 0.05 if logarithmic else (top - every.min()) * 0.05 + 1e-12
    ax.set_ylim((every.min() / room, top * room) if logarithmic else (every.min() - room, top + room))
    return float(top)


def _curve(ax: Axes, step: np.ndarray, loss: np.ndarray, colour: Any, top: float, *, raw: bool = True) -> float:
    """A faint raw line under its running median; returns the height it ends at, within the axis."""
    smooth = _median(loss)
    if raw:
        ax.plot(step, loss, color=colour, linewidth=0.7, alpha=0.28)
    ax.plot(step, smooth if raw else loss, color=colour, linewidth=1.7)
    return float(min(smooth[-1] if raw else loss[-1], top)) if len(loss) else top
