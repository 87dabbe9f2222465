"""Why did a run become unstable? (playbook: C2, C4) Signs in its norms, and the verdict on them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.finding import Finding

RULE = "playbook: C2, C4"
#: A norm has moved at this many times, and this many spreads of its logarithm above, its own median before.
TIMES, SPREADS = 3.0, 6.0
#: Initial weights this many times the scale of the other layers' are suspect.
SCALE = 10.0
#: Steps before an event that a norm is compared with.
BEFORE = 50


def moved_first(norms: pd.DataFrame, begin: int) -> tuple[str, int, float] | None:
    """The layer whose norm left its own past first, at which step, and how many times that past it was.

    Args:
        norms: a column a layer, a row a step.
        begin: the step at which the loss begins to rise; a norm may have moved shortly before.
    """
    end = max(1, begin - 5)
    past = norms.iloc[max(0, end - BEFORE) : end]
    middle = past.median()
    alive = middle.index[(middle > 0) & np.isfinite(middle)]
    height = np.log((norms[alive] / middle[alive]).clip(lower=np.finfo(float).tiny)).where(
        np.isfinite(norms[alive]), np.inf
    )
    spread = 1.4826 * height.loc[past.index].abs().median() * (len(past) >= 10)
    over = height.iloc[end : begin + 10] > np.maximum(np.log(TIMES), SPREADS * spread)
    if not over.any(axis=None):
        return None
    step = int(over.index[over.any(axis=1)][0])
    layer = str(height.loc[step].idxmax())
    return layer, step, float(norms.at[step, layer] / middle[layer])


def outlying(norms: Any, step: int) -> bool:
    """Whether the norm of one step stands clear of those of the steps before it."""
    values = np.asarray(norms, dtype=float)
    if not 5 <= step < len(values):
        return False
    past = values[max(0, step - BEFORE) : step]
    past = past[np.isfinite(past)]
    return bool(len(past) >= 5 and not values[step] <= TIMES * np.percentile(past, 90))


def oversized(gains: pd.Series) -> tuple[str, float] | None:
    """The parameter that begins at ``SCALE`` times the others' median scale or more, and how many times."""
    if len(gains) < 2 or not gains.max() > 0:
        return None
    name = str(gains.idxmax())
    others = float(gains.drop(name).median())
    return (name, float(gains[name]) / others) if others > 0 and gains[name] >= SCALE * others else None


def judge(signs: Mapping[str, Any]) -> Finding:
    """The cause of a run's first instability, the rarest first, each only where an experiment confirms it.

    Args:
        signs: ``begin`` (step) and ``lr`` of the run; what was found of ``overflow``, ``initialisation``
            and ``batch``, each with ``confirmed``; ``moved`` (a sentence), ``sharpness`` and
            ``sharpness_limit``; ``stable_lr``, a rate at which the same batches train stably.

    Returns:
        Finding ``instability_cause``: ``overflow``, ``initialisation``, ``bad_batch``,
        ``learning_rate``, ``none`` where nothing is unstable, or None.
    """
    if "begin" not in signs:
        return _finding("none", "No loss rises, so there is no cause to look for.", signs, "high")
    moved = f" {signs['moved']}" if signs.get("moved") else ""
    for name in ("overflow", "initialisation", "batch"):
        sign = signs.get(name)
        if sign and sign["confirmed"]:
            value = "bad_batch" if name == "batch" else name
            return _finding(value, f"{sign['text']} {sign['test']}{moved}", signs, "high")
    tried = [signs[name] for name in ("overflow", "initialisation", "batch") if signs.get(name)]
    suspects = "".join(f" {sign['text']} But {sign['test']}" for sign in tried)
    sharp, limit = signs.get("sharpness"), signs.get("sharpness_limit")
    if sharp is not None and limit is not None and sharp > limit:
        text = f"Just before, the sharpness is {sharp:.3g}, above the {limit:.3g} that lr {signs['lr']:.3g} can follow."
        return _finding("learning_rate", f"The rate is too high. {text}{moved}{suspects}", signs, "high")
    if signs.get("stable_lr"):
        text = f"The rate is too high: the same batches train stably at {signs['stable_lr']:.3g}."
        return _finding("learning_rate", f"{text}{moved}{suspects}", signs, "medium")
    return Finding(
        name="instability_cause",
        value=None,
        rule=RULE,
        summary=f"No cause can be told: it is unstable at every rate tried.{moved}{suspects}",
        confidence="low",
        evidence=dict(signs),
        settle="Try lower rates, and look at the data of the batches before the rise.",
    )


def _finding(value: str, text: str, signs: Mapping[str, Any], confidence: str) -> Finding:
    return Finding(
        name="instability_cause",
        value=value,
        rule=RULE,
        summary=text,
        confidence=confidence,
        evidence=dict(signs),
    )
