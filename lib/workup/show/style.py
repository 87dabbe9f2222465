"""What every figure shares: size, colours, scales, and names that stand beside what they name."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colors, ticker
from matplotlib.axes import Axes

from workup.finding import Finding

# Okabe and Ito's palette: told apart under every common kind of colour blindness, and in grey.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#6B6B6B"
CATEGORIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
LOOKS = tuple(zip(CATEGORIES, ("-", "--", "-.", ":", "-", "--", "-."), strict=True))  # apart in grey print
TEXT, SMALL = 10.5, 9.0
DOT: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white"}
MOST_LABELS = 9


def axes(ax: Axes | None) -> Axes:
    """``ax``, or the axes of a new figure of 7 x 4.2 inches."""
    return plt.subplots(figsize=(7.0, 4.2), dpi=130, layout="constrained")[1] if ax is None else ax


def dress(ax: Axes, title: Finding | str, x: str, y: str) -> Axes:
    """Title (a finding's sentence) at the left, axes named with their units, no box, a faint grid behind the data.

    Of a title too long for three lines the first sentence stands alone.
    """
    words = title if isinstance(title, str) else title.summary
    together = re.sub(r"(?<=\d) (?=m?s\b)|(?<=×) ", "\N{NO-BREAK SPACE}", words)
    if len(textwrap.wrap(together, 62)) > 3:
        together = re.split(r"(?<=\.) (?=[A-Z])", together)[0]
    lines = textwrap.wrap(together, 62, max_lines=3, placeholder=" …")
    ax.set_title("\n".join(lines), loc="left", fontsize=11.5, fontweight="bold", pad=10)
    ax.set_xlabel(x, fontsize=TEXT)
    ax.set_ylabel(y, fontsize=TEXT)
    ax.tick_params(which="both", labelsize=SMALL + 0.5, color=GREY)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.grid(True, which="major", color="0.9", linewidth=0.7)
    ax.set_axisbelow(True)
    return ax


def scale(axis: Any, values: Iterable[float], *, least: float = 2.0) -> bool:
    """A log scale with plain numbers, where all finite ``values`` are positive and span a factor ``least``.

    Returns whether it is one; an axis of losses that are or may be negative stays linear.
    """
    finite = np.asarray(list(values), dtype=float)
    finite = finite[np.isfinite(finite)]
    if not finite.size or finite.min() <= 0 or finite.max() < least * finite.min():
        return False
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(ticker.FixedLocator(ticks(finite.min(), finite.max())))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(ticker.NullFormatter())
    return True


def ticks(low: float, high: float) -> list[float]:
    """Round numbers for a log axis: three or more of them from ``low`` to ``high``, at most nine, others outside.

    >>> [number(tick) for tick in ticks(0.02, 0.6) if 0.02 <= tick <= 0.6]
    ['0.02', '0.05', '0.1', '0.2', '0.5']
    """
    if high < 1.05 * low:  # so close that three digits would not tell them apart
        low, high = low / 1.3, high * 1.3
    decades = np.arange(max(math.floor(math.log10(low)) - 1, -307), min(math.ceil(math.log10(high)) + 1, 307))
    choices = [((1,), every, 4) for every in (50, 20, 10, 5, 3, 2, 1)]
    for digits, every, least in (*choices, ((1, 3), 1, 4), ((1, 2, 5), 1, 3), ((1, 1.5, 2, 3, 5, 7), 1, 3)):
        marks = np.outer(10.0 ** decades[decades % every == 0], digits).ravel()
        if np.count_nonzero((low <= marks) & (marks <= high)) >= least:
            return list(marks)
    return list(ticker.MaxNLocator(5).tick_values(low, high))


def sizes(ax: Axes, batch_sizes: Iterable[float]) -> None:
    """A log x axis with a tick at every batch size measured."""
    ticks = sorted(batch_sizes)
    ax.set(xscale="log", xlim=(ticks[0] / 1.4, ticks[-1] * 1.4))
    ax.set_xticks(ticks, [number(size) for size in ticks])
    ax.set_xticks([], minor=True)


def number(value: float) -> str:
    """A tick or a label in as few digits as are meant.

    >>> [number(v) for v in (0.00031, 0.03, 12, 4096, 2e6, 1e-6, float("nan"))]
    ['0.00031', '0.03', '12', '4,096', '2e6', '1e-6', 'nan']
    """
    if value == 0 or 1e-4 <= abs(value) < 1e6 or not math.isfinite(value):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def duration(seconds: float) -> str:
    """Seconds in the unit one would say them in.

    >>> [duration(s) for s in (0.00312, 1.234, 12.34, 600, 7300)]
    ['3.1 ms', '1.2 s', '12 s', '10 min', '2 h']
    """
    unit, size = next((u, s) for u, s, most in _UNITS if seconds < most)
    return f"{seconds / size:.0f} {unit}" if seconds / size >= 10 else f"{seconds / size:.2g} {unit}"


_UNITS = (("ms", 0.001, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, math.inf))


def ramp(count: int) -> list[Any]:
    """``count`` colours from dark to light, in the order of what they stand for."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.8, max(count, 1))))


def note(ax: Axes, x: float, y: float, text: str, colour: Any = GREY, *, at: str = "data", **how: Any) -> None:
    """Small text in a darker shade of ``colour``; ``at`` is data, axes, or top: x in data, y a share of the height."""
    place = {"data": ax.transData, "axes": ax.transAxes, "top": ax.get_xaxis_transform()}[at]
    ax.text(x, y, text, transform=place, color=ink(colour), fontsize=SMALL, **how)


def ink(colour: Any) -> Any:
    """A shade of ``colour`` dark enough to read as text on white."""
    red, green, blue = colors.to_rgb(colour)
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    darker = min(1.0, (0.18 / max(luminance, 1e-9)) ** (1 / 2.2))
    return (red * darker, green * darker, blue * darker)


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, Any]], *, gap: float = 0.062) -> None:
    """Names at the right edge, at the heights ``(y, name, colour)`` of what they name, pushed ``gap`` apart.

    Of more than ``MOST_LABELS`` only every so many are named: the colours run in order.
    """
    kept = np.unique(np.linspace(0, len(ends) - 1, min(len(ends), MOST_LABELS)).round().astype(int))
    place = ax.transData + ax.transAxes.inverted()
    right = ax.get_xlim()[1]
    rows = sorted((float(np.clip(place.transform((right, ends[i][0]))[1], 0, 1)), *ends[i][1:]) for i in kept)
    heights = np.array([row[0] for row in rows])
    for _ in range(300):  # neighbours too close push each other apart by equal parts
        push = np.maximum(gap - np.diff(heights), 0.0) / 2
        heights[:-1] -= push
        heights[1:] += push
        heights = np.clip(heights, 0.0, 1.0)
    for (target, name, colour), height in zip(rows, heights, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0}
        ax.annotate(name, (1.0, target), (1.025, height), xycoords="axes fraction", textcoords="axes fraction",
                    va="center", fontsize=SMALL, color=ink(colour), arrowprops=leader)  # fmt: skip


def band(ax: Axes, low: float, high: float, colour: str, name: str, *, row: int = 0) -> None:
    """A shaded stretch of x with its name inside, at the foot or ``row`` lines above it."""
    low, high = (low, high) if low < high else (low / 1.06, high * 1.06)
    ax.axvspan(low, high, color=colour, alpha=0.14, linewidth=0, zorder=0)
    left, right = sorted(ax.get_xlim())
    low, high = max(low, left), min(high, right)
    middle = math.sqrt(low * high) if ax.get_xscale() == "log" else (low + high) / 2
    middle, side = (right, "right") if high == right else (middle, "center")
    note(ax, middle, 0.03 + 0.055 * row, name, colour, at="top", ha=side)


def crosses(ax: Axes, x: Iterable[float]) -> None:
    """What has no finite value: a cross at the top of the axis."""
    x = list(x)
    ax.plot(x, [0.965] * len(x), "X", color=VERMILLION, markersize=8, markeredgecolor="white",
            transform=ax.get_xaxis_transform(), zorder=5)  # fmt: skip


def star(ax: Axes, x: float, y: float, name: str = "") -> None:
    """The best: a star, with its name above."""
    ax.plot([x], [y], "*", color=ORANGE, markersize=16, markeredgecolor=BLACK, markeredgewidth=0.9, zorder=6)
    ax.annotate(name, (x, y), (0, 11), textcoords="offset points", ha="center", fontsize=TEXT, fontweight="bold")
