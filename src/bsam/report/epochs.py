"""What one training run says of itself: a plan, a line per epoch, its last numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..data import DATASETS
from ..methods import METHODS
from ..models import MODELS
from ..training.config import Run
from ..training.team import DistributedContext
from ..training.training import Training

BASES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


class ConsoleLogger:
    """Says what a run will do, and how its epochs went.

    Args:
        run: its settings.
        folder: where it is kept.
        say: called with each line.
    """

    def __init__(self, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.run, self.folder, self._say = run, folder, say
        self._times = [time.perf_counter()]

    def start(self, training: Training, done: int) -> None:
        """Before the first epoch of this call."""
        self._say(plan(training))
        self._say(f"Into {self.folder}." + (f" Going on after epoch {done}." if done else ""))
        self._times = [time.perf_counter()]

    def epoch(self, done: int, metrics: Mapping[str, Any]) -> None:
        """After each epoch."""
        self._times.append(time.perf_counter())
        each = statistics.median(after - before for before, after in zip(self._times, self._times[1:], strict=False))
        left = f"  left {clock(each * (self.run.epochs - done))}" if done < self.run.epochs else ""
        self._say(epoch_line(self.run, metrics) + left)


def plan(training: Training) -> str:
    """Method, network, data, steps and machine, in a sentence."""
    run, task = training.run, training.task
    parameters = sum(p.numel() for p in training.network.parameters())
    network = MODELS[run.model].title if run.model in MODELS else run.model
    data = DATASETS[run.data].title if run.data in DATASETS else run.data
    noise = f", {run.label_noise:.0%} of the labels flipped" if run.label_noise else ""
    kind = "each one CUDA graph" if training.captured else "plain"
    compiled = ", compiled" if training.compiled else ""
    return (
        f"{method_title(run)}: {network} ({parameters:,} parameters) on {task.samples:,} samples of {data}{noise}, "
        f"{run.epochs} epochs of {training.steps} "
        f"steps, batch {run.batch}; {machine(training.team)}, {run.precision}{compiled}, steps {kind}."
    )


def method_title(run: Run) -> str:
    """The method with its arguments and its base optimizer.

    Example:
        >>> method_title(Run("bsam", {"rho_max": 0.1, "passes": 2})), method_title(Run("sgd", base="adam"))
        ('BSAM (rho_max=0.1, passes=2) with SGD', 'Adam')
    """
    if run.method == "sgd":
        return BASES[run.base]
    own = ", ".join(f"{name}={value}" for name, value in run.arguments.items())
    return f"{METHODS[run.method].title}{f' ({own})' if own else ''} with {BASES[run.base]}"


def machine(team: DistributedContext) -> str:
    """The device, as its maker calls it, and how many processes share the work."""
    name = (
        torch.cuda.get_device_name(team.device)
        if team.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thread(s)"
    )
    return name if team.size == 1 else f"{team.size} processes, each on {name}"


def epoch_line(run: Run, metrics: Mapping[str, Any]) -> str:
    """One epoch in one line.

    Example:
        >>> epoch_line(Run("sam", epochs=10), {"epoch": 3, "train_loss": 0.51, "lr": 0.02, "seconds": 1.26, "test_loss": 0.4, "test_accuracy": 0.875})
        'epoch  3/10  train loss 0.5100  test loss 0.4000  test accuracy 0.8750  lr 2.00e-02  1.3 s'
    """
    total = str(run.epochs)
    steps = (f"{name} {metrics[name]:.2e}" for name in ("lr", "rho_min") if metrics.get(name) is not None)
    return "  ".join(
        [
            f"epoch {metrics['epoch']:>{len(total)}}/{total}",
            *epoch_numbers(run, metrics),
            *steps,
            f"{metrics['seconds']:.1f} s",
        ]
    )


def epoch_numbers(run: Run, metrics: Mapping[str, Any]) -> list[str]:
    """How good the network is after an epoch: losses, what its task judges it by, and its sharpness if that was
    measured.
    """
    judged = {
        name: value for name, value in metrics.items() if name == "train_loss" or name.startswith(f"{run.eval_split}_")
    }
    near = {"BilS": metrics["sharpness"]["bilateral"]} if "sharpness" in metrics else {}
    return [f"{name.replace('_', ' ')} {_number(value)}" for name, value in {**judged, **near}.items()]


def _number(value: float | None) -> str:
    """Four digits, those of a small number too; a number that is not finite is null in JSON."""
    if value is None:
        return "nan"
    return f"{value:.4f}" if abs(value) >= 0.01 or not value else f"{value:.2e}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> clock(75.2), clock(7265)
        ('1:15', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
