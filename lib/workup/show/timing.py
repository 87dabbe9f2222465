"""Durations side by side: what takes how long, every measurement of it a dot."""

import pandas as pd
from matplotlib.axes import Axes

from workup.finding import Finding
from workup.show import style


def durations(
    table: pd.DataFrame, names: str, seconds: str, *, title: Finding | str = "", ax: Axes | None = None
) -> Axes:
    """A row for each name, in the order of the table: a dot for each duration, the median with its value.

    Args:
        table: one row a measurement.
        names, seconds: its columns with the name of what was measured and how long it took; rows
            without a duration are left out.
        title: a finding, whose summary it states, or words.
    """
    ax = style.axes(ax)
    table = table[table[seconds] > 0]
    order = list(dict.fromkeys(table[names]))
    style.scale(ax.xaxis, table[seconds] * 1000, least=5.0)
    for row, name in enumerate(order):
        taken = table.loc[table[names] == name, seconds]
        middle = float(taken.median())
        if len(taken) > 1:
            ax.plot(taken * 1000, [row] * len(taken), "o", color=style.SKY, markersize=5, markeredgecolor="white")
        ax.plot([middle * 1000], [row], "|", color=style.BLUE, markersize=18, markeredgewidth=2.5)
        style.note(ax, middle * 1000, row - 0.42, style.duration(middle), style.BLUE, ha="center", va="center")
    ax.set_yticks(range(len(order)), order)
    ax.set_ylim(len(order) - 0.4, -0.75)
    ax.margins(x=0.08)
    if ax.get_xscale() == "linear":
        ax.set_xlim(0, table[seconds].max() * 1080)
    words = title.summary if isinstance(title, Finding) else title
    return style.dress(ax, words, "time (ms)", "")
