"""Train one of many runs, with a log."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from ...common.errors import BsamError
from ..common.files import RunLocked, usable
from ..common.own_code import own_error
from ..common.termination import Terminated
from ..config import Run
from ..training.machine import Machine
from ..training.run_dir import LOG, RunDir
from ..training.trainer import Diverged, RunCallbacks, fit

OUT_OF_MEMORY_MESSAGES = ("CUDA out of memory", "CUDA error: out of memory")  # how messages of torch begin


@dataclass(frozen=True)
class Job:
    """A run to train in a directory; the other fields are arguments of :func:`bsam.lab.fit`."""

    run: Run
    folder: Path
    machine: Machine = Machine()
    init: Path | None = None
    about: Mapping[str, Any] | None = None
    until: int | None = None


class Outcome(NamedTuple):
    """The error message if a run failed, whether another process is training it, and messages from a worker."""

    failed: str | None = None
    locked: bool = False
    messages: tuple[str, ...] = ()


def train_run(job: Job, on_message: Callable[[str], None], on_epoch: Callable[[], None]) -> Outcome:
    """Train the remaining epochs of a run. Errors are returned, except a BrokenPipeError."""
    run = job.run
    run_dir = RunDir(job.folder)
    begin = time.perf_counter()
    with _open_log(run_dir.path) as log:

        def note(sentence: str) -> None:
            log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {sentence}\n")

        def say(sentence: str) -> None:
            note(sentence)
            on_message(sentence)

        def log_epoch(done: int, metrics: Mapping[str, Any]) -> None:
            shown = (f"{name} {value:.5g}" for name, value in metrics.items() if isinstance(value, float))
            note(f"epoch {done} of {run.epochs}: {', '.join(shown)}")
            on_epoch()

        device = job.machine.device or "auto"
        note(f"process {os.getpid()} on {platform.node()}, device {device}: {run_dir.state(run)}")
        if run.compile:  # graphs of earlier runs count towards torch's limit of 8 per function and slow this one down
            torch.compiler.reset()
        callbacks = RunCallbacks(on_epoch=log_epoch, on_message=say)
        try:
            fit(run, job.folder, job.machine, init=job.init, about=job.about, until=job.until, callbacks=callbacks)
        except Diverged:
            pass  # recorded in the run directory
        except RunLocked:
            say(f"Skipping {run_dir.path.name} for now: another process is training it.")
            return Outcome(locked=True)
        except Terminated as end:
            note(f"stopped by {signal.Signals(end.number).name}")
            raise
        except BrokenPipeError:
            raise
        except Exception as error:
            note(traceback.format_exc())
            return Outcome(message_of(error))
        note(f"{run_dir.state(run)}, in {time.perf_counter() - begin:.3f} s")
    return Outcome()


def message_of(error: BaseException) -> str:
    """Return the message of an error, with its class and the code of the user that raised it if it is not a BsamError,
    or what to do if GPU memory ran out.
    """
    if str(error).startswith(OUT_OF_MEMORY_MESSAGES):
        return "CUDA out of memory: try fewer --jobs, or with --ray a larger --gpus-per-run"
    if isinstance(error, BsamError):
        return str(error)
    own = own_error(error)
    return f"{type(error).__name__}: {error}" if own is None else own.sentence.rstrip(".")


def train_in_worker(job: Job) -> Outcome:
    """Train a run in a process that does nothing else meanwhile: everything it prints goes to the log."""
    messages: list[str] = []
    with _open_log(job.folder) as log, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        for number in (1, 2):  # stdout and stderr of C libraries
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)  # Ray uses its workers again
            os.dup2(log.fileno(), number)
        outcome = train_run(job, messages.append, lambda: None)
    return outcome._replace(messages=tuple(messages))


def _open_log(folder: Path) -> TextIO:
    with usable(folder, "a run"):
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOG).open("a", buffering=1, encoding="utf-8")
