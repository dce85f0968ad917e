"""One run of an experiment, as an executor trains it, and its log."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import torch

from ..core.errors import BsamError
from ..training.config import Run
from ..training.files import RunLocked, usable
from ..training.loop import Diverged, fit
from ..training.run_dir import DIVERGED, LOG, NETWORK, RunDir, RunState, run_dir_name

EachEpoch: TypeAlias = Callable[[int, Mapping[str, Any]], None]


def state_of(run: Run, out: Path) -> RunState:
    """Return the state of a run, by its directory below ``out``."""
    return RunDir(out / run_dir_name(run)).state(run)


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        ended: False if it is locked by another process, or begins with a run that is not finished.
        told: sentences for the user.
        failed: the message of the error that ended it; else None.
    """

    ended: bool
    told: tuple[str, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class RunJob:
    """A run to finish.

    Args:
        run: its settings.
        out: the folder of the experiment.
        options: of :func:`bsam.training.loop.fit`: ``data_dir``, ``cache_dir``, ``device``.
    """

    run: Run
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The file to which its epochs, messages and errors are added."""
        return self.out / run_dir_name(self.run) / LOG

    def on(self, device: str) -> RunJob:
        """Return the same job on another device."""
        return replace(self, options={**self.options, "device": device})

    def train(self, each_epoch: EachEpoch, tell: Callable[[str], None]) -> Outcome:
        """Train what is left of the run, if anything.

        Args:
            each_epoch: called after every epoch, as by :func:`bsam.training.loop.fit`.
            tell: called with sentences for the user, which the outcome has, too.
        """
        run = self.run
        told: list[str] = []
        with _appending(self.log) as log:

            def note(sentence: str) -> None:
                log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {sentence}\n")

            def say(sentence: str) -> None:
                note(sentence)
                told.append(sentence)
                tell(sentence)

            def after(done: int, metrics: Mapping[str, Any]) -> None:
                shown = (f"{name} {value:.5g}" for name, value in metrics.items() if isinstance(value, float))
                note(f"epoch {done} of {run.epochs}: {', '.join(shown)}")
                each_epoch(done, metrics)

            device = self.options.get("device") or "auto"
            ended, failed, begin = False, None, time.perf_counter()
            try:
                note(f"process {os.getpid()} on {platform.node()}, device {device}: {state_of(run, self.out)}")
                ended = self._finish(after, say)
                note(f"{state_of(run, self.out)}, in {time.perf_counter() - begin:.3f} s")
            except BaseException as error:
                note("".join(traceback.format_exception(error)))
                if not isinstance(error, Exception) or is_of_stream(error):
                    raise
                failed = message_of(error)
        return Outcome(ended, tuple(told), failed)

    def _finish(self, each_epoch: EachEpoch, tell: Callable[[str], None]) -> bool:
        run, state = self.run, state_of(self.run, self.out)
        if state.ended:
            return True
        initial = (
            None if run.init is None or state.epochs else self.out / run.init
        )  # one that continues needs it no more
        if initial is not None and not (initial / NETWORK).exists():
            how = "diverged" if (initial / DIVERGED).exists() else "is not finished"
            tell(f"{state.path.name} is skipped for now: it begins with {run.init}, which {how}")
            return False
        if run.compile:
            # graphs of earlier runs count against torch's limit of 8 for a function, and are not the fastest for this
            torch.compiler.reset()
        try:
            fit(run, state.path, init=initial, each_epoch=each_epoch, tell=tell, **self.options)
        except RunLocked:
            tell(f"{state.path.name} is skipped for now: another process is training it")
            return False
        except Diverged:
            pass  # it is recorded in the directory
        return True


def is_of_stream(error: Exception) -> bool:
    """Return whether an error is of a stream that nobody reads any more: it ends all runs."""
    return isinstance(error, OSError) and error.filename is None


def message_of(error: Exception) -> str:
    """Return the message of an error, and its kind if it is not one of ours."""
    return str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"


def train_in_worker(job: RunJob) -> Outcome:
    """Train a run in a process that does nothing else meanwhile: what it prints is added to the log."""
    with _logging_to(job.log):
        return job.train(lambda *_: None, lambda sentence: None)  # the outcome has the sentences


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Add what this process prints to a file, also what libraries in C print."""
    with _appending(path) as log, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        for number in (1, 2):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            os.dup2(log.fileno(), number)
        yield


def _appending(path: Path) -> TextIO:
    with usable(path.parent, "a run"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", buffering=1, encoding="utf-8")
