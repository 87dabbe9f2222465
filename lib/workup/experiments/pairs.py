"""Two settings over several seeds: whether one ends lower, and whether that stands clear of the seeds (C1, F3)."""

import dataclasses

import numpy as np

from workup.experiments.learning_rate import final_loss, initial_loss
from workup.experiments.session import Session
from workup.judge.difference import Difference, compare
from workup.trace import Trial

#: Seeds to begin with, and at most, where the first do not settle it.
SEEDS = {"smoke": (1, 1), "standard": (3, 5), "thorough": (5, 8)}


def over_seeds(session: Session, trial: Trial, other: Trial) -> Difference:
    """How much lower ``trial`` ends than ``other``; more seeds are taken, up to a limit, until that is settled."""
    fewest, most = SEEDS[session.budget]
    for count in range(fewest, most + 1):
        pairs = [dataclasses.replace(t, seed=session.seed + k) for k in range(count) for t in (trial, other)]
        traces = session.run(pairs, label=f"over {count} seeds")
        ends = [final_loss(trace) for trace in traces]
        start = float(np.mean([initial_loss(trace) for trace in traces]))
        found = compare(ends[::2], ends[1::2], start)
        if found.is_conclusive:
            break
    return found
