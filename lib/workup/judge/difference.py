"""Does one training end lower than another, and does it matter? (playbook: C1, F3)

A difference of two losses is said as a share of the descent, from the loss before training to where the better
known settings end: 0.0001 is much on a loss that fell by 0.001 and nothing on one that fell by 2.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from workup.judge.given import curve

#: A lower final loss is worth a change of settings from this share of the descent on.
WORTH = 0.01
#: Student's t, two-sided 95%, by degrees of freedom; past the table the normal's 1.96.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Difference:
    """How much lower one training ends than another.

    Args:
        share: of the descent; negative where it ends higher, inf where only the other failed.
        interval: 95% interval of the share over seeds, or None from one seed.
        seeds: pairs compared.
    """

    share: float
    interval: tuple[float, float] | None
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether it stands clear of the spread over seeds; of one seed nothing is known."""
        return self.interval is None or self.interval[0] > 0 or self.interval[1] < 0

    @property
    def matters(self) -> bool:
        """Whether it is lower by enough to be worth a change, and clear of the seeds."""
        return self.share >= WORTH and self.clear

    @property
    def is_conclusive(self) -> bool:
        """Whether more seeds would change nothing: it matters, or is surely too small to."""
        if self.interval is None or not math.isfinite(self.share):
            return not math.isfinite(self.share)
        return (self.clear and abs(self.share) >= WORTH) or (self.interval[0] > -WORTH and self.interval[1] < WORTH)

    def words(self, other: str) -> str:
        """What follows "it ends …".

        >>> print(compare([0.2], [0.4], 2.4).words("lr 0.1"))
        lower than lr 0.1, by 10% of the descent
        >>> print(compare([0.2], [0.2001], 2.2).words("lr 0.1"))
        where lr 0.1 does, to within 0.005% of the descent
        """
        if math.isinf(self.share):
            return f"at a finite loss, unlike {other}" if self.share > 0 else f"at no finite loss, unlike {other}"
        over = ""
        if self.interval is not None:
            over = f" (95% interval {_percent(self.interval[0])} to {_percent(self.interval[1])}, {self.seeds} seeds)"
        if abs(self.share) < WORTH:
            return f"where {other} does, to within {_percent(abs(self.share))} of the descent{over}"
        side = "lower" if self.share > 0 else "higher"
        within = "" if self.clear else ", which is within the spread of the seeds"
        return f"{side} than {other}, by {_percent(abs(self.share))} of the descent{over}{within}"


def compare(final: Any, other: Any, initial: float) -> Difference:
    """How much lower ``final`` is than ``other``, a value a seed of each, shape [seeds].

    Args:
        initial: loss before training; the descent goes from there to the mean of ``other``. NaN where it is not
            known: the share is then of the mean of ``other`` itself.
    """
    lower, higher = curve(np.atleast_1d(final), "final"), curve(np.atleast_1d(other), "other")
    lower, higher = lower[: len(higher)], higher[: len(lower)]
    if not np.isfinite(lower).all():
        return Difference(-math.inf, None, len(lower))
    if not np.isfinite(higher).all():
        return Difference(math.inf, None, len(lower))
    gains = higher - lower
    descent = abs(float(initial) - float(higher.mean()))
    if not math.isfinite(descent) or descent == 0:
        descent = abs(float(higher.mean())) or 1.0
    shares = gains / descent
    return Difference(float(shares.mean()), mean_interval(shares) if len(shares) > 1 else None, len(shares))


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of a few values, shape [n >= 2], by Student's t.

    Example:
        >>> [round(v, 3) for v in mean_interval(np.array([1.0, 2.0, 3.0]))]
        [-0.484, 4.484]
    """
    n = len(values)
    half = (_T95[n - 2] if n - 2 < len(_T95) else 1.96) * float(np.std(values, ddof=1)) / math.sqrt(n)
    centre = float(np.mean(values))
    return centre - half, centre + half


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if abs(share) < 10 else f"{share:.2g} times"
