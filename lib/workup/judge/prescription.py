"""All findings together: the settings to train with, and what in them does not fit together.

Each notebook judges one question, at the settings that were prescribed when it ran. Here they are read as one story:
a finding that was measured at other settings than the prescribed ones, or that another finding contradicts, changes
what is prescribed, and the reader is told. Every way that happens is one entry of :data:`CONTRADICTIONS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workup.finding import Conflict, Finding, Prescription, Setting

#: A finding holds for rates up to this many times above or below the one it was measured at.
SAME_RATE = 1.5
#: Remedies that no line of the prescription can carry: the user's code changes.
CODE = ("adam", "pre-norm", "zero-init", "architecture")

Settings = dict[str, Setting]
Found = Mapping[str, Finding]


class Contradiction(NamedTuple):
    """A way in which findings contradict each other.

    ``check`` takes the findings and the settings so far. It returns None where all is well, else the settings to
    replace, the sentence for the reader, and the notebooks that would resolve it ("" where nothing is left open).
    """

    rule: str
    when: str
    does: str
    check: Callable[[Found, Settings], tuple[dict[str, Setting], str, str] | None]


def prescribe(findings: Found, *, workload: Any) -> Prescription:
    """The settings that ``findings`` recommend for ``workload``; what none speaks of stays as the user has it.

    Args:
        findings: by name, each with the notebook it comes from.
        workload: gives today's ``batch_size, lr, max_train_steps, schedule`` and ``precision``.

    Returns:
        Prescription whose ``conflicts`` say what did not fit, by :data:`CONTRADICTIONS`.

    Example:
        >>> from types import SimpleNamespace
        >>> own = SimpleNamespace(batch_size=64, lr=0.1, max_train_steps=900, schedule=None, precision="fp32")
        >>> best = Finding(name="peak_lr", value=0.03, rule="playbook: C1", summary="0.03 trains best.")
        >>> prescribe({"peak_lr": best}, workload=own).peak_lr
        0.03
    """
    settings: Settings = {
        "batch_size": Setting(name="batch_size", value=workload.batch_size, today=workload.batch_size),
        "peak_lr": Setting(name="peak_lr", value=workload.lr, today=workload.lr),
        "warmup_steps": Setting(name="warmup_steps", value=0, today=0),
        "clip_norm": Setting(name="clip_norm", value=None, today=None),
    }
    for name, finding in (("batch_size", "recommended_batch_size"), ("peak_lr", "peak_lr"), ("warmup_steps",) * 2):
        if found := _conclusive(findings, finding):
            settings[name] = _set(settings[name], found, int(found.value) if name != "peak_lr" else float(found.value))
    if found := _conclusive(findings, "clip_norm"):
        settings["clip_norm"] = _set(settings["clip_norm"], found, None if found.value == "none" else found.value)
    conflicts = []
    for name, contradiction in CONTRADICTIONS.items():
        if met := contradiction.check(findings, settings):
            changes, text, run = met
            settings |= changes
            conflicts.append(Conflict(name=name, text=f"{text} ({contradiction.rule})", run=run))
    steps = workload.max_train_steps + settings["warmup_steps"].value
    if steps != workload.max_train_steps:
        why = "the warmup is put before the schedule you have (playbook: D5)"
        ramp = dataclasses.replace(settings["warmup_steps"], name="max_train_steps", interval=None, why=why)
        settings["max_train_steps"] = dataclasses.replace(ramp, value=steps, today=workload.max_train_steps)
    values = {name: settings[name].value for name in ("batch_size", "peak_lr", "warmup_steps", "clip_norm")}
    return Prescription(
        **values,
        max_train_steps=steps,
        schedule=workload.schedule is not None,
        precision=workload.precision,
        settings=tuple(settings.values()),
        conflicts=tuple(conflicts),
    )


def _conclusive(findings: Found, name: str) -> Finding | None:
    found = findings.get(name)
    return found if found is not None and found.is_conclusive else None


def _set(setting: Setting, found: Finding, value: Any) -> Setting:
    return dataclasses.replace(
        setting,
        value=value,
        interval=found.interval if found.value == value else None,
        confidence=found.confidence,
        why=found.because or found.summary,
        source=found.experiment or found.name,
    )


def _kept(setting: Setting, why: str) -> Setting:
    """The setting as the user has it."""
    return Setting(name=setting.name, value=setting.today, today=setting.today, why=why)


def _other_rate(found: Finding, settings: Settings) -> bool:
    at, lr = found.at.get("lr"), settings["peak_lr"].value
    return at is not None and not lr / SAME_RATE <= at <= lr * SAME_RATE


# -- the contradictions, in the order in which they are looked for ------------------------------


def _own_rate_fails(findings: Found, settings: Settings) -> Any:
    peak, best, broken = findings.get("peak_lr"), _conclusive(findings, "best_lr"), _conclusive(findings, "unstable_lr")
    own = settings["peak_lr"].today
    if (peak is not None and peak.is_conclusive) or not best or not broken or own < broken.value or best.value >= own:
        return None
    why = f"your {own:.3g} does not train; {best.value:.3g} leads after {best.evidence.get('horizon_steps', 'a few')}"
    changed = _set(settings["peak_lr"], best, float(best.value))
    changed = dataclasses.replace(changed, confidence="low", why=f"{why} steps")
    text = f"Which rate trains best over the whole run cannot be told, and your own, {own:.3g}, does not train: "
    return {"peak_lr": changed}, text + f"{best.value:.3g}, the best of the short sweep, is taken.", ""


def _unstable_as_prescribed(findings: Found, settings: Settings) -> Any:
    test, broken = _conclusive(findings, "stability"), _conclusive(findings, "unstable_lr")
    if not test or not broken or _other_rate(test, settings) or broken.value > settings["peak_lr"].value:
        return None
    calm = broken.evidence.get("stable_up_to")
    lr = settings["peak_lr"].value
    if calm is None:
        low = dataclasses.replace(settings["peak_lr"], confidence="low", interval=None)
        return {"peak_lr": low}, f"At the prescribed {lr:.3g} training is unstable, and no lower rate was calm.", "05"
    lowered = dataclasses.replace(_set(settings["peak_lr"], broken, float(calm)), confidence="low")
    lowered = dataclasses.replace(lowered, why=f"{lr:.3g} proved unstable; this is the highest rate that was calm")
    text = f"{lr:.3g} was expected to train best, but proved unstable at every step's look: {calm:.3g} is prescribed."
    return {"peak_lr": lowered}, text, ""


def _warmup_at_another_rate(findings: Found, settings: Settings) -> Any:
    found = _conclusive(findings, "warmup_steps")
    if not found or not _other_rate(found, settings):
        return None
    text = f"Warmup was judged around lr {found.at['lr']:.3g}, and {settings['peak_lr'].value:.3g} is prescribed: none "
    kept = _kept(settings["warmup_steps"], "was judged around another rate")
    return {"warmup_steps": kept}, text + "is prescribed until it is judged there.", "06"


def _warmup_raises(findings: Found, settings: Settings) -> Any:
    found = _conclusive(findings, "warmup_steps")
    peak = found.evidence.get("peak_lr") if found else None
    if not found or not settings["warmup_steps"].value:
        return None
    if not peak:
        text = f"{found.value} steps of warmup were found, but no rate that they make worth having: none is prescribed."
        return {"warmup_steps": _kept(settings["warmup_steps"], "opens no rate worth having")}, text, "06"
    raised = dataclasses.replace(
        settings["peak_lr"],
        value=float(peak),
        interval=tuple(found.evidence["peak_interval"]) if found.evidence.get("peak_interval") else None,
        confidence=found.evidence.get("peak_confidence", found.confidence),
        why=f"{found.value} steps of warmup open it",
        source=found.experiment or found.name,
    )
    text = f"Without warmup {settings['peak_lr'].value:.3g} would train best; {found.value} steps of it open "
    return {"peak_lr": raised}, f"{text}{peak:.3g}, which trains lower: the two are prescribed together.", ""


def _clip_at_other_settings(findings: Found, settings: Settings) -> Any:
    found = _conclusive(findings, "clip_norm")
    ramp = settings["warmup_steps"].value
    if not found or not (_other_rate(found, settings) or found.at.get("warmup_steps", ramp) != ramp):
        return None
    at = f"lr {found.at['lr']:.3g} with {found.at.get('warmup_steps', 0)} steps of warmup"
    text = f"Clipping was judged at {at}, and {settings['peak_lr'].value:.3g} with {ramp} is prescribed: none is "
    kept = _kept(settings["clip_norm"], "was judged at other settings")
    return {"clip_norm": kept}, text + "prescribed until it is judged there.", "07"


def _clips_most_steps(findings: Found, settings: Settings) -> Any:
    share = _conclusive(findings, "clipped_fraction")
    if settings["clip_norm"].value is None or not share or not share.value > 0.5:
        return None
    text = f"The threshold would clip {share.value:.0%} of the updates, a lower learning rate by another name: "
    kept = _kept(settings["clip_norm"], "would clip most updates: lower the rate instead")
    return {"clip_norm": kept}, text + "none is prescribed.", ""


def _clip_raises(findings: Found, settings: Settings) -> Any:
    found = _conclusive(findings, "clip_norm")
    peak = found.evidence.get("peak_lr") if found else None
    if not found or not peak or settings["clip_norm"].value is None:
        return None
    raised = dataclasses.replace(
        settings["peak_lr"],
        value=float(peak),
        interval=tuple(found.evidence["peak_interval"]) if found.evidence.get("peak_interval") else None,
        confidence=found.evidence.get("peak_confidence", found.confidence),
        why=f"clipping at {settings['clip_norm'].value:.3g} opens it",
        source=found.experiment or found.name,
    )
    text = f"Without clipping {settings['peak_lr'].value:.3g} would train best; clipping opens {peak:.3g}, which "
    return {"peak_lr": raised}, text + "trains lower: the two are prescribed together.", ""


def _no_room_above(findings: Found, settings: Settings) -> Any:
    broken, lr = _conclusive(findings, "unstable_lr"), settings["peak_lr"].value
    helped = settings["warmup_steps"].value or settings["clip_norm"].value is not None
    if not broken or helped or not lr < broken.value <= 2 * lr or settings["peak_lr"].confidence in ("", "low"):
        return None
    text = f"The prescribed {lr:.3g} trains, but {broken.value:.3g} does not: another seed or a longer run may break."
    near = dataclasses.replace(settings["peak_lr"], confidence="low" if broken.value < 1.5 * lr else "medium")
    return {"peak_lr": near}, text, ""


def _batch_size_of_another_rate(findings: Found, settings: Settings) -> Any:
    peak = _conclusive(findings, "peak_lr")
    at, size = (peak.at.get("batch_size") if peak else None), settings["batch_size"].value
    if at is None or at == size:
        return None
    text = f"Batches of {size} are recommended, but the learning rate was found with {at}, and another size wants "
    kept = dataclasses.replace(
        settings["batch_size"], value=at, interval=None, why=f"the learning rate was found at it; {size} is recommended"
    )
    return {"batch_size": kept}, f"{text}another rate: {at} is prescribed until the rate is found with {size}.", "04-07"


def _batch_does_not_fit(findings: Found, settings: Settings) -> Any:
    most, size = _conclusive(findings, "max_feasible_batch_size"), settings["batch_size"].value
    if not most or size <= most.evidence.get("largest_tried", most.value):
        return None
    capped = dataclasses.replace(settings["batch_size"], value=int(most.value), why="larger ones do not fit in memory")
    return {"batch_size": capped}, f"Batches of {size} do not fit here: {int(most.value)} is prescribed.", "04-07"


def _input_limits_throughput(findings: Found, settings: Settings) -> Any:
    bound, size = _conclusive(findings, "input_bound"), settings["batch_size"]
    if not bound or bound.value is not True or bound.confidence == "low" or size.value == size.today or not size.source:
        return None
    text = f"Batches of {size.value} were chosen by throughput, but training waits for its input: mend that first."
    return {"batch_size": dataclasses.replace(size, confidence="low")}, text, "03"


def _fix_changes_code(findings: Found, settings: Settings) -> Any:
    fix = _conclusive(findings, "recommended_fix")
    if not fix or fix.value not in CODE:
        return None
    text = f"05 recommends {fix.value}, which changes your code: no line here carries it. After it, measure again."
    return {}, text, "04-07"


def _fix_not_confirmed(findings: Found, settings: Settings) -> Any:
    fix = _conclusive(findings, "recommended_fix")
    if not fix or fix.value not in ("warmup", "clipping", "warmup+clipping"):
        return None
    wanted = {"warmup": ("warmup_steps", "06"), "clipping": ("clip_norm", "07")}
    lacking = [wanted[part] for part in fix.value.split("+") if not settings[wanted[part][0]].value]
    if not lacking:
        return None
    unjudged = [run for name, run in lacking if not _conclusive(findings, name)]
    text = f"One trial of {fix.value.replace('+', ' with ')} helped at a rate above the prescribed one; "
    if unjudged:
        return {}, text + "whether it is worth having at the prescribed one is still to be judged.", ",".join(unjudged)
    judged = " and ".join(name.replace("_", " ") for name, _ in lacking)
    return {}, f"{text}judged over more settings, {judged} brings nothing there: none is prescribed.", ""


def _compared_other_settings(findings: Found, settings: Settings) -> Any:
    gain = findings.get("improvement")
    if gain is None or not gain.at or _same(gain, settings):
        return None
    return {}, "The comparison over seeds was of other settings than the ones prescribed now.", "11"


def _brings_nothing(findings: Found, settings: Settings) -> Any:
    gain = _conclusive(findings, "improvement")
    facts = gain.evidence if gain else {}
    changed = [setting for setting in settings.values() if setting.value != setting.today]
    if not gain or facts.get("matters") is not False or facts.get("faster") or not changed or not _same(gain, settings):
        return None
    kept = {s.name: _kept(s, f"{spelled(s.value)} was found, and brings nothing that matters") for s in changed}
    names = " and ".join(f"{s.name} {spelled(s.value)}" for s in changed)
    text = f"{names} would train as well, and no faster: today's settings are kept."
    return kept, text, ""


def spelled(value: Any) -> str:
    """A setting's value in a sentence."""
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _worse_than_today(findings: Found, settings: Settings) -> Any:
    gain = _conclusive(findings, "improvement")
    if not gain or not isinstance(gain.value, float) or gain.value >= 0 or (gain.at and not _same(gain, settings)):
        return None
    if gain.evidence.get("matters") is False:
        return None
    kept = {name: _kept(setting, "the comparison over seeds was for it") for name, setting in settings.items()}
    return kept, "Compared over seeds, the settings found train WORSE than today's: today's are kept.", ""


def _same(gain: Finding, settings: Settings) -> bool:
    now = {("lr" if name == "peak_lr" else name): setting.value for name, setting in settings.items()}
    return all(now.get(name) == value for name, value in gain.at.items())


CONTRADICTIONS: dict[str, Contradiction] = {
    "own rate fails": Contradiction(
        "playbook: C1",
        "no rate can be told for the whole run, and today's does not train",
        "prescribes the best of the short sweep, low confidence",
        _own_rate_fails,
    ),
    "unstable as prescribed": Contradiction(
        "playbook: C5, C8",
        "the rate that 04 gives proves unstable in 05",
        "prescribes the highest rate seen calm, low confidence",
        _unstable_as_prescribed,
    ),
    "warmup at another rate": Contradiction(
        "playbook: D1",
        "warmup was judged around another rate",
        "prescribes none until 06 has run",
        _warmup_at_another_rate,
    ),
    "warmup raises the rate": Contradiction(
        "playbook: D5",
        "04's rate is best without warmup, 06's higher one with it",
        "prescribes the warmup and its rate together, or neither",
        _warmup_raises,
    ),
    "clipping at other settings": Contradiction(
        "playbook: E3",
        "clipping was judged at another rate or warmup",
        "prescribes none until 07 has run",
        _clip_at_other_settings,
    ),
    "clips most steps": Contradiction(
        "playbook: E5", "the threshold would clip over half of the updates", "prescribes none", _clips_most_steps
    ),
    "clipping raises the rate": Contradiction(
        "playbook: E3",
        "04's rate is best without clipping, 07's higher one with it",
        "prescribes threshold and rate together",
        _clip_raises,
    ),
    "no room above": Contradiction(
        "playbook: C6", "twice the prescribed rate breaks", "says so, and is less sure of the rate", _no_room_above
    ),
    "rate of another batch size": Contradiction(
        "playbook: B11",
        "the rate was found at another batch size than is recommended",
        "keeps the size that the rate was found at",
        _batch_size_of_another_rate,
    ),
    "batch does not fit": Contradiction(
        "playbook: B2", "the batch size is larger than fits", "prescribes the largest that fits", _batch_does_not_fit
    ),
    "input limits throughput": Contradiction(
        "playbook: B4",
        "the size was chosen by throughput, and the input limits it",
        "low confidence",
        _input_limits_throughput,
    ),
    "fix changes code": Contradiction(
        "playbook: C8", "the remedy is another optimizer or model", "says so; no line carries it", _fix_changes_code
    ),
    "fix not confirmed": Contradiction(
        "playbook: C8",
        "05's single trial of a remedy helped, 06 or 07 see nothing in it at the prescribed rate",
        "prescribes none: 06 and 07 tried more",
        _fix_not_confirmed,
    ),
    "compared other settings": Contradiction(
        "playbook: D5", "11 compared other settings than are prescribed now", "says so", _compared_other_settings
    ),
    "brings nothing": Contradiction(
        "playbook: D5",
        "over seeds the settings found train no lower and no faster",
        "keeps today's settings",
        _brings_nothing,
    ),
    "worse than today": Contradiction(
        "playbook: D5, F4", "over seeds the settings found train worse", "keeps today's settings", _worse_than_today
    ),
}
