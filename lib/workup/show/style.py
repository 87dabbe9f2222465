"""What every figure shares: size, colours, scales, and labels that stand beside what they name."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by every common kind of colour blindness, and in grey.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#6B6B6B"
CATEGORIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
SIZE_INCHES = (7.0, 4.2)
LABEL, SMALL = 10.5, 9.0
MOST_LABELS = 9


def axes(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure of 7 x 4.2 inches."""
    return plt.subplots(figsize=SIZE_INCHES, dpi=130, layout="constrained")[1] if ax is None else ax


def dress(ax: Axes, title: str, x: str, y: str) -> Axes:
    """Title at the left, axes named with their units, no box, a faint grid behind the data."""
    ax.set_title(wrap(title), loc="left", fontsize=12, fontweight="bold", pad=10)
    ax.set_xlabel(x, fontsize=LABEL)
    ax.set_ylabel(y, fontsize=LABEL)
    ax.tick_params(which="both", labelsize=SMALL + 0.5, color=GREY)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.grid(True, which="major", color="0.9", linewidth=0.7)
    ax.set_axisbelow(True)
    return ax


def wrap(text: str, width: int = 74, lines: int = 2) -> str:
    """``text`` on at most ``lines`` lines, cut at a word.

    >>> wrap("one two three", width=7)
    'one two\\nthree'
    """
    import textwrap

    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def scale(axis: Any, values: Iterable[float], *, least: float = 2.0) -> bool:
    """A log scale with plain numbers where all finite ``values`` are positive and span a factor ``least``.

    Returns whether it did; an axis of losses that may be negative stays linear.
    """
    finite = np.asarray(list(values), dtype=float)
    finite = finite[np.isfinite(finite)]
    if not finite.size or finite.min() <= 0 or finite.max() < least * finite.min():
        return False
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    decades = math.log10(finite.max() / finite.min())
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(ticker.NullFormatter())
    return True


def number(value: float) -> str:
    """A tick or a label in as few digits as are meant.

    >>> [number(v) for v in (0.00031, 0.03, 12, 4096, 2e6, 1e-6)]
    ['0.00031', '0.03', '12', '4,096', '2e6', '1e-6']
    """
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e") if math.isfinite(value) else (str(value), "0")
    return f"{float(mantissa):g}e{int(exponent)}" if math.isfinite(value) else mantissa


def duration(seconds: float) -> str:
    """Seconds in the unit one would say them in.

    >>> [duration(s) for s in (0.00312, 12.34, 600, 7300)]
    ['3.1 ms', '12 s', '10 min', '2 h']
    """
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.2g} h"


def ramp(count: int) -> list[Any]:
    """``count`` colours from dark to light, in the order of what they stand for."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.87, max(count, 1))))


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, Any]], *, gap: float = 0.062) -> None:
    """Names at the right edge, at the heights ``(y, name, colour)`` of what they name, pushed apart.

    Of more than ``MOST_LABELS`` only every so many are named: the colours run in order.
    """
    if not ends:
        return
    kept = np.unique(np.linspace(0, len(ends) - 1, min(len(ends), MOST_LABELS)).round().astype(int))
    place = ax.transData + ax.transAxes.inverted()
    left = ax.get_xlim()[1]
    rows = sorted((float(np.clip(place.transform((left, ends[i][0]))[1], 0, 1)), *ends[i][1:]) for i in kept)
    heights = np.array([row[0] for row in rows])
    for _ in range(200):  # neighbours too close push each other apart by equal parts
        close = gap - np.diff(heights)
        if not (close > 1e-4).any():
            break
        push = np.where(close > 0, close / 2, 0.0)
        heights[:-1] -= push
        heights[1:] += push
    for (target, name, colour), height in zip(rows, heights, strict=True):
        ax.annotate(
            name,
            (1.0, target),
            (1.025, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=SMALL,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def band(ax: Axes, low: float, high: float, colour: str, name: str, *, top: float = 0.03) -> None:
    """A shaded stretch of x with its name inside, ``top`` of the way up."""
    ax.axvspan(low, high, color=colour, alpha=0.13, linewidth=0, zorder=0)
    low, high = np.clip((low, high), *sorted(ax.get_xlim()))
    middle = math.sqrt(low * high) if ax.get_xscale() == "log" else (low + high) / 2
    ax.text(middle, top, name, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=SMALL,
            color=colour)  # fmt: skip


def crosses(ax: Axes, x: Iterable[float], colour: Any = VERMILLION) -> None:
    """What has no finite value: a cross at the top of the axis."""
    ax.plot(list(x), [0.965] * len(list(x)), "X", color=colour, markersize=8, markeredgecolor="white",
            transform=ax.get_xaxis_transform(), linestyle="none", zorder=5)  # fmt: skip


def star(ax: Axes, x: float, y: float, name: str = "") -> None:
    """The best: a star, with its name above."""
    ax.plot([x], [y], "*", color=ORANGE, markersize=17, markeredgecolor=BLACK, markeredgewidth=0.9, zorder=6)
    if name:
        ax.annotate(name, (x, y), (0, 11), textcoords="offset points", ha="center", fontsize=LABEL, fontweight="bold")
