"""Does training wait for its data, why, and which loader settings end it (playbook: F1, F2, B4)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from workup.errors import ParameterError
from workup.finding import NO_MATTER, Finding

#: A step is input-bound when its loader makes it longer by more than this share.
BOUND = 0.10
#: A wait that may lie on either side of that does not matter where it is surely less than this share of a step.
MATTERS = 0.20
#: Settings this close to the best, or within the sweep's noise, are as good.
CLOSE = 0.05
#: A stage is a cause when it takes at least this share of the step, spread over the workers.
HEAVY = 0.20
#: An unused field is a cause from this share of a batch's bytes, and this many of them.
UNUSED_SHARE, UNUSED_BYTES = 0.10, 1 << 20
SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
LONG = {"persistent": "persistent_workers", "pinned": "pin_memory"}
SECONDS = ("first_batch_seconds", "step_seconds", "stall_seconds", "epoch_step_seconds")

#: Name in ``ADVICE``, where, seconds of a step that it may save, what else the advice says.
Cause = tuple[str, str, float, str]
WAITS = "On a CPU a wait for the device costs nothing; on an accelerator each waits for all that is queued."
#: What to do about each cause; {spent} of a stage is a batch's.
ADVICE = {
    "slow_read": "reading waits for storage ({spent} a batch): put the data next to the process (local disk, memory, "
    "large shards)",
    "slow_decode": "reading works hard on the CPU ({spent} a batch): decode once, offline, and store what comes out",
    "expensive_transform": "{where} is costly ({spent} a batch): do it once, offline, and store what comes out, or do "
    "it on the device",
    "slow_collate": "collating is costly ({spent} a batch): store what needs no assembling, or take slices of tensors",
    "slow_transfer": "moving the batch is costly ({spent}): pin_memory=True, smaller dtypes, fewer fields",
    "too_few_workers": "more workers prepare batches side by side: {spent}",
    "small_prefetch": "a larger prefetch_factor rides out slow batches: {spent}",
    "epoch_stall": "every epoch begins with a wait of {spent}: persistent_workers=True keeps the workers",
    "unused_field": "drop {where} where examples are made: {spent} a batch that no operator of the step reads",
    "synchronisation": "the host waits for the device at {where}: keep such values on the device and read them now and "
    "then",
}


def input_bound(speeds: pd.DataFrame, *, batch_size: int, settle: str = "") -> Finding:
    """Whether the step waits for its data, by how much, and what it would reach if it did not.

    Args:
        speeds: one row a stretch: what (``loader``, ``step``, ``together``), round, step_seconds.
        settle: what to do where the rounds do not tell.

    Returns:
        ``input_bound``: True or False where the interval of the waiting share lies clear of ``BOUND``; else
        "does not matter" where less than ``MATTERS`` could be gained; else None. In the evidence, waiting_share is
        the share of a step that is due to its loader: the median over the rounds, each of them a pair.

    Raises:
        ParameterError: one of the three speeds is missing.
    """
    table = speeds.pivot_table(index="round", columns="what", values="step_seconds")
    if missing := {"loader", "step", "together"} - set(table):
        raise ParameterError(f"input_bound(speeds=…) has no rows for {', '.join(sorted(missing))}. Measure all three.")
    share = np.sort((1 - table.step / table.together).clip(lower=0).dropna())
    # Order statistics around the median, 98% as soon as there are so many: more rounds may follow on what they say,
    # and up to four such looks leave about 95%. Five rounds give all they can, 94%.
    drop = max(0, int((len(share) - 2.33 * len(share) ** 0.5) / 2))
    low, middle, high = (float(value) for value in (share[drop], np.median(share), share[-1 - drop]))
    loader, step, together = table.median()[["loader", "step", "together"]]
    limit = BOUND / (1 + BOUND)
    value = True if low > limit else False if high < limit else NO_MATTER if high < MATTERS else None
    now, reach = batch_size / together, batch_size / step
    took = f"a step takes {ms(together)} with its loader and {ms(step)} on a batch already on the device"
    waits = f"it waits {low:.0%} to {high:.0%} of its time"
    summary = {
        True: f"Input-bound: {took}, so {waits}; without the wait {reach:,.0f} examples/s in place of {now:,.0f}.",
        False: f"Not input-bound: {took}, so {waits}.",
        NO_MATTER: f"Whether the loader counts as slow does not matter here: all that it costs is at most {high:.0%} "
        f"of a step ({took}).",
        None: f"Cannot tell whether training waits for data: {took}, so {waits}.",
    }[value]
    return Finding(
        name="input_bound",
        value=value,
        rule="playbook: F1, B4",
        summary=summary,
        confidence="low" if value is None else "high" if len(share) >= 5 else "medium",
        evidence={
            "waiting_share": middle,
            "waiting_share_interval": (low, high),
            "loader_seconds": loader,
            "step_seconds": step,
            "together_seconds": together,
            "examples_per_second": now,
            "examples_per_second_unbound": reach,
            "rounds": len(share),
        },
        caveats=("Files that the system still holds in memory are read faster than they will be in a long run.",),
        settle="" if value is not None else settle or "The same again on a machine that does nothing else.",
    )


def by_setting(sweep: pd.DataFrame) -> pd.DataFrame:
    """Medians over the passes, a row a setting in the order given; failed ones last an infinite time.

    ``noise`` is one number for all: the root mean square of the relative standard errors over the passes (0 where
    there is one pass).
    """
    keys = [*SETTINGS, "batching"]
    types = {"prefetch_factor": "float64"} | dict.fromkeys(SECONDS, "float64")
    groups = sweep.reindex(columns=[*keys, *SECONDS]).astype(types).groupby(keys, sort=False, dropna=False)
    table, spent = groups[list(SECONDS)].median(), groups["epoch_step_seconds"]
    spread: pd.Series = spent.std() / np.sqrt(spent.count()) / spent.median()
    table["noise"], table["passes"] = float(np.sqrt((spread.dropna() ** 2).mean())), groups.size()
    return table.reset_index().fillna({"epoch_step_seconds": np.inf})


def noisy(sweep: pd.DataFrame) -> bool:
    """Whether the passes over the settings disagree too much for a choice among them to be believed."""
    return float(by_setting(sweep)["noise"].iloc[0]) > 4 * CLOSE


def loader_settings(
    bound: Finding, sweep: pd.DataFrame, *, batch_size: int, collate: bool = False, settle: str = ""
) -> Finding:
    """The loader options to train with: as fast as the best measured, the user's own if so, else the fewest workers.

    A step that does not wait, within its epochs or between them, keeps the loader it has.

    Args:
        bound: from :func:`input_bound`.
        sweep: one row a setting and pass, the first the user's own; columns as ``measure.loader.sweep`` gives them.
        collate: whether the lines to paste keep a collate_fn. settle: what would tell better, where this tells little.

    Returns:
        ``loader_settings``: a mapping of options; evidence["lines"] is what to paste.
    """
    table = by_setting(sweep)
    own, choice = table.iloc[0], table[table.batching != "examples"]
    best = choice.epoch_step_seconds.min()
    if not np.isfinite(best):
        return Finding(
            name="loader_settings",
            value=None,
            rule="playbook: F2",
            summary=f"No loader setting could be measured: {sweep.reason.iloc[0]}",
            settle="Make the data set and its collate_fn work in one process first.",
        )
    enough = bound.value is False and _stall(own) < BOUND * own.step_seconds
    good = choice[choice.epoch_step_seconds <= best * (1 + max(CLOSE, own.noise))]
    chosen = own if enough or own.name in good.index else good.sort_values(["num_workers", "prefetch_factor"]).iloc[0]
    value = {name: None if pd.isna(chosen[name]) else int(chosen[name]) for name in SETTINGS[:2]}
    value |= {name: bool(chosen[name]) for name in SETTINGS[2:]}
    why = "the step does not wait for it" if enough else f"no other beats its {ms(own.epoch_step_seconds)} a step"
    keep = f"Keep the loader as it is ({describe(own)}): {why}."
    slow = table.loc[table.batching == "examples", "epoch_step_seconds"].min()
    caveats = [f"Read by slices here; a DataLoader that collates example by example takes {ms(slow)} a step."]
    sure = "low" if own.passes == 1 or noisy(sweep) else "medium" if own.noise > CLOSE else "high"
    return Finding(
        name="loader_settings",
        value=value,
        rule="playbook: F2",
        summary=keep if chosen.name == own.name else _sentence(_instead(chosen, own)),
        confidence=bound.confidence if enough else sure,
        settle=settle if sure == "low" and not enough else "",
        evidence={
            "lines": lines(value, batch_size=batch_size, slices=chosen.batching == "slices", collate=collate),
            "gain": float(own.epoch_step_seconds / chosen.epoch_step_seconds),
            "noise": float(own.noise),
            **{name: float(chosen[name]) for name in SECONDS},
        },
        caveats=tuple(caveats if np.isfinite(slow) else []),
    )


def causes(
    bound: Finding, *, stages: pd.DataFrame, sweep: pd.DataFrame, fields: pd.DataFrame, syncs: pd.DataFrame
) -> Finding:
    """What makes training wait, by name, the costliest first, with what to do and what it would save.

    Names: those of ``ADVICE``; stages, workers and prefetch only where the step is input-bound.

    Args:
        bound: from :func:`input_bound`. The tables are those of ``measure``.

    Returns:
        ``input_causes``: a list of names, or "none"; evidence[name] has advice, where, saves_seconds (a step, at most).
    """
    table = by_setting(sweep)
    found = [*_waste(table.iloc[0], fields, syncs)]
    if bound.value is True:
        found += [*_stages(stages, bound.evidence, max(1, int(table.num_workers[0]))), *_settings(table)]
    found = sorted(found, key=lambda cause: -cause[2])
    advice = {name: ADVICE[name].format(where=where, spent=spent) for name, where, _, spent in found}
    advice |= {name: f"{advice[name]} (saves up to {ms(saves)} a step)" for name, _, saves, _ in found if saves > 0}
    conclusive = bound.is_conclusive or bool(found)
    otherwise = "nothing stands out"
    if bound.value is True:
        most = bound.evidence["waiting_share_interval"][1]
        otherwise += f": no stage takes {HEAVY:.0%} of a step and no loader tried is clearly faster; at most "
        otherwise += f"{most:.0%} of a step could be gained by preparing batches elsewhere"
    elif not conclusive:
        otherwise = "whether training waits is not clear, so neither is what for"
    return Finding(
        name="input_causes",
        value=(list(advice) or "none") if conclusive else None,
        rule="playbook: F1, F2",
        summary=_sentence("; ".join(advice.values()) or otherwise),
        confidence=bound.confidence,
        evidence={n: {"advice": advice[n], "where": where, "saves_seconds": saves} for n, where, saves, _ in found},
        caveats=(WAITS,) if "synchronisation" in advice else (),
        settle="" if conclusive else bound.settle,
    )


def _stages(stages: pd.DataFrame, speeds: Mapping[str, Any], workers: int) -> Iterator[Cause]:
    """The costliest stage of each kind, if it is long beside the step."""
    wait = speeds["together_seconds"] - speeds["step_seconds"]
    for row in stages.sort_values("batch_seconds").drop_duplicates("kind", keep="last").to_dict("records"):
        kind, spent = row["kind"], row["batch_seconds"]
        cost = spent / (1 if kind == "transfer" else workers)
        if cost >= HEAVY * speeds["together_seconds"]:
            read = "slow_read" if row["waiting"] > 0.5 else "slow_decode"
            name = {"read": read, "transform": "expensive_transform"}.get(kind, f"slow_{kind}")
            yield name, row["stage"], min(cost, wait), ms(spent)


def _settings(table: pd.DataFrame) -> Iterator[Cause]:
    """Prefetch and workers, each where more of it helps beyond the noise; workers only where prefetch does not do."""
    own = table.iloc[0]
    enough = own.epoch_step_seconds * (1 - max(BOUND, 2 * own.noise))
    quick = table[table.epoch_step_seconds < enough].sort_values("epoch_step_seconds")
    deeper = quick[(quick.num_workers == own.num_workers) & (quick.prefetch_factor > own.prefetch_factor)].head(1)
    wider = quick[quick.num_workers > own.num_workers].head(1)
    saves = own.epoch_step_seconds - quick.epoch_step_seconds
    if len(deeper) and len(wider) and saves[deeper.index[0]] > 0.8 * saves[wider.index[0]]:
        wider = wider[:0]
    for name, rows in (("small_prefetch", deeper), ("too_few_workers", wider)):
        for index, row in rows.iterrows():
            yield name, describe(row), float(saves[index]), _instead(row, own)


def _waste(own: pd.Series, fields: pd.DataFrame, syncs: pd.DataFrame) -> Iterator[Cause]:
    """What is lost whether or not the step waits for its data."""
    if own.num_workers and _stall(own) >= BOUND * own.step_seconds:
        yield "epoch_stall", describe(own), _stall(own), ms(own.stall_seconds)
    idle = fields[~fields.used.astype(bool) & (fields.share >= UNUSED_SHARE) & (fields.bytes >= UNUSED_BYTES)]
    if len(idle):
        yield "unused_field", ", ".join(idle.field), float(idle.seconds.sum()), f"{idle.bytes.sum() / 2**20:.1f} MiB"
    if len(steady := syncs[syncs.per_step >= 1]):
        yield "synchronisation", ", ".join(f"{row.file}:{row.line}" for row in steady.itertuples()), 0.0, ""


def _stall(setting: pd.Series) -> float:
    """Seconds that waits at the start of epochs add to the mean step."""
    return float(setting.epoch_step_seconds - setting.step_seconds)


def lines(settings: Mapping[str, Any], *, batch_size: int, slices: bool = False, collate: bool = False) -> str:
    """The DataLoader call to paste.

    >>> print(lines({"num_workers": 2, "prefetch_factor": 4, "pin_memory": False}, batch_size=64))
    train_loader = torch.utils.data.DataLoader(
        train_data,
        batch_size=64,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=4,
    )
    """
    batching = [f"batch_size={batch_size}", "shuffle=True", "drop_last=True"]
    if slices:  # the tensors are indexed once a batch, not once an example
        batching = ["batch_size=None", f"sampler=BatchSampler(RandomSampler(train_data), {batch_size}, drop_last=True)"]
    kept = [f"{name}={value}" for name, value in settings.items() if value or name == "num_workers"]
    arguments = ["train_data", *batching, *["collate_fn=collate_fn"][: int(collate)], *kept]
    start = "from torch.utils.data import BatchSampler, RandomSampler\n" if slices else ""
    return f"{start}train_loader = torch.utils.data.DataLoader(\n" + "".join(f"    {a},\n" for a in arguments) + ")"


def describe(setting: Mapping[str, Any] | pd.Series) -> str:
    """A setting in a few words.

    >>> describe({"num_workers": 2, "prefetch_factor": 4, "pin_memory": False, "persistent_workers": True})
    '2 workers, prefetch 4, persistent'
    """
    count = int(setting["num_workers"])
    words = [f"{count} worker{'s' * (count > 1)}, prefetch {setting['prefetch_factor']:.0f}" if count else "no workers"]
    words += ["example by example"] if setting.get("batching") == "examples" else []
    words += [word for word in ("persistent", "pinned") if setting[LONG[word]]]
    return ", ".join(words)


def _instead(row: pd.Series, own: pd.Series) -> str:
    return f"{describe(row)} takes {ms(row.epoch_step_seconds)} a step, {describe(own)} {ms(own.epoch_step_seconds)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def ms(seconds: float) -> str:
    """A duration to read: three digits, in ms or s."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
