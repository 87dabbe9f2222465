"""Rises of a loss curve that last and stand clear of its noise.

Levels are running medians at several lengths, so that a jump of six steps and a drift of a
thousand are both seen, and one outlier batch at none of them. Noise is the curve's own local
spread, so multiplying the loss by a positive constant changes nothing. Above its first value
a loss is seen on a log scale: there noise climbs with the level, and would hide the climb.
"""

from typing import Any

import numpy as np
import pandas as pd

#: Fewest finite values that can be judged.
FEWEST = 12
#: An event lifts a running median above the lowest it had been by this many times what chance alone does to
#: medians of the curve's noise: the highest of k stands 2 sqrt(2 ln k) of their deviations above the lowest, k at
#: least a few, for the noise of a run's first steps is badly known …
CLEAR, FEW = 1.5, 5
#: … by this many deviations of single values, before it and after, as an eye asks that looks at a long slow rise …
VISIBLE = 2.1
#: … and by this share of the whole descent; the loss is back when half of what was needed is left.
SHARE = 0.0195
#: It stays up for this many logged values at the least (a median over 5 needs three high ones for that).
LASTS = 3
#: Lengths of the running medians, in logged values; a longer one is used once the run is eight of it long.
WINDOWS = (5, 15, 45, 135, 405, 1215)
#: A loss is rounded to this share of its first value, or of how far it falls, at the coarsest.
COARSE = 0.05
#: A first loss is taken for an odd draw where none of the next five lies this many deviations above it.
ODD = 10
#: Logged values that the noise is estimated from.
NOISE_WINDOW = 64


def levelled(y: np.ndarray) -> tuple[np.ndarray, float]:
    """The curve with what is above its first value on a log scale, shape [n], and the distance at which that bends.

    The order of the values stays, and with it their medians; what never exceeds the first value is unchanged.
    """
    scale = max(abs(y[0]), y[0] - y.min()) or np.abs(y).max()
    scale = max(float(scale), np.finfo(float).tiny)
    return np.minimum(y, y[0]) + scale * np.log1p(np.maximum(y - y[0], 0.0) / scale), scale


def begun(y: np.ndarray) -> np.ndarray:
    """The curve, its first loss (a single draw) no lower than the median of the next five, if noise explains that."""
    seen, scale = levelled(y)
    noise = noise_of(seen)
    if seen[1:6].max(initial=-np.inf) > seen[0] + ODD * tail_of(seen, noise) * noise[:NOISE_WINDOW][-1]:
        return y  # no draw but an explosion
    return np.append(max(y[0], unlevelled(float(np.median(seen[1:6])), y[0], scale)), y[1:]) if len(y) > 1 else y


def unlevelled(level: float, first: float, scale: float) -> float:
    """The loss that :func:`levelled` sees as ``level``."""
    return float(min(level, first) + scale * np.expm1(max(level - first, 0.0) / scale))


def find_events(y: np.ndarray, noise: np.ndarray) -> list[dict[str, Any]]:
    """The events of a :func:`levelled` curve of shape [n], by index: begin, peak, end, size, rise, base, recovered."""
    found: list[dict[str, Any]] = []
    if len(y) < FEWEST:
        return found
    for window in WINDOWS:
        if window > WINDOWS[0] and len(y) < 8 * window:
            break
        found += _at_scale(y, noise, window)
    return _merge(found)


def _at_scale(y: np.ndarray, noise: np.ndarray, window: int) -> list[dict[str, Any]]:
    """Rises of the running median over ``window`` above the lowest level before it."""
    level, steps = _level(y, window), np.arange(len(y))
    past = np.concatenate([np.full(window, y[0]), level[:-window]])
    if window == WINDOWS[0]:
        # In the very first steps a median of three tells what was before, as soon as three high values can follow a
        # low one. Later it would be a heavy tail's longest stretch of luck.
        past = np.where(steps < 4 * window, np.concatenate([np.full(3, y[0]), _level(y, 3)[:-3]]), past)
    low = np.minimum.accumulate(past)
    where = np.maximum.accumulate(np.where(past <= low, steps, 0))
    where = np.maximum(where - window, 0)
    chance = CLEAR * 2 * np.sqrt(2 * np.log(1 + np.maximum(steps / window, FEW)))
    wander = _wander(level, window)[where]
    # A median over few values is as wild as the noise's tail, one over many is not.
    white = 1.25 / np.sqrt(window) * (tail_of(y, noise) if window == WINDOWS[0] else 1.0)

    def needed(single: np.ndarray, seen: np.ndarray) -> np.ndarray:
        spread = np.where(wander > 1.5 * white * single, wander, white * single)
        return np.maximum.reduce([chance * spread, VISIBLE * seen, SHARE * (y[0] - low)])

    # Noise that grows as training sets in is no rise: what it was at the lowest level, is now, and is about to be, …
    before, now = noise[where], np.maximum(noise[where], noise)
    ahead = np.maximum(now, noise[np.minimum(steps + NOISE_WINDOW - 1, len(y) - 1)])
    need = needed(np.sqrt(now * ahead) if window == WINDOWS[0] else now, ahead)
    # … but where even the low values stand clear of what it was, it hides nothing.
    if window > 15:
        calm = needed(before, before)
        need = np.where(pd.Series(y).rolling(window).quantile(0.1).to_numpy() - low > calm, calm, need)
    over = level - low > need
    found, t = [], 0
    while t < len(y) and over[t:].any():
        first = t + int(np.argmax(over[t:]))
        base, size_unit = low[first], noise[where[first]]
        back = np.flatnonzero(level[first:] <= base + need[first] / 2)
        stop = first + int(back[0]) if len(back) else len(y)
        t = stop
        if stop - first < LASTS and stop < len(y):
            continue
        under = np.flatnonzero(y[: first + 1] <= base + need[first])
        begin = int(under[-1]) + 1 if len(under) else 0
        peak = begin + int(np.argmax(level[begin:stop])) if stop > begin else first
        height = float(level[peak] - base)
        found.append(
            {
                "begin": min(begin, first),
                "peak": peak,
                "end": stop if stop < len(y) else None,
                "size": float(height / size_unit) if size_unit > 0 else float("inf"),
                "rise": height,
                "base": float(base),
                "recovered": stop < len(y),
            }
        )
    return found


def _merge(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One event where several window lengths saw the same one."""
    merged: list[dict[str, Any]] = []
    for event in sorted(found, key=lambda e: e["begin"]):
        last = merged[-1] if merged else None
        if last is None or (last["end"] is not None and event["begin"] >= last["end"]):
            merged.append(dict(event))
            continue
        if event["rise"] > last["rise"]:
            last.update({k: event[k] for k in ("peak", "size", "rise", "base")})
        if last["end"] is not None and (event["end"] is None or event["end"] > last["end"]):
            last.update(end=event["end"], recovered=event["recovered"])
    return merged


def _level(y: np.ndarray, window: int) -> np.ndarray:
    """Running median of the last ``window`` values, shape [n]; the first value until half of them are there."""
    level = pd.Series(y).rolling(window, min_periods=window // 2 + 1).median().to_numpy(copy=True)
    level[: window // 2] = y[0]
    return level


def tail_of(y: np.ndarray, noise: np.ndarray) -> float:
    """How far the noise's rarest twentieth stands off, beside a Gaussian's of the same spread: from 1 to 2."""
    middle = np.minimum(np.arange(2, len(y)) + NOISE_WINDOW // 2, len(y) - 1)
    bends = np.abs(np.diff(y, n=2)) / np.maximum(noise[middle], np.finfo(float).tiny)
    return float(np.clip(np.quantile(bends, 0.95) / (1.96 * np.sqrt(6)), 1, 2)) if len(bends) else 1.0


def noise_of(y: np.ndarray) -> np.ndarray:
    """Local standard deviation of single values about the trend, shape [n], from a window that ends there.

    Second differences see noise and neither slope nor level. Within the first window stands its
    end, so that an early rise cannot hide itself, or what it was so far where that is more.
    """
    bends = pd.Series(np.abs(np.diff(y, n=2, prepend=[y[0], y[0]])))
    spread = bends.rolling(NOISE_WINDOW, min_periods=1).median().to_numpy(copy=True) * 1.4826 / np.sqrt(6)
    end = min(NOISE_WINDOW, len(y)) - 1
    spread[: end // 2] = spread[end // 2]
    spread[: end + 1] = np.maximum(spread[: end + 1], spread[end])
    # Logged losses are often rounded: noise below the rounding is not to be believed. A coarser step is no rounding.
    moves = np.abs(np.diff(y))
    coarse = COARSE * max(abs(y[0]), y[0] - y.min())
    return np.maximum(spread, min(moves[moves > 0].min(initial=np.inf) / 2, coarse)) if moves.any() else spread


def _wander(level: np.ndarray, window: int) -> np.ndarray:
    """Spread of the level's own bends over two windows, from the past, shape [n]; the whole run's till that is known.

    A run of few windows does not know its own: its events would be its wander, which is then 0.
    """
    stride = max(1, window // 5)  # the level hardly moves in between
    bends = pd.Series(np.abs(level[2 * window :] - 2 * level[window:-window] + level[: -2 * window]))[::stride]
    spread = bends.rolling(12 * window // stride, min_periods=6 * window // stride).median()
    known = spread.fillna(bends.median() if len(level) >= 24 * window else 0.0).to_numpy()
    return np.concatenate([np.zeros(2 * window), np.repeat(known, stride)])[: len(level)] * 1.4826 / np.sqrt(6)
