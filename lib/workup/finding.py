"""A Finding is one answer with its evidence; a Prescription is a study's answers as settings."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONFIDENCE = ("high", "medium", "low")
#: The answer where whatever is true changes no choice; the summary says why.
NO_MATTER = "does not matter"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer.

    Args:
        name: what was asked, one of the names shared across notebooks (``best_lr``, …).
        value: the answer; None where it cannot be told.
        unit: of ``value`` and ``interval``; "" for a plain number or a word.
        rule: the playbook rule or paper it follows, for example ``playbook: C1, C6``.
        summary: one plain sentence.
        interval: (low, high) around ``value``, or None.
        confidence: high, medium or low.
        evidence: the numbers it rests on.
        caveats: what would make it wrong.
        settle: for an answer that cannot be told, what would settle it.
        because: the reason in one clause, for a line of the prescription.
        at: the settings it was measured at, those of ``lr, batch_size, warmup_steps, clip_norm`` that it depends on.
        experiment: the notebook that found it; filled in by the study.

    Example:
        >>> Finding(name="best_lr", value=0.03, rule="playbook: C1", summary="0.03 trains best.").is_conclusive
        True
    """

    name: str
    value: Any
    rule: str
    summary: str
    unit: str = ""
    interval: tuple[float, float] | None = None
    confidence: str = "medium"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    settle: str = ""
    because: str = ""
    at: Mapping[str, Any] = field(default_factory=dict)
    experiment: str = ""

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCE:
            raise ValueError(f"Finding(confidence={self.confidence!r}): one of {', '.join(CONFIDENCE)}.")
        if not self.is_conclusive and not self.settle:
            raise ValueError(f"Finding(name={self.name!r}) cannot tell, so it must say what would settle it: settle=….")

    @property
    def is_conclusive(self) -> bool:
        """Whether there is an answer."""
        return self.value is not None and self.value != "cannot_tell"

    @property
    def is_none(self) -> bool:
        """Whether what was looked for is surely not there, as a rate at which training breaks."""
        return self.value is None and self.confidence == "high"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a non-finite number becomes the string "nan", "inf" or "-inf"."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Finding":
        """The inverse of :meth:`to_dict` (non-finite numbers stay strings)."""
        values = dict(values)
        if values.get("interval") is not None:
            values["interval"] = tuple(values["interval"])
        values["caveats"] = tuple(values.get("caveats", ()))
        return cls(**values)


def plain(value: Any) -> Any:
    """``value`` as what JSON can hold: numpy scalars and arrays unwrapped, non-finite floats named.

    >>> plain({"a": (1, float("inf"))})
    {'a': [1, 'inf']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of a prescription.

    Args:
        name: as ``peak_lr``.
        value, today: what to train with, and what the user trains with.
        interval, confidence: of ``value``; None and "" where it stays as it is.
        why: one clause.
        source: the notebook it comes from, "" where it stays as it is.
    """

    name: str
    value: Any
    today: Any
    interval: tuple[float, float] | None = None
    confidence: str = ""
    why: str = "as you have it"
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Findings that contradict each other, and what the prescription does about it.

    Args:
        name: which of ``workup.judge.prescription.CONTRADICTIONS``.
        text: what contradicts what and what follows, in plain words.
        run: notebooks whose run would resolve it, as ``07``; "" where the prescription already does.
    """

    name: str
    text: str
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class Prescription:
    """A study's findings as the settings to train with, and as lines to paste.

    Args:
        batch_size, peak_lr, warmup_steps, clip_norm: the settings (playbook: B, C, D, E).
        max_train_steps: steps in all, the warmup already added (playbook: D5).
        schedule: whether the user's own schedule follows the warmup.
        precision: fp32, bf16 or fp16.
        settings: each with its interval, how sure, and why.
        conflicts: what in the findings does not fit together.
    """

    batch_size: int
    peak_lr: float
    warmup_steps: int
    max_train_steps: int
    clip_norm: float | None
    schedule: bool
    precision: str = "fp32"
    settings: tuple[Setting, ...] = ()
    conflicts: tuple[Conflict, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(dataclasses.asdict(self)))

    @property
    def tried(self) -> dict[str, Any]:
        """The settings that make a run what it is, named as in :attr:`Finding.at`."""
        at = {"lr": self.peak_lr, "batch_size": self.batch_size, "warmup_steps": self.warmup_steps}
        return at | {"clip_norm": self.clip_norm}

    def as_torch(self) -> str:
        """Lines for a plain PyTorch loop."""
        after = "schedule((step - warmup_steps) / (max_train_steps - warmup_steps))" if self.schedule else "1.0"
        ramp = "(step + 1) / warmup_steps if step < warmup_steps else " if self.warmup_steps else ""
        lines = [
            f"batch_size = {self.batch_size}",
            f"peak_lr = {self.peak_lr:.4g}",
            f"warmup_steps = {self.warmup_steps}",
            f"max_train_steps = {self.max_train_steps}",
            "optimizer = make_optimizer(model.parameters(), lr=peak_lr)  # yours",
        ]
        if self.scheduled:
            lines.append(f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {ramp}{after})")
        lines += ["# in the loop, each step:", "loss.backward()"]
        if self.clip_norm is not None:
            lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm={self.clip_norm:.4g})")
        lines += ["optimizer.step()", *(["scheduler.step()"] if self.scheduled else []), "optimizer.zero_grad()"]
        return "\n".join(lines)

    @property
    def scheduled(self) -> bool:
        """Whether the rate changes from step to step."""
        return self.schedule or self.warmup_steps > 0

    def as_lightning(self) -> str:
        """Arguments of Lightning's Trainer, and the lines of ``configure_optimizers``."""
        precision = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[self.precision]
        clip = f"\n    gradient_clip_val={self.clip_norm:.4g}," if self.clip_norm is not None else ""
        span = self.max_train_steps - self.warmup_steps
        after = f"schedule((step - {self.warmup_steps}) / {span})" if self.schedule else "1.0"
        ramp = f"(step + 1) / {self.warmup_steps} if step < {self.warmup_steps} else " if self.warmup_steps else ""
        scheduler = (
            f"scheduler = torch.optim.lr_scheduler.LambdaLR(\n    optimizer, lambda step: {ramp}{after}\n)\n"
            'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}'
        )
        return (
            f"trainer = lightning.Trainer(\n    max_steps={self.max_train_steps},{clip}\n"
            f'    precision="{precision}",\n)\n'
            f"# DataLoader(..., batch_size={self.batch_size}); in configure_optimizers:\n"
            f"optimizer = make_optimizer(self.parameters(), lr={self.peak_lr:.4g})  # yours\n"
            + (scheduler if self.scheduled else "return optimizer")
        )

    def as_transformers(self) -> str:
        """Arguments of transformers' TrainingArguments (max_grad_norm=0 turns its clipping off)."""
        kind = "constant_with_warmup" if self.warmup_steps else "constant"
        note = "  # your own schedule follows the warmup: pass it by `optimizers=`" if self.schedule else ""
        flags = "".join(f"\n    {self.precision}=True," for _ in [0] if self.precision != "fp32")
        clip = f"{self.clip_norm:.4g}" if self.clip_norm is not None else "0.0"
        return (
            "args = TrainingArguments(\n"
            f"    per_device_train_batch_size={self.batch_size},\n"
            f"    learning_rate={self.peak_lr:.4g},\n"
            f'    lr_scheduler_type="{kind}",{note}\n'
            f"    warmup_steps={self.warmup_steps},\n"
            f"    max_steps={self.max_train_steps},\n"
            f"    max_grad_norm={clip},{flags}\n"
            ")"
        )
