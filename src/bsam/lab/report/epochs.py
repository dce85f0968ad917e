"""The console output of a run: its plan, and a line per epoch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ...common.errors import BsamValueError
from ..data import dataset_entry
from ..models import model_entry
from ..tasks import TASKS
from ..training.bases import base_title
from ..training.config import BASE, Run, method_title
from ..training.distributed import DistributedContext
from ..training.run_dir import RunDir
from ..training.trainer import Trainer
from .outcome import radius_warning


class ConsoleLogger:
    """Print the plan of a run, and its metrics after each epoch.

    Args:
        run: the settings.
        folder: the run directory.
        say: called with each line.
    """

    def __init__(self, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.run, self.folder, self._say = run, folder, say
        self._times = [time.perf_counter()]

    def start(self, trainer: Trainer, done: int) -> None:
        """Print the plan, before the first epoch of this call."""
        self._say(plan(trainer))
        self._say(f"Writing to {self.folder}." + (f" Continuing after epoch {done}." if done else ""))
        self._times = [time.perf_counter()]

    def epoch(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of an epoch and the time left; after the first, a warning if the radius is too large."""
        self._times.append(time.perf_counter())
        seconds = statistics.median(after - before for before, after in pairwise(self._times))
        left = f"  left {clock(seconds * (self.run.epochs - done))}" if done < self.run.epochs else ""
        self._say(epoch_line(self.run, metrics) + left)
        if (
            done == 1
            and self.run.probe is not None
            and (warning := radius_warning(self.run, RunDir(self.folder).probe()))
        ):
            self._say(warning)


def titles_of(run: Run) -> tuple[str, str]:
    """Return the titles of network and data, or their names if a user's task defines them."""
    try:
        return model_entry(run.model).title, dataset_entry(run.data).title
    except BsamValueError:
        return run.model, run.data


def plan(trainer: Trainer) -> str:
    """Return two lines: method, network, data and steps; machine and precision."""
    run, task = trainer.run, trainer.task
    parameters = sum(p.numel() for p in trainer.network.parameters())
    network, data = titles_of(run)
    noise = f" ({run.noise_text(task.notes().get('labels', {}).get('wrong'))})" if run.label_noise else ""
    size = "" if task.image_size is None else f" at {task.image_size} x {task.image_size} pixels"
    bits = "" if run.weight_bits is None else f", W{run.weight_bits}A{run.activation_bits or run.weight_bits}"
    steps = "steps captured in a CUDA graph" if trainer.captured else "eager steps"
    compiled = ", compiled" if trainer.compiled else ""
    return (
        f"{method_with_settings(run)}: {network} ({parameters:,} parameters{bits}) on {task.samples:,} samples of "
        f"{data}{size}{noise}, {_count(run.epochs, 'epoch')} of {_count(trainer.steps, 'step')}, batch {run.batch}.\n"
        f"{machine(trainer.context)}, {run.precision}{compiled}, {steps}."
    )


def method_with_settings(run: Run) -> str:
    """Return the title of the method with its arguments and its base optimizer."""
    if run.method == BASE:
        return method_title(run)
    arguments = ", ".join(f"{name}={value}" for name, value in run.arguments.items())
    return f"{method_title(run)}{f' ({arguments})' if arguments else ''} with {base_title(run.base)}"


def machine(context: DistributedContext) -> str:
    """Return the name of the device, and the number of processes if there are several."""
    if context.device.type == "cuda":
        name = torch.cuda.get_device_name(context.device)
    else:
        name = f"CPU, {_count(torch.get_num_threads(), 'thread')}"
    return name if context.size == 1 else f"{context.size} processes, each on {name}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def epoch_line(run: Run, metrics: Mapping[str, Any]) -> str:
    """Return the metrics of an epoch as one line."""
    total = str(run.epochs)
    number = f"epoch {metrics['epoch']:>{len(total)}}/{total}"
    rates = (f"{name} {metrics[name]:.2e}" for name in ("lr", "rho", "rho_min") if metrics.get(name) is not None)
    shown = dict(metrics)
    if run.task in TASKS:  # leave out the parts of the task's measure, such as the PCK of each group of joints
        parts = f"{run.eval_split}_{TASKS[run.task].measure.name}_"
        shown = {name: value for name, value in metrics.items() if not name.startswith(parts)}
    return "  ".join([number, *epoch_numbers(run, shown), *rates, f"{metrics['seconds']:.1f} s"])


def epoch_numbers(run: Run, metrics: Mapping[str, Any]) -> list[str]:
    """Return losses, the metrics of the task, and the sharpness if it was measured, as text."""
    always = ("train_loss", "memorised")
    shown = {name: metrics[name] for name in metrics if name in always or name.startswith(f"{run.eval_split}_")}
    if "sharpness" in metrics:
        shown["BilS"] = metrics["sharpness"]["bilateral"]
    return [f"{name.replace('_', ' ')} {_number(value)}" for name, value in shown.items()]


def _number(value: float | None) -> str:
    """Format a metric; None, which stands for a non-finite number in JSON, as nan."""
    if value is None:
        return "nan"
    return f"{value:.4f}" if 0.01 <= abs(value) < 10_000 or not value else f"{value:.2e}"


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds.

    Example:
        >>> clock(75.2), clock(7265)
        ('1:15', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
