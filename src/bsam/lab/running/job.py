"""Train one run of an experiment, with a log."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import torch

from ...common.errors import BsamError
from ..recipes.columns import state_of
from ..training.config import Run
from ..training.files import RunLocked, usable
from ..training.loop import Diverged, fit
from ..training.run_dir import LOG, run_dir_name

OnEpoch: TypeAlias = Callable[[int, Mapping[str, Any]], None]
OnMessage: TypeAlias = Callable[[str], None]

OUT_OF_MEMORY = ("CUDA out of memory", "CUDA error: out of memory")  # how messages of torch begin


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Args:
        ended: whether the run finished or diverged; False if it failed or another process is training it.
        failed: the message of the error that ended the run; otherwise None.
        messages: messages for the user, if the run was trained in a worker process.
    """

    ended: bool
    failed: str | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunJob:
    """A run to train.

    Args:
        run: the settings.
        out: the folder of the experiment.
        options: arguments of :func:`bsam.lab.training.loop.fit`, as for :func:`bsam.lab.running.runner.run_all`.
    """

    run: Run
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The log file with epochs, messages and errors."""
        return self.out / run_dir_name(self.run) / LOG

    def on(self, device: str) -> RunJob:
        """Return the same job on another device."""
        return replace(self, options={**self.options, "device": device})

    def train(self, on_epoch: OnEpoch, on_message: OnMessage) -> Outcome:
        """Train the remaining epochs. Errors in training are returned in the outcome, except a BrokenPipeError.

        Args:
            on_epoch: called after every epoch, as in :func:`bsam.lab.training.loop.fit`.
            on_message: called with messages for the user.
        """
        run, begin = self.run, time.perf_counter()
        init = None if run.init is None else self.out / run.init
        with _open_log(self.log) as log:

            def note(sentence: str) -> None:
                log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {sentence}\n")

            def say(sentence: str) -> None:
                note(sentence)
                on_message(sentence)

            def log_epoch(done: int, metrics: Mapping[str, Any]) -> None:
                shown = (f"{name} {value:.5g}" for name, value in metrics.items() if isinstance(value, float))
                note(f"epoch {done} of {run.epochs}: {', '.join(shown)}")
                on_epoch(done, metrics)

            device = self.options.get("device") or "auto"
            note(f"process {os.getpid()} on {platform.node()}, device {device}: {state_of(run, self.out)}")
            if run.compile:
                # graphs of earlier runs count towards torch's limit of 8 per function and slow this one down
                torch.compiler.reset()
            try:
                about = self.options.get("about", {}).get(self.log.parent.name)
                options = {**self.options, "about": about}
                fit(run, self.log.parent, init=init, on_epoch=log_epoch, on_message=say, **options)
            except Diverged:
                pass  # recorded in the run directory
            except RunLocked:
                say(f"Skipping {self.log.parent.name} for now: another process is training it.")
                return Outcome(False)
            except BrokenPipeError:
                raise
            except Exception as error:
                note(traceback.format_exc())
                return Outcome(False, message_of(error))
            note(f"{state_of(run, self.out)}, in {time.perf_counter() - begin:.3f} s")
        return Outcome(True)


def message_of(error: BaseException) -> str:
    """Return the message of an error, with its class if it is not a BsamError, or what to do if GPU memory ran out."""
    if str(error).startswith(OUT_OF_MEMORY):
        return "CUDA out of memory: try fewer --jobs, or with --ray a larger --gpus-per-run"
    return str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"


def train_in_worker(job: RunJob) -> Outcome:
    """Train a run in a process that does nothing else: everything it prints goes to the log."""
    messages: list[str] = []
    with _open_log(job.log) as log, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        for number in (1, 2):  # stdout and stderr of C libraries
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            os.dup2(log.fileno(), number)
        outcome = job.train(lambda *_: None, messages.append)
    return replace(outcome, messages=tuple(messages))


def _open_log(path: Path) -> TextIO:
    with usable(path.parent, "a run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", buffering=1, encoding="utf-8")
