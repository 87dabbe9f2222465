"""THE training loop. Every experiment of every notebook trains through :func:`train`."""

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from workup.errors import WorkloadError, WorkupError
from workup.measure import data, devices, faults
from workup.measure.change import changed
from workup.measure.optimizers import builder
from workup.measure.state import evaluating, preserved, seed_everything
from workup.trace import COLUMNS, Trace, Trial
from workup.workload import Workload

#: A queued device is asked whether the loss is still finite only every so many steps.
CHECK_EVERY = 25
#: A gradient scaler skips steps that overflow, so one non-finite loss is not yet the end.
SCALER_PATIENCE = 10
#: An adaptive threshold is a percentile of so many norms.
CLIP_WINDOW = 100
#: On a CPU a gradient of at most so many numbers a tensor, on average, is copied into one tensor before its norm is
#: taken: that is sooner done than a call for each.
JOINED = 2**13
#: Seconds between saves of an unfinished trace.
SAVE_EVERY = 10.0


def train(
    workload: Workload,
    trial: Trial,
    *,
    device: str = "cpu",
    save: Callable[[Trace], Any] | None = None,
    first: int | None = None,
    watch: Callable[[int, nn.Module, Any, Tensor], Any] | None = None,
    batch_cache: data.BatchCache | None = None,
) -> Trace:
    """Train one fresh model for one trial and record every step.

    Out of memory, a non-finite loss, an exception in the user's code and Ctrl-C end the trial
    and are its status; what was recorded until then is returned. Everything global (random
    states, dtype, cudnn, …) is restored, and the workload's own objects are never trained.

    Args:
        workload, trial: what to train and how.
        device: as from :func:`workup.measure.devices.resolve`.
        save: called with the unfinished trace every ``SAVE_EVERY`` seconds.
        first: stop after so many steps.
        watch: called each step with step, model, batch and losses, the gradients there and the update to come.
        batch_cache: keeps the batches of earlier trials, in place of drawing them again.

    Returns:
        The trace; a diverged one ends with the step whose loss was first non-finite.

    Raises:
        WorkloadError: the loss is no tensor, has the wrong shape or no gradient.
    """
    recorder = Recorder(workload, trial, device)
    status, reason = "finished", ""
    with preserved():
        failure: BaseException | None = None
        try:
            _loop(workload, trial, device, recorder, save, first or trial.steps, watch, batch_cache)
        except WorkupError:
            raise
        except KeyboardInterrupt:
            status, reason = "interrupted", f"interrupted at step {recorder.done}"
        except Exception as error:
            status, reason = _status(error), f"step {recorder.done}: {faults.sentence(error)}"
            failure = error
        if failure is not None:
            # The failed step's tensors live on in the traceback's frames; memory comes back only without them.
            while failure is not None:
                traceback.clear_frames(failure.__traceback__)
                failure = failure.__context__
            gc.collect()
            devices.release(device)
    return recorder.trace(status, reason)


def _loop(
    workload: Workload,
    trial: Trial,
    device: str,
    recorder: "Recorder",
    save: Any,
    first: int,
    watch: Any,
    batch_cache: Any,
) -> None:
    seed_everything(trial.seed)
    model = changed(workload.build_model(), trial.change).to(device).train()
    optimizer = (builder(trial.optimizer) if trial.optimizer else workload.optimizer)(model.parameters(), trial.lr)
    forward: Any = torch.compile(model) if workload.compile else model
    params = [p for group in optimizer.param_groups for p in group["params"]]
    joined = all(p.device.type == "cpu" for p in params) and sum(p.numel() for p in params) <= JOINED * len(params)
    shares = [group["lr"] / trial.lr for group in optimizer.param_groups]
    rates = recorder.rates.tolist()
    scaler = torch.amp.GradScaler(torch.device(device).type) if workload.precision == "fp16" else None
    autocast = autocasting(workload.precision, device)
    if batch_cache is not None:
        batches = batch_cache.batches(trial.batch_size, seed=trial.seed)
    else:
        batches = data.batches(workload, trial.batch_size, seed=trial.seed, device=device)
    evaluation = evaluation_sample(workload, trial, device)

    for step in range(min(first, trial.steps)):
        recorder.begin()
        batch = next(batches)
        recorder.fetched(data.batch_length(batch))
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rates[step] * share
        with autocast:
            losses = workload.loss(forward, batch)
            if step == 0:
                check_loss(workload, losses, data.batch_length(batch))
            loss = mean(losses)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if watch is not None:
            watch(step, model, batch, losses.detach())
        norm = grad_norm(params, joined=joined)
        if trial.clip_norm and step >= trial.clip_from:
            torch.nn.utils.clip_grads_with_norm_(params, trial.clip_norm, norm)
        elif trial.clip_percentile and step >= trial.clip_from:
            # In units of the threshold: the threshold itself would have to come to the host.
            torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm / recorder.limit(trial.clip_percentile))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.end(loss, norm)
        if trial.eval_every and (step + 1) % trial.eval_every == 0:
            recorder.evaluated(evaluate(workload, forward, evaluation, device))
        if recorder.has_diverged(SCALER_PATIENCE if scaler else 1):
            return
        if save is not None and recorder.save_due():
            save(recorder.trace("interrupted", f"saved at step {recorder.done}"))


def check_loss(workload: Workload, losses: Any, examples: int) -> None:
    """Stop at once for a loss that cannot be trained on.

    Raises:
        WorkloadError: not a tensor, neither a scalar nor of shape [batch], or without a gradient.
    """
    where = f"workload {workload.name!r}: loss(model, batch)"
    if not isinstance(losses, Tensor):
        raise WorkloadError(
            f"{where} returned {type(losses).__name__}, not a tensor. Return per-example losses [batch]."
        )
    if losses.dim() and tuple(losses.shape) != (examples,):
        shape = list(losses.shape)
        raise WorkloadError(
            f"{where} has shape {shape}; per-example losses of shape [{examples}], or a scalar mean, are needed. "
            "Average over the other dimensions, or use reduction='none'."
        )
    if losses.is_complex():
        raise WorkloadError(f"{where} is complex ({losses.dtype}). Return its real part or its modulus.")
    if not losses.requires_grad:
        raise WorkloadError(f"{where} has no gradient: is it detached, or computed under no_grad?")


def mean(values: Tensor) -> Tensor:
    """Their mean, in float32 where they are less precise."""
    return values.mean() if values.dtype in (torch.float32, torch.float64) else values.float().mean()


def autocasting(precision: str, device: str) -> contextlib.AbstractContextManager:
    """The autocast region of a precision; fp32 has none, and switches the caller's off."""
    kind = torch.device(device).type
    if precision == "fp32":
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
    return torch.autocast(kind, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


def grad_norm(params: list[nn.Parameter], *, joined: bool = False) -> Tensor:
    """L2 norm of the whole gradient, on its device, of one copy of it where ``joined``; nothing is changed (C4, E1)."""
    grads = [g.coalesce().values() if g.is_sparse else g for p in params if (g := p.grad) is not None]
    if joined and grads:
        grads = [torch.cat([grad.flatten() for grad in grads])]
    elif len({grad.device for grad in grads}) != 1:
        return torch.nn.utils.get_total_norm(grads)
    # A half-precision norm would overflow.
    dtype = torch.float32 if grads[0].dtype in (torch.float16, torch.bfloat16) else None
    if len(grads) == 1:
        return torch.linalg.vector_norm(grads[0], dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype)))


def evaluation_sample(workload: Workload, trial: Trial, device: str) -> list[Any] | None:
    """The fixed sample, kept on the device when it is a sample; None to read all the data each time."""
    if not trial.eval_every or trial.eval_examples is None:
        return None
    size = max(trial.batch_size, 64)
    return list(data.evaluation_batches(workload, batch_size=size, examples=trial.eval_examples, device=device))


def evaluate(workload: Workload, model: nn.Module, batches: list[Any] | None, device: str) -> dict[str, Tensor]:
    """Mean loss and metrics over the evaluation data, each example weighing the same (playbook: F3).

    Returns:
        ``{"loss": scalar, <metric>: scalar}`` on the device.
    """
    if batches is None:
        batches = data.evaluation_batches(workload, batch_size=max(workload.batch_size, 256), device=device)  # type: ignore[assignment]
    totals: dict[str, Tensor] = {}
    count = 0
    with evaluating(model, device), autocasting(workload.precision, device):
        for batch in batches:  # type: ignore[union-attr]
            examples = data.batch_length(batch)
            for name, measure in [("loss", workload.loss), *workload.metrics.items()]:
                value = mean(measure(model, batch)) * examples
                totals[name] = totals[name] + value if name in totals else value
            count += examples
    return {name: total / count for name, total in totals.items()}


def _status(error: Exception) -> str:
    return "out_of_memory" if faults.classify(error) == "memory" else "failed"


class Recorder:
    """Columns of a trace, filled without waiting for the device.

    Loss, norm and evaluations go into rows preallocated where the device is; times are host
    clocks, and events of an accelerator, read when the trial is over.
    """

    def __init__(self, workload: Workload, trial: Trial, device: str) -> None:
        self.trial, self.device, self.done = trial, device, 0
        self.rates = trial.learning_rates(workload.schedule)
        self.queued = devices.queues(device)
        self.names = ["loss", "grad_norm", *(["clip_limit"] if trial.clip_percentile else [])]
        if trial.eval_every:
            self.names += ["eval_loss", *(f"eval_{name}" for name in workload.metrics)]
        self.rows: dict[str, Any] = {}
        self.times = np.zeros((2, trial.steps))
        self.examples = np.zeros(trial.steps, dtype=np.int64)
        self.events: list[tuple[Any, Any]] = []
        self.saved = time.monotonic()
        self.checked = 0
        self.bad = 0
        self.end_at: int | None = None
        devices.reset_usage(device)

    def begin(self) -> None:
        if not self.rows:  # not earlier: memory may run out here too, and ends the trial alone
            shape, device = (len(self.names), self.trial.steps), self.device
            rows = torch.full(shape, torch.nan, device=device).unbind() if self.queued else np.full(shape, np.nan)
            self.rows = dict(zip(self.names, rows, strict=True))
        self.clock = time.perf_counter()
        if self.queued:
            self.event = devices.timestamp(self.device)

    def fetched(self, examples: int) -> None:
        self.examples[self.done] = examples
        self.times[1, self.done] = time.perf_counter() - self.clock

    def limit(self, percentile: float) -> Tensor:
        """The percentile of the finite norms before this step, as a scalar on the device; inf where there is none."""
        before = torch.as_tensor(self.rows["grad_norm"][max(0, self.done - CLIP_WINDOW) : self.done])
        norms = torch.cat([before.float(), before.new_full((1,), torch.nan, dtype=torch.float32)])
        limit = norms.where(norms.isfinite(), torch.nan).nanquantile(percentile / 100).nan_to_num(nan=torch.inf)
        self.rows["clip_limit"][self.done] = limit
        return limit

    def end(self, loss: Tensor, norm: Tensor) -> None:
        step = self.done
        self._put("loss", step, loss)
        self._put("grad_norm", step, norm)
        if self.queued:
            self.events.append((self.event, devices.timestamp(self.device)))
        self.times[0, step] = time.perf_counter() - self.clock
        self.done += 1

    def evaluated(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._put(f"eval_{name}", self.done - 1, value)

    def _put(self, name: str, step: int, value: Tensor) -> None:
        # A number is at hand on a CPU; elsewhere asking for it would wait for the device.
        self.rows[name][step] = value.detach() if self.queued else value.item()

    def has_diverged(self, patience: int) -> bool:
        """Whether the last ``patience`` losses were non-finite; asked of a queued device only now and then."""
        last = self.done == self.trial.steps
        if self.queued and self.done % CHECK_EVERY and not last:
            return False
        for step, loss in enumerate(self.rows["loss"][self.checked : self.done].tolist(), self.checked):
            self.bad = 0 if math.isfinite(loss) else self.bad + 1
            if self.bad >= patience:
                self.end_at = step
                return True
        self.checked = self.done
        return False

    def save_due(self) -> bool:
        now = time.monotonic()
        if now - self.saved < SAVE_EVERY:
            return False
        self.saved = now
        return True

    def trace(self, status: str, reason: str) -> Trace:
        """What has been recorded so far; waits for the device."""
        steps = self.done if self.end_at is None else self.end_at + 1
        if self.end_at is not None:
            status, reason = "diverged", f"step {self.end_at}: the loss is no longer finite"
        columns = {
            name: row[:steps].cpu().double().numpy() if self.queued else row[:steps].copy()
            for name, row in self.rows.items()
        } or {name: np.full(0, np.nan) for name in self.names}
        if self.queued:
            devices.synchronize(self.device)
            self.times[0, : len(self.events)] = [a.elapsed_time(b) / 1000 for a, b in self.events]
        limit = columns.get("clip_limit", self.trial.clip_norm or np.inf)
        clipped = (columns["grad_norm"] > limit) & (np.arange(steps) >= self.trial.clip_from)
        columns |= {
            "step": np.arange(steps),
            "lr": self.rates[:steps],
            "clipped": clipped,
            "seconds": self.times[0, :steps],
            "data_seconds": self.times[1, :steps],
            "examples": self.examples[:steps],
        }
        columns.setdefault("eval_loss", np.full(steps, np.nan))
        extra = [name for name in columns if name not in COLUMNS]
        table = pd.DataFrame({name: columns[name] for name in [*COLUMNS, *extra]})
        return Trace(
            trial=self.trial,
            steps=table,
            status=status,
            reason=reason,
            peak_bytes=devices.usage(self.device).allocated_bytes if devices.numbered(self.device) else None,
            device=self.device,
            versions=devices.versions(),
        )
