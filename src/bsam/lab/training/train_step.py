"""One training step, with any method or with the base optimizer alone, and that of a run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.checks import check_count
from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.method_info import Need
from ...core.optimizer import SharpnessAware
from ...methods.distillation import Distillation
from ..config import BASE, Run, method_class
from ..tasks.task import Task, TaskBatch
from .base_optimizer import build_base
from .environment import emulated_bf16, is_bf16_emulated

Criterion: TypeAlias = Callable[[Any, TaskBatch], Tensor]


def cross_entropy(logits: Tensor, batch: TaskBatch) -> Tensor:
    """Return the loss of each sample; the classes are the batch's second tensor."""
    return F.cross_entropy(logits, batch[1], reduction="none")


@dataclass(frozen=True)
class TrainStep:
    """A network with its optimizer and loss.

    Args:
        model: the network, or a function that calls it.
        optimizer: a sharpness-aware or any other optimizer.
        criterion: maps outputs and a batch to one loss per sample.
        loss: SAF or MESA, used instead of the criterion.
        accumulate: the number of micro-batches that a batch is split into.
        clip_norm: the largest norm of the direction; None does not clip it.
        scaler: scales the loss, for float16.
        no_sync: returns the context of micro-batches whose gradients are not averaged over processes yet; a
            sharpness-aware optimizer does not need it.
    """

    model: Callable[[Tensor], Any]
    optimizer: Optimizer
    criterion: Criterion = cross_entropy
    loss: Distillation | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        if self.loss is not None:
            self.loss.set_epoch(epoch)

    def kind(self) -> Hashable:
        """Return the kind of the next step. Steps of one kind launch the same kernels and can share a CUDA graph."""
        if self.loss is not None:
            return self.loss.step_kind()
        method = self.optimizer
        return (method.steps_since_start < 0, method.step_kind()) if isinstance(method, SharpnessAware) else None

    def losses(self, *batch: Tensor) -> Tensor:
        """Return the loss of each sample in a batch: inputs, targets, indices in the training set."""
        return self.losses_and_outputs(*batch)[0]

    def losses_and_outputs(self, *batch: Tensor) -> tuple[Tensor, Any]:
        """Return the loss of each sample in a batch, and the network's outputs."""
        outputs = self.model(batch[0])
        if self.loss is None:
            return self.criterion(outputs, batch), outputs
        return self.loss(outputs, batch[1], inputs=batch[0], indices=batch[-1]), outputs

    def backward(self, *batch: Tensor) -> Tensor:
        """Add the optimizer's direction for this batch to ``p.grad``, and return the mean loss.

        With a scaler, the direction is scaled.
        """
        size = len(batch[0]) // self.accumulate
        evaluate: Callable[..., Any] = self.losses
        if isinstance(self.optimizer, SharpnessAware) and Need.OUTPUTS in self.optimizer.needs:
            evaluate = self.losses_and_outputs

        def closure(chosen: Tensor | slice = slice(None)) -> Any:
            samples = [t[chosen] for t in batch]
            if self.accumulate == 1:
                return evaluate(*samples)
            return (evaluate(*part) for part in zip(*(t.split(size) for t in samples), strict=True))

        if isinstance(self.optimizer, SharpnessAware):
            return self.optimizer.backward(closure, self.scaler)
        means = []
        for i, part in enumerate(zip(*(t.split(size) for t in batch), strict=True), start=1):
            with contextlib.nullcontext() if i == self.accumulate else self.no_sync():
                mean = self.losses(*part).mean() / self.accumulate
                (mean if self.scaler is None else self.scaler.scale(mean)).backward()
            means.append(mean.detach())
        return means[0] if self.accumulate == 1 else torch.stack(means).sum()

    def step(self, *batch: Tensor) -> Tensor:
        """Take one step on a batch, and return the mean loss before it."""
        self.optimizer.zero_grad()
        loss = self.backward(*batch)
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # skips the step if the direction is not finite
            self.scaler.update()
        return loss


def build_train_step(
    method: str,
    arguments: Mapping[str, Any],
    base: Optimizer,
    model: nn.Module,
    forward: Callable[[Tensor], Any] | None = None,
    criterion: Criterion = cross_entropy,
    **known: Any,
) -> TrainStep:
    """Return the training step of a method.

    Args:
        method: a name in ``bsam.METHODS``, ``MODULE:CLASS``, or :data:`~bsam.lab.config.BASE` for the base optimizer
            alone.
        arguments: the method's arguments, by name.
        base: the base optimizer.
        model: the network, or its DDP or compiled wrapper.
        forward: a function that calls the network, for instance under autocast; None calls the model itself.
        criterion: maps outputs and a batch to one loss per sample.
        known: values for the methods that take them as arguments: ``seed``, ``total_steps``, ``samples``,
            ``classes``, ``label_smoothing``. ``arguments`` take precedence.
    """
    forward = forward or model
    if method == BASE:
        return TrainStep(forward, base, criterion)
    cls: Any = method_class(method)
    known = {"base": base, "optimizer": base, "model": model, "reduction": "none", **known}
    accepted = {name: known[name] for name in inspect.signature(cls).parameters if name in known}
    optimizer_or_loss = cls(**{**accepted, **arguments})
    if cls.is_loss:
        return TrainStep(forward, base, criterion, optimizer_or_loss.to(next(model.parameters()).device))
    return TrainStep(forward, optimizer_or_loss, criterion)


def build_run_step(
    run: Run,
    task: Task,
    model: nn.Module,
    steps: int,
    capturable: bool = False,
    processes: int = 1,
    network: nn.Module | None = None,
) -> TrainStep:
    """Return the training step of a run.

    Args:
        run: the settings.
        task: the task.
        model: the network, or its DDP or compiled wrapper.
        steps: the number of steps in the whole run.
        capturable: whether steps will be captured in a CUDA graph.
        processes: the number of processes that share each batch.
        network: the network itself if ``model`` is a wrapper, which changes the parameter names.
    """
    device = next(model.parameters()).device

    def forward(x: Tensor) -> Any:
        with autocast(run, device):
            return model(x)

    def steps_of(epochs: float) -> int:
        return max(round(epochs * steps / run.epochs), int(epochs > 0))

    known = {
        "seed": run.seed,
        "total_steps": steps,
        "samples": task.samples,
        "classes": task.classes,
        "label_smoothing": task.smoothing,
        "side_by_side": capturable,
        "warmup": steps_of(run.rho_warmup),
        "start": steps_of(run.rho_start),
    }
    base = build_base(run, network or model, capturable)
    arguments = _arguments(run, processes)
    step = replace(
        build_train_step(run.method, arguments, base, model, forward, task.batch_losses, **known),
        accumulate=run.accumulate,
        clip_norm=run.clip_norm,
        scaler=torch.amp.GradScaler(device.type) if run.precision == "fp16" else None,
        no_sync=getattr(model, "no_sync", contextlib.nullcontext),
    )
    if processes > 1 and isinstance(method := step.optimizer, SharpnessAware) and method.m_sharpness:
        state = (*method.vectors, *method.numbers)
        if state:
            raise BsamRuntimeError(
                f"with m_sharpness, the state of {run.method} ({', '.join(state)}) differs between processes, and a "
                "checkpoint holds only that of the first. Leave m_sharpness out, or choose a method without state"
            )
    return step


def check_method(run: Run, task: Task, processes: int) -> None:
    """Raise if the method cannot train this task, or cannot run in several processes."""
    if run.method == BASE:
        return
    if method_class(run.method).is_loss and not task.logits:
        raise BsamValueError(f"{run.method} compares logits, but {run.task.name} has none: choose another method")
    if processes > 1 and (reason := method_class(run.method).single_process):
        raise BsamValueError(f"{run.method} {reason}")


def _arguments(run: Run, processes: int) -> Mapping[str, Any]:
    """Return the method's arguments for one process: sample counts are divided by the number of processes."""
    if run.method == BASE or processes == 1:
        return run.arguments
    cls = method_class(run.method)
    shares = dict(run.arguments)
    for name in cls.counts_of_batch:
        count = check_count(name, shares.get(name, inspect.signature(cls).parameters[name].default))
        if count % processes:
            raise BsamValueError(f"{name} must be a multiple of the number of processes ({processes}), got {count}")
        shares[name] = count // processes
    return shares


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """Return the autocast context for the network.

    The cache of casts is off, since its entries would outlive the CUDA graph that captured them.
    """
    dtype = torch.float16 if run.precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=run.precision != "fp32", cache_enabled=False)


@contextlib.contextmanager
def as_trained(run: Run, device: torch.device) -> Iterator[None]:
    """Evaluate networks in the precision of the run's training, without gradients."""
    emulated = run.precision == "bf16" and is_bf16_emulated(device)
    with torch.no_grad(), autocast(run, device), emulated_bf16(emulated):
        yield
