"""One run, from the first step to the last epoch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..core.optimizer import SharpnessAware
from ..core.refusal import Refusal
from ..flatness.hessian import HessianOperator
from ..flatness.landscape import landscape
from ..flatness.probe import Probe
from ..flatness.sharpness import Sharpness, sharpness
from ..flatness.spectrum import top_eigenvalues
from ..methods import METHODS
from .classification import Classification, label_smoothing
from .config import Run
from .folder import Folder
from .learner import Learner, equip
from .result import Relief, Result, result_of
from .steps import Captured, Plain, side_stream
from .task import Task
from .team import Team, team

TASKS: dict[str, type[Task]] = {"classification": Classification}
CURVATURE_SAMPLES = 256  # of the training data, the first ones: Hessian products take their time
_MECHANICS = ("lr", "fused", "foreach", "capturable")  # how a step is computed here, whatever machine wrote the checkpoint; the schedule sets the value of lr
_ORDER, _REST = 0x0DE, 0x4E57  # keep apart what is drawn from one (seed, epoch)


class Diverged(Refusal):
    """A loss was no number at last."""


class Training:
    """A network in training: what an epoch does, and all that the next epoch depends on.

    Args:
        run: the settings.
        task: what is learned.
        team: the processes that share the work.
    """

    def __init__(self, run: Run, task: Task, team: Team) -> None:
        if run.batch % team.size:
            raise Refusal(f"batch must be a multiple of the {team.size} processes that share it, got {run.batch}")
        self.steps = task.samples // run.batch
        if not self.steps:
            raise Refusal(f"batch must be at most {task.samples}, the number of training samples; got {run.batch}")
        loss = run.method != "sgd" and METHODS[run.method].is_loss
        if loss and not task.logits:
            raise Refusal(f"{run.method} compares logits of classes, and {run.task} has none: choose another method")
        if run.method == "saf" and team.size > 1:
            raise Refusal("saf remembers each sample's logits, and here other processes see them: train with one process, or by mesa")
        self.run, self.task, self.team = run, task, team
        self.network = task.network()
        self.captured = run.capture and team.device.type == "cuda" and team.size == 1 and (run.method == "sgd" or METHODS[run.method].capturable)
        wrapped = team.wrapped(self.network)
        model: nn.Module = torch.compile(wrapped) if run.compile else wrapped  # type: ignore[assignment]
        self.learner = learner_of(run, task, model, self.steps * run.epochs, self.captured)
        self.probe: Probe | None = None
        if run.probe is not None and isinstance(self.learner.optimizer, SharpnessAware):
            self.probe = Probe(run.probe).attach(self.learner.optimizer)
        self._step = Captured(self.learner, None if self.probe is None else self.probe.due) if self.captured else Plain(self.learner)

    def epoch(self, number: int) -> dict[str, float]:
        """Train for an epoch, counted from 0: the mean loss before its steps, the learning rate and rho_min of its last step, and seconds."""
        run, device = self.run, self.team.device
        start = time.perf_counter()
        self.network.train()
        self.task.begin_epoch(number)
        self.learner.begin_epoch(number)
        order = np.random.default_rng((run.seed, number, _ORDER)).permutation(self.task.samples)[: self.steps * run.batch]
        total, lr = torch.zeros((), device=device), 0.0
        with self._drawing(number):
            for i, batch in enumerate(torch.from_numpy(order).to(device).split(run.batch)):
                lr = run.learning_rate(number * self.steps + i, self.steps)
                self._set(lr)
                total += self._step(*self.task.batch(self.team.share(batch)))
        found = {"train_loss": float(self.team.mean(total)) / self.steps, "lr": lr}
        seconds = time.perf_counter() - start
        return {**found, **self._radii(), "seconds": seconds}

    @contextlib.contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        """Random numbers of the network (dropout) are a function of seed, epoch and rank; the caller's stay as they were."""
        device = self.team.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed = int(np.random.default_rng((self.run.seed, number, _REST, self.team.rank)).integers(2**63))
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs that are not ours
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def _set(self, lr: float) -> None:
        for group in self.learner.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _radii(self) -> dict[str, float]:
        """What rho_min was in the last step, where there is one: it follows the learning rate."""
        optimizer = self.learner.optimizer
        if not isinstance(optimizer, SharpnessAware) or "rho_min" not in optimizer.settings:
            return {}
        return {"rho_min": float(optimizer.radius(optimizer.param_groups[0], "rho_min"))}

    def evaluate(self) -> dict[str, float]:
        """The network on the set that is held out."""
        self.network.eval()
        with autocast(self.run, self.team.device):
            return self.task.evaluate(self.network)

    def sharpness(self, radius: float) -> Sharpness:
        """Of the whole training set, up and down by ``radius``."""
        return sharpness(self.network, self.task.loss, self.task.examples(), rho_max=radius, rho_min=radius)

    def readings(self) -> list[dict[str, Any]]:
        """What the probe saw since the last call."""
        if self.probe is None:
            return []
        found = [asdict(reading) for reading in self.probe.readings]
        self.probe.readings.clear()
        return found

    def state_dict(self) -> dict[str, Any]:
        """All that the next epoch depends on."""
        loss = self.learner.loss
        return {"network": self.network.state_dict(), "optimizer": self.learner.optimizer.state_dict(), "loss": None if loss is None else loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.network.load_state_dict(state["network"])
        groups = self.learner.optimizer.param_groups
        own = [{name: group[name] for name in _MECHANICS if name in group} for group in groups]
        self.learner.optimizer.load_state_dict(state["optimizer"])
        for group, mechanics in zip(self.learner.optimizer.param_groups, own, strict=True):
            group.update(mechanics)
        if self.learner.loss is not None:
            self.learner.loss.load_state_dict(state["loss"])


def fit(
    run: Run,
    folder: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    task: type[Task] | None = None,
    at_start: Callable[[Training, int], None] | None = None,
    each_epoch: Callable[[int, Mapping[str, float]], None] | None = None,
    tell: Callable[[str], None] = print,
) -> Result:
    """Train one network.

    With a folder, every epoch is kept there: called again, an interrupted run goes on after the last epoch that it finished and ends as it would have ended,
    on a CPU bit for bit. Started by ``torchrun``, the processes share each batch.

    Args:
        run: the settings.
        folder: for settings, numbers, checkpoints and the trained network; None keeps nothing.
        data_dir: where the data is, if it is read from files.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None takes a GPU if there is one.
        task: what is learned; None takes the run's, from :data:`TASKS`.
        at_start: called with the training and the number of epochs done before, when all is ready for the next one.
        each_epoch: called with the number of epochs done and the metrics of the last one; what it raises ends the run.
        tell: called with a sentence that a user should know.

    Example:
        >>> result = fit(Run("bsam", {"rho_max": 0.02, "rho_min": 0.02}, lr=0.1, batch=64, epochs=1, held_out="validation"))
        >>> result.accuracy > 0.5
        True
    """
    if task is None and run.task not in TASKS:
        raise Refusal(f"task must be one of {', '.join(TASKS)}; got {run.task!r}")
    with team(device) as processes, side_stream(processes.device), contextlib.ExitStack() as stack:
        book = None if folder is None else Folder(folder, run, tell)
        if book is not None and processes.writes:
            stack.enter_context(book)
        work = (task or TASKS[run.task])(run, processes.device, None if data_dir is None else Path(data_dir))
        training = Training(run, work, processes)
        processes.wait()
        epochs: list[dict[str, Any]] = []
        readings: list[dict[str, Any]] = []
        state = None if book is None else book.last(processes.device)
        if state is not None:
            training.load_state_dict(state)
            epochs, readings = state["epochs"], state["readings"]
        if book is not None and processes.writes:
            book.begin(processes.device, work.notes(), epochs, readings)
        if at_start is not None and processes.writes:
            at_start(training, len(epochs))
        for number in range(len(epochs), run.epochs):
            metrics: dict[str, Any] = {"epoch": number + 1, **training.epoch(number)}
            if processes.writes:
                metrics |= training.evaluate()
            lost = [name for name, value in metrics.items() if name.endswith("_loss") and not math.isfinite(value)]
            if book is not None and lost:  # the test loss tells of a last step that went too far
                raise Diverged(
                    f"the {lost[0].replace('train_', 'training_').replace('_', ' ')} is {metrics[lost[0]]} in epoch {number + 1}: a smaller lr "
                    f"(now {run.lr:g}) or radius may help. {f'The checkpoint of epoch {number} is kept in {folder}' if number else 'No epoch was finished'}"
                )
            if processes.writes and run.radius is not None:
                metrics["sharpness"] = asdict(training.sharpness(run.radius))
            epochs.append(metrics)
            readings += training.readings()
            if book is not None and processes.writes:
                book.keep(training.state_dict(), epochs, readings)
            processes.wait()
            if each_epoch is not None and processes.writes:
                each_epoch(number + 1, metrics)
        some = work.examples(CURVATURE_SAMPLES) if run.curvature or run.relief is not None else []
        top = _top_eigenvalue(training.network, work, some) if run.curvature else None
        relief = _relief(training.network, work, some, run.relief) if run.relief is not None else None
        if book is not None and processes.writes:
            found = {"top_eigenvalue": top, "relief": None if relief is None else asdict(relief)}
            book.finish(training.network, found if some else None)
        return replace(result_of(run, epochs, training.steps), top_eigenvalue=top, relief=relief)


def learner_of(run: Run, task: Task, model: nn.Module, steps: int, capturable: bool = False) -> Learner:
    """The network with what the settings name to train it, for ``steps`` steps."""
    device = next(model.parameters()).device

    def forward(x: Tensor) -> Any:
        with autocast(run, device):
            return model(x)

    known: dict[str, Any] = {"seed": run.seed, "total_steps": steps, "samples": task.samples, "classes": task.classes}
    if run.method in METHODS and METHODS[run.method].is_loss:
        known["label_smoothing"] = label_smoothing(run.label_smoothing, task.classes)
    return equip(run.method, run.arguments, base_of(run, model, capturable), model, forward, task.losses, **known)


def base_of(run: Run, model: nn.Module, capturable: bool = False) -> Optimizer:
    """The base optimizer; one whose step can be captured in a CUDA graph keeps its learning rate on the device."""
    params = list(model.parameters())
    lr = torch.tensor(run.lr, device=params[0].device) if capturable else run.lr
    if run.base == "sgd":
        fused = {"fused": True} if capturable else {}
        return SGD(params, lr=lr, momentum=run.momentum, nesterov=run.nesterov, weight_decay=run.weight_decay, **fused)
    cls = {"adam": Adam, "adamw": AdamW}[run.base]
    return cls(params, lr=lr, betas=(run.momentum, 0.999), weight_decay=run.weight_decay, capturable=capturable)


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """In which the network runs. Without torch's cache of casts: its entries would outlive the graph that captured them."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16", cache_enabled=False)


def _top_eigenvalue(network: nn.Module, task: Task, some: Any) -> float:
    try:
        found = top_eigenvalues(HessianOperator(network, task.loss, some), k=1, tol=1e-3)
    except Refusal:  # a product was not finite: a run that diverged is a result, too
        return math.nan
    return float(found.values[0]) if found.converged else math.nan


def _relief(network: nn.Module, task: Task, some: Any, points: int) -> Relief:
    found = landscape(network, task.loss, some, points=points)
    return Relief(tuple(found.axes[0].tolist()), tuple(map(tuple, found.loss.tolist())))
