"""``bsam train``: train one network in a run directory."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ...common.errors import BsamError, BsamValueError
from ..analysis.outcome import failure, radius_warning
from ..common.files import LOCK
from ..common.printing import count_text
from ..common.printing import say as _say
from ..common.termination import SAVED, resumable
from ..config import BASE, BASES, Run, method_title
from ..recipes.plan import describe, measured_on
from ..recipes.start import check_start
from ..report.figures.class_report import class_report
from ..tasks import task_of
from ..training.flatness_numbers import largest_eigenvalue
from ..training.run_dir import CHECKPOINT, RunDir, run_dir_name
from ..training.trainer import RunCallbacks, Trainer, fit
from .run_flags import CACHE_HELP, DEVICE_HELP, add_checkpoint_flag, add_run_flags, machine_of, run_of

DESCRIPTION = """\
Train one network. Writes config.json (the settings), metrics.jsonl (one line per epoch), environment.json,
checkpoint.pt, tensorboard/ if TensorBoard is installed and, at the end, model.safetensors. Classification adds
classes.md (the accuracy of each class), confusion.html and, with Pillow, mistakes.png. If the run is
interrupted (Ctrl-C, SIGTERM, SIGUSR1, a crash), the same command continues from the last checkpoint, with the result of
an uninterrupted run. After SIGTERM and SIGUSR1, a checkpoint is written first. With torchrun, the processes share each
batch."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    groups = add_run_flags(command)
    flag = groups("Data").add_argument
    flag("--data-dir", type=Path, help="folder with the files of the data set (and of --weights)", metavar="FOLDER")
    flag("--cache-dir", type=Path, help=CACHE_HELP, metavar="FOLDER")
    first = "first download CIFAR or Fashion-MNIST into --data-dir, if it is not there yet"
    flag("--download", action="store_true", help=first)
    out = "folder of the run (default: runs/MODEL-DATA-METHOD-ARGUMENTS-seedSEED-DIGEST)"
    groups("Output").add_argument("--out", type=Path, help=out, metavar="FOLDER")
    groups("Precision and speed").add_argument("--device", default="auto", help=DEVICE_HELP, metavar="NAME")
    add_checkpoint_flag(groups("Output"))
    command.set_defaults(run=_train, needs={"safetensors": "train"})


def _train(arguments: argparse.Namespace) -> None:
    run = run_of(arguments)
    folder = arguments.out or Path("runs") / run_dir_name(run)
    machine = machine_of(arguments)
    is_first = os.environ.get("RANK", "0") == "0"  # the only process, or the first of those of torchrun
    say = _say if is_first else lambda line: None
    with resumable(folder, CHECKPOINT, SAVED):
        run_dir = RunDir(folder)
        try:
            state = run_dir.state(run)
        except BsamError:
            _check_epochs(run, run_dir)
            raise
        epochs: Sequence[Mapping[str, Any]] = state.epochs
        if state.finished:
            say(f"The run in {folder} is finished.")
        else:
            if not (folder / CHECKPOINT).exists():
                check_start(run, arguments.data_dir)
            logger = ConsoleLogger(run, folder, say)
            callbacks = RunCallbacks(at_start=logger.start, on_epoch=logger.epoch, report=class_report, on_message=say)
            fit(run, folder, machine, about=describe(run), callbacks=callbacks)
            epochs = logger.epochs
        if is_first:
            _say(f"After epoch {run.epochs}: {'  '.join(epoch_numbers(run, epochs[-1]))}")
            for entry in run_dir.flatness() if run.curvature else ():
                if (top := largest_eigenvalue(entry)) is not None:
                    where = measured_on(run.settings(), entry["samples"])
                    _say(f"Largest eigenvalue of the Hessian ({where}): {top:.4g}")
            files = (file for file in folder.iterdir() if file.name != LOCK and file.suffix != ".draft")
            names = sorted(f"{file.name}/" if file.is_dir() else file.name for file in files)
            _say(f"Written to {folder}: {', '.join(names)}")
            if (sentence := failure(run, run_dir, epochs)) is not None:
                _say(sentence)


def _check_epochs(run: Run, run_dir: RunDir) -> None:
    """Raise if the directory holds the same run, finished after fewer epochs: its schedule has ended."""
    try:
        finished = run_dir.finished_run()
    except BsamError:
        return  # empty, or unfinished
    is_shorter = finished.epochs < run.epochs and replace(finished, epochs=run.epochs) == run
    if is_shorter and not task_of(run).not_initial(run):
        flags = ""
        if run.weights is not None:  # with --init, these defaults differ
            settings = run.settings()
            names = [name for name in ("lr", "weight_decay", "label_smoothing") if name in settings]
            flags = "".join(f" --{name.replace('_', '-')} {settings[name]:g}" for name in names)
        raise BsamValueError(
            f"the run in {run_dir.path} is finished (epochs: {finished.epochs}). To continue from its weights with a "
            f"new schedule, use --init {run_dir.path} --epochs {run.epochs - finished.epochs}{flags} and another --out"
            + (", without --weights" if flags else "")
        )


@dataclass
class ConsoleLogger:
    """Print the plan of a run, and its metrics after each epoch.

    Args:
        run: the settings.
        folder: the run directory.
        say: called with each line.
        times: when training started and each epoch ended.
        epochs: the metrics of all finished epochs, also of those before this call.
    """

    run: Run
    folder: Path
    say: Callable[[str], None]
    times: list[float] = field(default_factory=lambda: [time.perf_counter()])
    epochs: Sequence[Mapping[str, Any]] = ()

    def start(self, trainer: Trainer, done: int) -> None:
        """Print the plan, before the first epoch of this call."""
        self.epochs = trainer.epochs
        self.say(plan_text(trainer))
        self.say(f"Writing to {self.folder}." + (f" Continuing after {trainer.progress}." if trainer.progress else ""))
        self.times = [time.perf_counter()]

    def epoch(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of an epoch and the time left; after the first, a warning if the radius is too large."""
        self.times.append(time.perf_counter())
        seconds = statistics.median(after - before for before, after in pairwise(self.times))
        left = f"  left {clock(seconds * (self.run.epochs - done))}" if done < self.run.epochs else ""
        total = str(self.run.epochs)
        rates = (f"{name} {metrics[name]:.2e}" for name in metrics if name == "lr" or name.startswith("rho"))
        # without the parts of the task's score, such as the PCK of each group of joints
        parts = f"{self.run.eval_split}_{task_of(self.run).score.name}_"
        shown = {name: value for name, value in metrics.items() if not name.startswith(parts)}
        numbers = "  ".join([*epoch_numbers(self.run, shown), *rates, f"{metrics['seconds']:.1f} s"])
        self.say(f"epoch {metrics['epoch']:>{len(total)}}/{total}  {numbers}{left}")
        if done == 1 and self.run.probe is not None:
            warning = radius_warning(self.run, RunDir(self.folder).probe())
            if warning is not None:
                self.say(warning)


def plan_text(trainer: Trainer) -> str:
    """Return two lines: method, network, data and steps; machine and precision."""
    run = trainer.run
    task = trainer.task
    parameters = sum(p.numel() for p in trainer.network.parameters())
    network, data = task.titles(run)
    notes = task.notes()
    wrong = task.wrong_labels(run, lambda name: notes.get(name, {}))
    of_network = ", ".join(filter(None, (f"{parameters:,} parameters", task.network_details(run))))
    data_words = task.data_words(run, wrong)
    size = "" if task.image_size is None else f" at {task.image_size} x {task.image_size} pixels"
    length = f"{count_text(run.epochs, 'epoch')} of {count_text(trainer.steps, 'step')}"
    steps = "steps captured in a CUDA graph" if trainer.captured else "eager steps"
    compiled = ", compiled" if trainer.compiled else ""
    evaluated = "" if task.eval_samples is None else f" Evaluated on {task.eval_samples:,} {run.eval_split} samples."
    method = method_title(run)
    if run.method != BASE:
        arguments = ", ".join(f"{name}={value}" for name, value in run.arguments.items())
        method += f"{f' ({arguments})' if arguments else ''} with {BASES[run.base].__name__}"
    device = trainer.context.device
    processes = trainer.context.size
    machine = f"CPU, {count_text(torch.get_num_threads(), 'thread')}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    if processes > 1:
        machine = f"{processes} processes, each on {machine}"
    return (
        f"{method}: {network} ({of_network}) on {task.samples:,} samples of "
        f"{data}{size}{f' ({data_words})' if data_words else ''}, {length}, batch {run.batch}."
        f"{evaluated}\n"
        f"{machine}, {run.precision}{compiled}, {steps}."
    )


def epoch_numbers(run: Run, metrics: Mapping[str, Any]) -> list[str]:
    """Return losses, the metrics of the task, and the sharpness if it was measured, as text."""
    always = ("train_loss", "memorised")
    shown = {name: metrics[name] for name in metrics if name in always or name.startswith(f"{run.eval_split}_")}
    if "sharpness" in metrics:
        shown["BilS"] = metrics["sharpness"]["bilateral"]
    texts = []
    for name, value in shown.items():
        number = math.nan if value is None else value  # JSON has no NaN
        is_short = number == 0 or 0.01 <= abs(number) < 10_000
        texts.append(f"{name.replace('_', ' ')} {number:{'.4f' if is_short else '.2e'}}")
    return texts


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds.

    Example:
        >>> clock(75.2), clock(7265)
        ('1:15', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
