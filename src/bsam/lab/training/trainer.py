"""Train one run from start to end: the run, an epoch, a step, and what is measured of the trained network."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.checks import check_count
from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ...common.method_info import Need
from ...core.optimizer import SharpnessAware
from ...flatness.dataset_loss import num_samples
from ...flatness.hessian import HessianOperator
from ...flatness.landscape import Landscape, landscape
from ...flatness.probe import Probe
from ...flatness.sharpness import Sharpness, sharpness
from ...flatness.spectrum import top_eigenvalues
from ...methods.distillation import Distillation
from ..common.names import is_own
from ..common.printing import say
from ..common.termination import Terminated, deferred_signals
from ..config import (
    BASE,
    BASES,
    CAPTURABLE,
    Run,
    as_tuples,
    imported,
    method_class,
)
from ..data import download
from ..models.parts import head_name, layer_ids, undecayed
from ..tasks import task_of
from ..tasks.splits import Shares
from ..tasks.task import Task, TaskBatch
from .flatness_numbers import landscape_info, largest_eigenvalue, spectrum_info
from .graphs import CapturedSteps
from .machine import (
    DistributedContext,
    Machine,
    Vote,
    distributed_context,
    emulated_bf16,
    is_bf16_emulated,
    side_stream,
    why_compile_fails,
)
from .run_dir import RunDir, RunWriter, initial_network

T = TypeVar("T")
Criterion: TypeAlias = Callable[[Any, TaskBatch], Tensor]

CURVATURE_SAMPLES = 256  # training samples; few, because Hessian products are expensive
# Optimizer settings that depend on this machine and are not loaded from a checkpoint. lr is a tensor if steps are
# captured; the schedule sets its value.
_MACHINE_SETTINGS = ("lr", "fused", "foreach", "capturable")
_SHUFFLE_STREAM = 0x0DE
_TORCH_STREAM = 0x4E57  # independent random numbers from the same (seed, epoch)


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """Functions called while a run is trained, in the first process of ``torchrun``.

    Args:
        at_start: called before the first epoch of this call, with the trainer and the number of epochs already done.
        on_epoch: called with the number of epochs done and the metrics of the last one; an exception ends the run.
        report: called after the last epoch, if there is a folder, with the run and the result of
            :meth:`Task.predictions <bsam.lab.Task.predictions>`. Returns files to write, by name; TensorBoard
            shows the PNG files.
        on_message: called with messages for the user; by default they are printed.
    """

    at_start: Callable[[Trainer, int], None] = field(default=lambda trainer, done: None)
    on_epoch: Callable[[int, Mapping[str, float]], None] = field(default=lambda done, metrics: None)
    report: Callable[[Run, Mapping[str, NDArray[Any]]], Mapping[str, bytes]] = field(
        default=lambda run, predictions: {}
    )
    on_message: Callable[[str], None] = say


class Diverged(BsamRuntimeError):
    """A loss became non-finite."""


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch. ``sharpness`` is measured on the training data, with the labels used in training."""

    metrics: Mapping[str, float]
    sharpness: Sharpness | None = None


@dataclass(frozen=True)
class Result:
    """A finished run. The eigenvalue and the loss surface are computed after the last epoch, on a part of the training
    data, with the labels used in training.
    """

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  #: the mean within an epoch, since steps may differ; the median over epochs
    top_eigenvalue: float | None = None  #: the largest eigenvalue of the Hessian; NaN if the computation failed
    surface: Landscape | None = None
    measure: str = "accuracy"  #: the name of the task's measure

    def __repr__(self) -> str:
        """Return a one-line summary."""
        run = self.run
        score = f"{self.measure} {self.score:.4g}"
        return f"Result({run.method}, {run.data}, seed {run.seed}: {score} after {run.epochs} epoch(s))"

    @property
    def last(self) -> Epoch:
        """The reported epoch, which is the last one, not the best one."""
        return self.epochs[-1]

    @property
    def score(self) -> float:
        """The task's measure after the last epoch, on the evaluation split; accuracy is between 0 and 1."""
        return self.last.metrics[f"{self.run.eval_split}_{self.measure}"]


def fit(
    run: Run,
    folder: str | Path | None = None,
    machine: Machine = Machine(),
    *,
    init: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    until: int | None = None,
    callbacks: RunCallbacks = RunCallbacks(),
) -> Result:
    """Train one network.

    With a folder, the metrics are saved after every epoch, and from time to time the state. If the run is interrupted,
    the same call continues from the last checkpoint, with the same result as an uninterrupted run (bit
    for bit on a CPU). A non-finite loss raises :class:`bsam.lab.training.Diverged`, but only with a folder;
    without one, training continues with NaN metrics.

    With ``torchrun``, the processes share each batch. Batch norm then computes its statistics on each process's share,
    and methods that select samples (esam, ksam) select within it. For networks without batch norm and all other
    methods, the result is the same as with a single process. The processes also share the evaluation; the first one
    takes all other measurements.

    Args:
        run: the settings.
        folder: the run directory, for settings, metrics, checkpoints and the trained network; None writes nothing.
        machine: the device and the folders. Its ``jobs``, ``ray`` and ``gpus_per_run`` are for many runs.
        init: the directory of the run to start from, if it is not at the path in ``run.init``. Ignored when
            continuing a run.
        about: what the run is (experiment, row, ...), for ``run.json``: see :func:`bsam.lab.recipes.describe`.
        until: the epoch to stop after, with a checkpoint; a later call continues. None trains all epochs.
        callbacks: called with what happens.

    Example:
        >>> radii = {"rho_max": 0.02, "rho_min": 0.02}
        >>> result = fit(
        ...     Run("bsam", radii, lr=0.1, batch=64, epochs=1, eval_split="validation")
        ... )
        >>> result.score > 0.5
        True
    """
    if is_own(run.method):
        run = imported(run)
    task_cls: Any = task_of(run)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(distributed_context(machine.device))
        if machine.download:
            if context.is_main_of_machine:
                download(run.data, machine.data_dir, sys.stderr.isatty())
            if context.size > 1:
                context.barrier()
        if context.device.type == "cuda":
            stack.enter_context(side_stream(context.device))
        out = RunWriter(folder, run, context, machine.checkpoint_every, stack, about)
        initial = None
        if out.is_new and run.init is not None:
            initial = initial_network(run, Path(run.init if init is None else init))
        task = task_cls(run, context.device, **machine.folders)
        trainer = Trainer(run, task, context, callbacks.on_message, out.is_new, initial)
        if not out.is_new and context.is_main:
            for warning in filter(None, (_other_processes(out, context.size), _other_code(out, run))):
                callbacks.on_message(warning)
        out.resume(trainer, initial)
        if context.is_main:
            callbacks.at_start(trainer, len(trainer.epochs))
        end = run.epochs if until is None else min(check_count("until", until), run.epochs)
        with deferred_signals() as received:
            for number in range(len(trainer.epochs), end):
                metrics: dict[str, Any] = {"epoch": number + 1}
                try:
                    metrics |= trainer.train_epoch(number, received)
                except Terminated:
                    if trainer.begun is not None:
                        out.save_checkpoint(trainer)
                    raise
                metrics |= trainer.evaluate()
                if folder is not None and (reason := _divergence(trainer, metrics, out.checkpoint, folder)):
                    out.record_divergence(reason)
                    raise Diverged(reason)
                if run.sharpness_rho is not None and context.is_main:
                    metrics["sharpness"] = asdict(trainer.sharpness(run.sharpness_rho))
                trainer.epochs.append(metrics)
                out.save(trainer, is_last=number + 1 == end)
                if context.is_main:
                    callbacks.on_epoch(number + 1, metrics)
        if number := received():  # it arrived after the last step
            raise Terminated(number)
        flatness: dict[str, Any] = {}
        surface = top = None
        if len(trainer.epochs) == run.epochs:
            if run.curvature or run.surface is not None:
                measured = _flatness(trainer) if context.is_main else ({}, None)
                flatness, surface = measured if context.size == 1 else context.broadcast(measured)
                top = largest_eigenvalue(flatness)
            predictions = {} if folder is None else trainer.predictions()
            files = callbacks.report(run, predictions) if predictions else {}
            out.finish(trainer.result_network, flatness, predictions, files)
        seconds_per_step = statistics.median(metrics["seconds"] for metrics in trainer.epochs) / trainer.steps
        return Result(run, tuple(map(_epoch, trainer.epochs)), seconds_per_step, top, surface, task.score.name)


def _other_processes(run_dir: RunDir, processes: int) -> str | None:
    """Return a warning if a run continues with another number of processes, otherwise None."""
    before = run_dir.machines()[-1:]
    number = before[0].get("processes", processes) if before else processes
    if number == processes:
        return None
    return (
        f"The number of processes was {number} and is now {processes}. The result may differ from that of an "
        "uninterrupted run, because batch norm and random numbers depend on this number."
    )


def _other_code(run_dir: RunDir, run: Run) -> str | None:
    """Return a warning if a run continues with other code of the user, otherwise None."""
    changed = run_dir.changed_modules(run)
    if not changed:
        return None
    return (
        f"The code of {changed} has changed since this run began: its remaining epochs are trained with the new code. "
        "To train all epochs with the same code, restore it, or choose another folder."
    )


def _epoch(metrics: Mapping[str, Any]) -> Epoch:
    sharpness = metrics.get("sharpness")
    numbers = {name: value for name, value in metrics.items() if name != "sharpness"}
    return Epoch(numbers, None if sharpness is None else Sharpness(**sharpness))


def _divergence(trainer: Trainer, metrics: Mapping[str, Any], saved: str, folder: str | Path) -> str | None:
    """Return a message if a loss is not finite, the same in all processes; otherwise None.

    Args:
        trainer: has trained the epoch.
        metrics: those of the epoch.
        saved: the epoch of the checkpoint; empty if there is none.
        folder: the run directory.
    """
    message = None
    losses = {name: value for name, value in metrics.items() if name.endswith("_loss")}
    name = next((name for name, value in losses.items() if not math.isfinite(value)), None)
    if name is not None:
        checkpoint = f"The checkpoint of {saved} is kept in {folder}" if saved else "No checkpoint was written"
        loss = name.replace("train_", "training_").replace("_", " ")
        message = (
            f"the {loss} is {losses[name]} in epoch {metrics['epoch']}: a smaller lr (now {trainer.run.lr:g}) or "
            f"radius may help. {checkpoint}"
        )
    return trainer.context.broadcast(message) if trainer.context.size > 1 else message


class Trainer:
    """A network with its optimizer and data.

    Args:
        run: the settings.
        task: the task.
        context: the processes that share the work.
        on_message: called with messages for the user.
        is_new: initialise the network; not needed if a checkpoint is loaded later.
        init: the file with the network to start from.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        context: DistributedContext,
        on_message: Callable[[str], None] = lambda sentence: None,
        is_new: bool = True,
        init: Path | None = None,
    ) -> None:
        parts = context.size * run.accumulate
        if run.batch % parts:
            times = f" times accumulate ({run.accumulate})" if run.accumulate > 1 else ""
            raise BsamValueError(
                f"batch must be a multiple of the number of processes ({context.size}){times}, got {run.batch}"
            )
        self.steps = task.samples // run.batch
        if not self.steps:
            raise BsamValueError(
                f"batch must be at most {task.samples}, the number of training samples; got {run.batch}"
            )
        if run.method != BASE:
            method = method_class(run.method)
            if method.is_loss and not task.logits:
                raise BsamValueError(
                    f"{run.method} compares logits, but {run.task.name} has none: choose another method"
                )
            if context.size > 1 and method.single_process:
                raise BsamValueError(f"{run.method} {method.single_process}")
        self.run = run
        self.task = task
        self.context = context
        self.epochs: list[dict[str, Any]] = []  #: the metrics of each finished epoch
        self.begun: dict[str, Any] | None = None  #: the state of an epoch that a signal interrupted
        self.readings: list[dict[str, Any]] = []  #: those of the probe so far
        task.shares = Shares(context.rank, context.size, context.gather)
        self.network = task.network()
        say = on_message if context.is_main else lambda sentence: None
        for sentence in task.initialise(self.network, init) if is_new else ():
            say(sentence)
        self.average = None if run.ema is None else WeightAverage(self.network, run.ema)
        #: the network to evaluate and to save: the trained one, or the average of its weights
        self.result_network = self.network if self.average is None else self.average.network
        capturable = run.method == BASE or method_class(run.method).capturable
        capturable = capturable and run.base in CAPTURABLE and run.precision != "fp16"  # a scaler waits for the device
        self.captured = run.capture and capturable and context.device.type == "cuda" and context.size == 1
        failure = why_compile_fails(context.device) if run.compile else None
        self.compiled = run.compile and failure is None
        if failure is not None:
            say(f"torch.compile does not work on this machine ({failure}): continuing without it.")
        # the context of passes in training and evaluation
        self._in_bf16: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if run.precision == "bf16" and is_bf16_emulated(context.device):
            self._in_bf16 = emulated_bf16
            say("This CPU has no bf16 instructions: bf16 will be many times slower than fp32 (the default).")
        wrapped = context.wrap(self.network) if context.size > 1 else self.network
        model: nn.Module = torch.compile(wrapped) if self.compiled else wrapped  # type: ignore[assignment]
        total = self.steps * run.epochs
        self.train_step = build_run_step(run, task, model, total, self.captured, context.size, self.network)
        self.optimizer = self.train_step.optimizer
        optional = {"loss": self.train_step.loss, "scaler": self.train_step.scaler, "ema": self.average}
        self._optional = {name: part for name, part in optional.items() if part is not None}
        self.probe: Probe | None = None
        if run.probe is not None and isinstance(self.optimizer, SharpnessAware):
            self.probe = Probe(run.probe).attach(self.optimizer)
        due = (lambda t: False) if self.probe is None else self.probe.due
        self.take_step = CapturedSteps(self.train_step, due, on_message) if self.captured else self.train_step.step

    def train_epoch(self, number: int, received: Callable[[], int] = lambda: 0) -> dict[str, Any]:
        """Train for an epoch, counted from 0, or for the rest of one that was interrupted.

        Args:
            number: the number of the epoch.
            received: returns the number of a signal, or 0. After a signal, all processes take the same number of
                steps and raise :class:`Terminated`; :meth:`state_dict` then includes the progress of the epoch, unless
                its loss is not finite.

        Returns:
            the mean of the steps' losses, each at the weights before the step; the learning rate of the last step,
            and its radii if they change during training; and the duration in seconds.
        """
        run = self.run
        device = self.context.device
        begun = self.begun or {}
        self.begun = None
        start = time.perf_counter() - begun.get("seconds", 0.0)
        first = begun.get("steps", 0)
        self.task.set_train_mode(self.network)
        self.task.begin_epoch(number)
        if self.train_step.loss is not None:
            self.train_step.loss.set_epoch(number)
        order = np.random.default_rng((run.seed, number, _SHUFFLE_STREAM)).permutation(self.task.samples)
        indices = torch.from_numpy(order[: self.steps * run.batch]).to(device).view(self.steps, run.batch)
        total = torch.zeros((), device=device)
        lr = begun.get("lr", 0.0)
        radii: dict[str, float] = begun.get("radii", {})
        ours = indices[first:, self.context.rank :: self.context.size]  # this process's share of each batch
        done = first
        stop = 0
        vote = Vote(self.context) if self.context.size > 1 else None
        with self._seeded(number), self._in_bf16():
            if begun:
                total += self._restore_share(begun)
            for i, batch in enumerate(self.task.batches(ours), start=first):
                lr = run.learning_rate(number * self.steps + i, self.steps)
                self._set_lr(lr)
                if i == self.steps - 1:
                    radii = self._radii()
                total += self.take_step(*batch)
                if self.average is not None:
                    self.average.update()
                done = i + 1
                stop = received() if vote is None else vote(received())
                if stop:
                    break
            if self.probe is not None:
                self.readings += [asdict(reading) for reading in self.probe.readings]
                self.probe.readings.clear()
            if vote is not None:
                stop = max(stop, vote.result())
            if stop:
                share = self._share(total)
                shares = [share] if vote is None else self.context.gather(share)
                if all(math.isfinite(each["total"]) for each in shares):
                    progress = {"steps": done, "lr": lr, "radii": radii, "seconds": time.perf_counter() - start}
                    self.begun = {**progress, "shares": shares}
                raise Terminated(stop)
        if self.context.size > 1:
            total = self.context.mean(total)
        return {"train_loss": float(total) / self.steps, "lr": lr, **radii, "seconds": time.perf_counter() - start}

    def _share(self, total: Tensor) -> dict[str, Any]:
        """Return what differs between processes in the middle of an epoch: the sum of losses and the generators."""
        device = self.context.device
        share: dict[str, Any] = {"total": float(total), "cpu": torch.get_rng_state()}
        return {**share, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else share

    def _restore_share(self, begun: Mapping[str, Any]) -> float:
        """Restore the state of this process's generators, and return its sum of losses.

        With another number of processes, the generators keep the state that they have at the start of an epoch.
        """
        shares = begun["shares"]
        if len(shares) != self.context.size:
            return sum(share["total"] for share in shares) / len(shares)
        share = shares[self.context.rank]
        torch.set_rng_state(share["cpu"].cpu())
        if "cuda" in share and self.context.device.type == "cuda":
            torch.cuda.set_rng_state(share["cuda"].cpu(), self.context.device)
        return float(share["total"])

    @property
    def progress(self) -> str:
        """The epoch, or the step of an epoch, that has been reached; empty before the first one."""
        if self.begun is not None:
            return f"step {self.begun['steps']} of epoch {len(self.epochs) + 1}"
        return f"epoch {len(self.epochs)}" if self.epochs else ""

    @contextlib.contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed torch's generators with seed, epoch and rank, and restore them on exit."""
        device = self.context.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed = int(np.random.default_rng((self.run.seed, number, _TORCH_STREAM, self.context.rank)).integers(2**63))
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled

    def _radii(self) -> dict[str, float]:
        """Return the radii of the next step that change during training, by name."""
        if not isinstance(self.optimizer, SharpnessAware):
            return {}
        group = self.optimizer.param_groups[0]
        floors = self.optimizer.scheduled_radii
        changing = {name for name, floor in floors.items() if group[floor] is not None}
        if self.run.rho_warmup or self.run.rho_start:
            changing = {name for name in self.optimizer.settings if name.startswith("rho")} - {*floors.values()}
        return {name: float(self.optimizer.radius(group, name)) for name in sorted(changing)}

    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics; all processes evaluate the network of the first one."""
        network = self.result_network.eval()
        if self.context.size > 1:
            self.context.copy_buffers(network)
        with autocast(self.run, self.context.device), self._in_bf16():
            metrics = self.task.evaluate(network)
        score = f"{self.run.eval_split}_{self.task.score.name}"
        if not isinstance(metrics, Mapping) or score not in metrics:
            got = ", ".join(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
            raise BsamValueError(f"the task's evaluate must return a dictionary with {score!r}, got {got}")
        if tensors := [name for name, value in metrics.items() if isinstance(value, Tensor)]:
            raise BsamTypeError(f"the task's evaluate must return numbers, got a tensor for {tensors[0]!r}")
        return metrics

    def predictions(self) -> Mapping[str, NDArray[Any]]:
        """Return the task's predictions for some samples; empty except in the first process."""
        if not self.context.is_main:
            return {}
        with autocast(self.run, self.context.device), self._in_bf16():
            return self.task.predictions(self.result_network.eval())

    def measured_network(self) -> nn.Module:
        """Return the network for flatness measurements."""
        return self.task.measured_network(self.result_network)

    def sharpness(self, radius: float) -> Sharpness:
        """Return the sharpness on the whole training set at a radius, uphill and downhill."""
        return sharpness(self.measured_network(), self.task.loss, self.task.examples(), rho_max=radius, rho_min=radius)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next epoch depends on, or the rest of an interrupted one."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss": None,
            **{name: part.state_dict() for name, part in self._optional.items()},
            **({} if self.begun is None else {"begun": self.begun}),
            "epochs": self.epochs,
            "readings": self.readings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        groups = self.optimizer.param_groups
        machine_settings = [_machine_settings(group) for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, machine_settings, strict=True):
            group.update(settings)
        for name, part in self._optional.items():
            part.load_state_dict(state[name])
        self.begun = state.get("begun")
        self.epochs = state["epochs"]
        self.readings = state["readings"]


# ---- a step


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
        autocast: returns the context in which the model is called, which sets its precision.
    """

    model: Callable[[Tensor], Any]
    optimizer: Optimizer
    criterion: Criterion = cross_entropy
    loss: Distillation | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def kind(self) -> Hashable:
        """Return the kind of the next step. Steps of one kind launch the same kernels and can share a CUDA graph."""
        if self.loss is not None:
            return self.loss.step_kind()
        method = self.optimizer
        return (method.steps_since_start < 0, method.step_kind()) if isinstance(method, SharpnessAware) else None

    def evaluate(self, *batch: Tensor) -> Any:
        """Return the loss of each sample in a batch (inputs, targets, indices in the training set); and the network's
        outputs, if the optimizer needs them.
        """
        with self.autocast():
            outputs = self.model(batch[0])
        if self.loss is not None:
            return self.loss(outputs, batch[1], inputs=batch[0], indices=batch[-1])
        losses = self.criterion(outputs, batch)
        needs_outputs = isinstance(self.optimizer, SharpnessAware) and Need.OUTPUTS in self.optimizer.needs
        return (losses, outputs) if needs_outputs else losses

    def backward(self, *batch: Tensor) -> Tensor:
        """Add the optimizer's direction for this batch to ``p.grad``, and return the mean loss.

        With a scaler, the direction is scaled.
        """
        size = len(batch[0]) // self.accumulate

        def closure(chosen: Tensor | slice = slice(None)) -> Any:
            samples = [t[chosen] for t in batch]
            if self.accumulate == 1:
                return self.evaluate(*samples)
            parts = zip(*(t.split(size) for t in samples), strict=True)
            return (self.evaluate(*part) for part in parts)

        if isinstance(self.optimizer, SharpnessAware):
            return self.optimizer.backward(closure, self.scaler)
        means = []
        for i, part in enumerate(zip(*(t.split(size) for t in batch), strict=True), start=1):
            with contextlib.nullcontext() if i == self.accumulate else self.no_sync():
                mean = self.evaluate(*part).mean() / self.accumulate
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
    in_epochs = {"warmup": run.rho_warmup, "start": run.rho_start}
    in_steps = {name: max(round(epochs * steps / run.epochs), int(epochs > 0)) for name, epochs in in_epochs.items()}
    optimizer, loss = build_method(
        run.method,
        run.arguments if processes == 1 else _arguments_of_process(run, processes),
        build_base(run, network or model, capturable, task.classes),
        model,
        seed=run.seed,
        total_steps=steps,
        samples=task.samples,
        classes=task.classes,
        label_smoothing=task.smoothing,
        side_by_side=capturable,
        **in_steps,
    )
    if processes > 1 and isinstance(optimizer, SharpnessAware) and optimizer.m_sharpness:
        state = (*optimizer.vectors, *optimizer.numbers)
        if state:
            raise BsamRuntimeError(
                f"with m_sharpness, the state of {run.method} ({', '.join(state)}) differs between processes, and a "
                "checkpoint holds only that of the first. Leave m_sharpness out, or choose a method without state"
            )
    return TrainStep(
        model,
        optimizer,
        task.batch_losses,
        loss,
        accumulate=run.accumulate,
        clip_norm=run.clip_norm,
        scaler=torch.amp.GradScaler(device.type) if run.precision == "fp16" else None,
        no_sync=getattr(model, "no_sync", contextlib.nullcontext),
        autocast=partial(autocast, run, device),
    )


def build_method(
    method: str, arguments: Mapping[str, Any], base: Optimizer, model: nn.Module, **known: Any
) -> tuple[Optimizer, Distillation | None]:
    """Return the optimizer of a method, and its loss if it is SAF or MESA.

    Args:
        method: a name in ``bsam.METHODS``, ``MODULE:CLASS``, or :data:`~bsam.lab.config.BASE` for the base optimizer
            alone.
        arguments: the method's arguments, by name.
        base: the base optimizer.
        model: the network, or its DDP or compiled wrapper.
        known: values for the methods that take them as arguments: ``seed``, ``total_steps``, ``samples``,
            ``classes``, ``label_smoothing``. ``arguments`` take precedence.
    """
    if method == BASE:
        return base, None
    cls: Any = method_class(method)
    known = {"base": base, "optimizer": base, "model": model, "reduction": "none", **known}
    accepted = {name: known[name] for name in inspect.signature(cls).parameters if name in known}
    optimizer_or_loss = cls(**{**accepted, **arguments})
    if cls.is_loss:
        return base, optimizer_or_loss.to(next(model.parameters()).device)
    return optimizer_or_loss, None


def _arguments_of_process(run: Run, processes: int) -> Mapping[str, Any]:
    """Return the method's arguments for one process: sample counts are divided by the number of processes."""
    if run.method == BASE:
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
    is_emulated = run.precision == "bf16" and is_bf16_emulated(device)
    with torch.no_grad(), autocast(run, device), emulated_bf16() if is_emulated else contextlib.nullcontext():
        yield


# ---- the base optimizer


def build_base(run: Run, network: nn.Module, capturable: bool = False, classes: int | None = None) -> Optimizer:
    """Return the base optimizer; if ``capturable``, its learning rates are tensors on the device.

    The momentum is the first of the ``betas`` for optimizers that have these; ``run.base_arguments`` take precedence.
    """
    groups = trained_groups(run, network, classes)
    for group in groups:
        lr = run.lr
        if "lr_scale" in group:
            group["initial_lr"] = lr  # radii follow the learning rate without lr_scale
            lr *= group["lr_scale"]
        group["lr"] = torch.tensor(lr, device=group["params"][0].device) if capturable else lr
    accepted = inspect.signature(BASES[run.base]).parameters
    arguments: dict[str, Any] = {"weight_decay": run.weight_decay}
    if "momentum" in accepted:
        arguments["momentum"] = run.momentum
    if "betas" in accepted:
        arguments["betas"] = (run.momentum, accepted["betas"].default[1])
    if run.nesterov:
        arguments["nesterov"] = True
    if capturable:
        arguments["fused" if run.base == "sgd" else "capturable"] = True
    return BASES[run.base](groups, **{**arguments, **as_tuples(run.base_arguments)})


def _machine_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _MACHINE_SETTINGS if name in group}


def trained_groups(run: Run, network: nn.Module, classes: int | None = None) -> list[dict[str, Any]]:
    """Return the groups of trained parameters: one group, one per learning rate, or those of the task.

    With several learning rates, each group has an ``lr_scale``, a factor on the run's learning rate, as in timm. With
    ``decay="weights"``, parameters without weight decay are in groups of their own.
    """
    groups = task_of(run).parameter_groups(run, network)
    if groups is None and run.head_lr is None and run.layer_decay == 1:
        groups = [{"params": [p for p in network.parameters() if p.requires_grad]}]
    elif groups is None:
        groups = _groups_by_rate(run, network, classes)
    if run.decay == "all":
        return groups
    bare = undecayed(network)
    parts: list[dict[str, Any]] = []
    for group in groups:
        parts.append({**group, "params": [p for p in group["params"] if p not in bare]})
        parts.append({**group, "params": [p for p in group["params"] if p in bare], "weight_decay": 0.0})
    return [part for part in parts if part["params"]]


def _groups_by_rate(run: Run, network: nn.Module, classes: int | None) -> list[dict[str, Any]]:
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    depths = dict.fromkeys(dict(network.named_parameters()), 0) if run.layer_decay == 1 else layer_ids(network)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in trained:
        scale = run.layer_decay ** (max(depths.values()) - depths[name])
        if run.head_lr is not None and name.startswith(f"{head_name(network, classes)}."):
            scale = run.head_lr / run.lr
        groups.setdefault(scale, []).append(p)
    return [{"params": params, "lr_scale": scale} for scale, params in groups.items()]


# ---- the average of the weights


class WeightAverage:
    r"""A copy of a network that holds the average of its weights after all steps so far.

    After step :math:`t`, the average is :math:`\sum_i \beta^{t-i} w_i / \sum_i \beta^{t-i}` with :math:`i = 1 \dots t`,
    so the initial weights have no part in it. Floating-point buffers, such as the statistics of batch norm, are
    averaged in the same way; other buffers are copied.

    Args:
        network: the network that is trained.
        decay: the factor :math:`\beta`, between 0 and 1.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> average = WeightAverage(layer, decay=0.5)
        >>> for value in (3.0, 6.0):
        ...     _ = nn.init.constant_(layer.weight, value)
        ...     average.update()
        >>> average.network.weight.item()  # (0.5 * 3 + 6) / 1.5
        5.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network)
        self._source = network
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step. This does not wait for the device."""
        self._steps += 1
        pairs = list(zip(_tensors(self.network), _tensors(self._source), strict=True))
        # the first step is copied: lerp gives NaN if a range still starts at infinity
        averaged = [(mean, new) for mean, new in pairs if self._steps > 1 and new.dtype.is_floating_point]
        copied = [(mean, new) for mean, new in pairs if self._steps == 1 or not new.dtype.is_floating_point]
        if averaged:
            weight = (1 - self._decay) / (1 - self._decay**self._steps)
            torch._foreach_lerp_([mean for mean, _ in averaged], [new for _, new in averaged], weight)
        for mean, new in copied:
            mean.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps."""
        return {"network": self.network.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        self._steps = state["steps"]


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


# ---- what is measured at the end


def _flatness(trainer: Trainer) -> tuple[dict[str, Any], Landscape | None]:
    """Measure the largest eigenvalue and the loss surface, as the run asks; return the entry of ``flatness.json``, and
    the surface.
    """
    run = trainer.run
    surface = None
    network = trainer.measured_network()
    loss = trainer.task.loss
    examples = trainer.task.examples(CURVATURE_SAMPLES)
    entry: dict[str, Any] = {"samples": sum(num_samples(x, y) for x, y in examples)}
    if run.curvature:
        try:
            entry["eigenvalues"] = spectrum_info(top_eigenvalues(HessianOperator(network, loss, examples), 1, tol=1e-3))
        except BsamError:  # a non-finite product: a run that diverged still has a result
            entry["eigenvalues"] = {"maximum": math.nan, "converged": False}
    if run.surface is not None:
        surface = landscape(network, loss, examples, points=run.surface)
        entry["landscape"] = landscape_info(surface)
    return entry, surface
