"""A network in training: an epoch, and all that the next one depends on."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError, BsamValueError
from ..core.optimizer import SharpnessAware
from ..flatness.probe import Probe
from ..flatness.sharpness import Sharpness, sharpness
from ..methods import METHODS
from .bf16 import emulated, is_emulated
from .compiler import compiler_trouble, compiling
from .config import Run
from .steps import Captured, Plain
from .task import Task
from .team import DistributedContext
from .train_step import TrainStep, build_optimizer

_MECHANICS = (
    "lr",
    "fused",
    "foreach",
    "capturable",
)  # how a step is computed here, whatever machine wrote the checkpoint; the schedule sets the value of lr
_ORDER, _REST = 0x0DE, 0x4E57  # keep apart what is drawn from one (seed, epoch)


class Training:
    """A network in training: what an epoch does, and all that the next epoch depends on.

    Args:
        run: the settings.
        task: what is learned.
        team: the processes that share the work.
    """

    def __init__(self, run: Run, task: Task, team: DistributedContext) -> None:
        if run.batch % team.size:
            raise BsamValueError(
                f"batch must be a multiple of the {team.size} processes that share it, got {run.batch}"
            )
        self.steps = task.samples // run.batch
        if not self.steps:
            raise BsamValueError(
                f"batch must be at most {task.samples}, the number of training samples; got {run.batch}"
            )
        loss = run.method != "sgd" and METHODS[run.method].is_loss
        if loss and not task.logits:
            raise BsamRuntimeError(
                f"{run.method} compares logits of classes, and {run.task} has none: choose another method"
            )
        if team.size > 1 and run.method != "sgd" and (why_not := METHODS[run.method].cls.single_process):
            raise BsamRuntimeError(f"{run.method} {why_not}")
        self.run, self.task, self.team = run, task, team
        self.network = task.network()
        self.captured = (
            run.capture
            and team.device.type == "cuda"
            and team.size == 1
            and (run.method == "sgd" or METHODS[run.method].capturable)
        )
        self.emulated = run.precision == "bf16" and is_emulated(team.device)
        self.compiled = run.compile and compiler_trouble(team.device) is None
        wrapped = team.wrapped(self.network)
        model: nn.Module = torch.compile(wrapped) if self.compiled else wrapped  # type: ignore[assignment]
        self.learner = learner_of(run, task, model, self.steps * run.epochs, self.captured, team.size)
        if team.size > 1:
            _check_memory(run, self.learner.optimizer)
        self.probe: Probe | None = None
        if run.probe is not None and isinstance(self.learner.optimizer, SharpnessAware):
            self.probe = Probe(run.probe).attach(self.learner.optimizer)
        self._step = (
            Captured(self.learner, None if self.probe is None else self.probe.due)
            if self.captured
            else Plain(self.learner)
        )

    def epoch(self, number: int) -> dict[str, Any]:
        """Train for an epoch, counted from 0: the mean loss before its steps, the learning rate and rho_min of its last
        step, and seconds.
        """
        run, device = self.run, self.team.device
        start = time.perf_counter()
        self.network.train()
        self.task.begin_epoch(number)
        self.learner.begin_epoch(number)
        order = np.random.default_rng((run.seed, number, _ORDER)).permutation(self.task.samples)[
            : self.steps * run.batch
        ]
        total, lr = torch.zeros((), device=device), 0.0
        compiler = compiling(run.model) if self.compiled else contextlib.nullcontext()
        with self._drawing(number), compiler, emulated(self.emulated):
            for i, batch in enumerate(torch.from_numpy(order).to(device).split(run.batch)):
                lr = run.learning_rate(number * self.steps + i, self.steps)
                self._set(lr)
                total += self._step(*self.task.batch(self.team.share(batch)))
        found = {"train_loss": float(self.team.mean(total)) / self.steps, "lr": lr}
        seconds = time.perf_counter() - start
        return {**found, **self._radii(), "seconds": seconds}

    @contextlib.contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        """Random numbers of the network (dropout) are a function of seed, epoch and rank; the caller's stay as they
        were.
        """
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

    def _radii(self) -> dict[str, float | None]:
        """What rho_min was in the last step: it follows the learning rate. None where the method has none."""
        optimizer = self.learner.optimizer
        if not isinstance(optimizer, SharpnessAware) or "rho_min" not in optimizer.settings:
            return {"rho_min": None}
        return {"rho_min": float(optimizer.radius(optimizer.param_groups[0], "rho_min"))}

    def evaluate(self) -> dict[str, float]:
        """The network on the set that is held out."""
        self.network.eval()
        with autocast(self.run, self.team.device), emulated(self.emulated):
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
        return {
            "network": self.network.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
            "loss": None if loss is None else loss.state_dict(),
        }

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


def _check_memory(run: Run, optimizer: Optimizer) -> None:
    """Refuse a method whose memory would differ from process to process: a checkpoint holds that of the first one."""
    if (
        isinstance(optimizer, SharpnessAware)
        and optimizer.m_sharpness
        and (remembered := (*optimizer.vectors, *optimizer.numbers))
    ):
        raise BsamRuntimeError(
            f"{run.method} remembers something between steps ({', '.join(remembered)}), with m_sharpness each process "
            "something of its own, and a checkpoint "
            "holds the first one's, so that a resumed run would be another: leave m_sharpness out, or take a method "
            "that remembers nothing"
        )


def learner_of(
    run: Run, task: Task, model: nn.Module, steps: int, capturable: bool = False, processes: int = 1
) -> TrainStep:
    """The network with what the settings name to train it, for ``steps`` steps, in one of so many processes."""
    device = next(model.parameters()).device

    def forward(x: Tensor) -> Any:
        with autocast(run, device):
            return model(x)

    known = {
        "seed": run.seed,
        "total_steps": steps,
        "samples": task.samples,
        "classes": task.classes,
        "label_smoothing": task.smoothing,
    }
    return build_optimizer(
        run.method,
        _share_of_arguments(run, processes),
        base_of(run, model, capturable),
        model,
        forward,
        task.losses,
        **known,
    )


def _share_of_arguments(run: Run, processes: int) -> Mapping[str, Any]:
    """Return the method's arguments in each process, which has its share of those that count samples of the batch."""
    if run.method == "sgd" or processes == 1:
        return run.arguments
    cls, shares = METHODS[run.method].cls, dict(run.arguments)
    for name in cls.counts_of_batch:
        count = check_count(name, shares.get(name, inspect.signature(cls).parameters[name].default))
        if count % processes:
            raise BsamValueError(
                f"{name} must be a multiple of the {processes} processes, each of which chooses among its share of the "
                f"batch; got {count}"
            )
        shares[name] = count // processes
    return shares


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
    """In which the network runs. Without torch's cache of casts: its entries would outlive the graph that captured
    them.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bf16", cache_enabled=False)
