"""Write a run directory during training, and continue from its checkpoint after an interruption."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from ..core.errors import BsamError, BsamRuntimeError
from ..core.extras import require_package
from .config import Run, check_settings
from .distributed import DistributedContext
from .environment import environment_info
from .events import Events
from .files import read_bytes, refuse_other_files, usable, write, write_arrays, write_json, write_json_lines, writing
from .lock import locked
from .run_dir import (
    CHECKPOINT,
    CHECKSUMS,
    CONFIG,
    CURVATURE,
    DIVERGED,
    LOG,
    MACHINES,
    METRICS,
    NETWORK,
    PREDICTIONS,
    PREVIOUS,
    PROBE,
    FileDigest,
    RunDir,
)
from .trainer import Trainer


class RunWriter(RunDir):
    """A run directory that is written during training, locked by one process at a time.

    The checkpoint of the epoch before the last is kept until the run is finished. A checkpoint is accepted if its
    digest is any of the recorded ones, since a process may be killed between writing checksums.json and renaming the
    files.

    Args:
        path: created if it does not exist. A directory of another run, or of something else, is refused and not
            changed. None: write nothing.
        run: the settings.
        context: the processes of the run, of which the first one writes.
        tell: called with a sentence for the user.
    """

    def __init__(
        self, path: str | Path | None, run: Run, context: DistributedContext, tell: Callable[[str], None]
    ) -> None:
        super().__init__(path or "")
        self.settings, self._context, self._tell = run.settings(), context, tell
        self._reads, self._writes = path is not None, path is not None and context.is_main
        self._stack = contextlib.ExitStack()
        self._checksums: dict[str, FileDigest] = {}  # of the intact checkpoints
        self._events_folder = self.path / "tensorboard"

    def __enter__(self) -> RunWriter:
        if self._writes:
            require_package("safetensors", "train")  # now, not after the last epoch
            with usable(self.path, "a run"), contextlib.ExitStack() as stack:
                self.path.mkdir(parents=True, exist_ok=True)
                self._check_settings()
                stack.enter_context(locked(self.path, "training"))
                self._check_settings()  # again: another process may have trained here meanwhile
                self._stack = stack.pop_all()
        self._context.barrier()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _check_settings(self) -> None:
        if (self.path / CONFIG).exists():
            check_settings(self.path, self.run().settings(), self.settings)
        else:
            refuse_other_files(self.path, (LOG,))

    def has_checkpoint(self) -> bool:
        """Return whether an epoch was finished before."""
        return self._reads and any((self.path / name).exists() for name in (CHECKPOINT, PREVIOUS))

    def resume(self, trainer: Trainer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Load the last checkpoint, if there is one, and return the metrics and the probe's readings so far."""
        state = self.checkpoint(self._context.device) if self._reads else None
        epochs, readings = ([], []) if state is None else (state["epochs"], state["readings"])
        if state is not None:
            try:
                trainer.load_state_dict(state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise BsamRuntimeError(
                    f"the checkpoint in {self.path} does not match this run: remove the folder, or choose another one. "
                    f"({error})"
                ) from error
        if self._writes:
            self._begin(trainer, epochs, readings)
        return epochs, readings

    def _begin(self, trainer: Trainer, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        """Write the settings, data and machine; and the metrics so far, which a killed process may not have written."""
        task = trainer.task
        identity = {"task": f"{type(task).__module__}.{type(task).__qualname__}", "data": task.fingerprint()}
        before = {**identity, **_read_json_or_empty(self.path / "identity.json", dict)} if epochs else identity
        if before["task"] != identity["task"]:
            check_settings(self.path, before, identity)
        if before["data"] != identity["data"]:
            raise BsamRuntimeError(
                f"the data has changed since the run in {self.path} began: restore it, or choose another run directory"
            )
        how = {"processes": self._context.size, "compiled": trainer.compiled, "captured": trainer.captured}
        machine = {**environment_info(self._context.device), **how}
        write_json(self.path / CONFIG, self.settings)
        write_json(self.path / "identity.json", identity)
        write_json(self.path / MACHINES, [*_read_json_or_empty(self.path / MACHINES, list), machine], durable=False)
        for name, value in task.notes().items():
            write_json(self.path / f"{name}.json", value)
        with writing(self.path / DIVERGED):
            (self.path / DIVERGED).unlink(missing_ok=True)
        self._events = self._start_events(epochs)
        self._write_metrics(epochs, readings)

    def checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """Return the state of the newest intact checkpoint; None where no epoch is finished."""
        existing = [name for name in (CHECKPOINT, PREVIOUS) if (self.path / name).exists()]
        known = self.checksums()
        for name in existing:
            try:
                content = read_bytes(self.path / name)
                state = _parse_checkpoint(self.path / name, content, set(known.values()), device)
            except BsamError as error:
                is_last = name == existing[-1]
                more = "There is no earlier checkpoint" if is_last else "Continuing from the previous checkpoint"
                self._tell(f"{error}. {more}.")
            else:
                self._checksums = {name: FileDigest.of(content)}
                return state
        if existing:
            names = " and ".join(existing)
            raise BsamRuntimeError(f"{self.path} has no intact checkpoint: remove {names} there to start again")
        if (self.path / NETWORK).exists():
            raise BsamRuntimeError(
                f"{self.path} contains {NETWORK} but no checkpoint, so damaged files cannot be restored: "
                f"remove {NETWORK} there to train from the start, or choose another folder. "
                f"If only {CURVATURE} is damaged, remove that file"
            )
        return None

    def save(self, trainer: Trainer, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        """Write the state after an epoch, with the metrics and the readings so far."""
        if self._writes:
            buffer = io.BytesIO()
            torch.save({**trainer.state_dict(), "epochs": epochs, "readings": readings}, buffer)
            self._write_checkpoint(buffer.getvalue())
            if self._events is not None:
                with writing(self._events_folder):
                    self._events.add(epochs[-1])
            self._write_metrics(epochs, readings)
        self._context.barrier()

    def _write_checkpoint(self, content: bytes) -> None:
        intact = self._checksums.get(CHECKPOINT)  # a damaged checkpoint must not replace the one before it
        previous = intact or self._checksums.get(PREVIOUS)
        self._checksums = {CHECKPOINT: FileDigest.of(content), **({PREVIOUS: previous} if previous else {})}
        self._write_checksums()
        if intact:
            with writing(self.path / CHECKPOINT):
                (self.path / CHECKPOINT).replace(self.path / PREVIOUS)
        write(self.path / CHECKPOINT, content)

    def _write_checksums(self) -> None:
        write_json(self.path / CHECKSUMS, {name: asdict(one) for name, one in self._checksums.items()})

    def _write_metrics(self, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        write_json_lines(self.path / METRICS, epochs, durable=False)
        if readings:
            write_json_lines(self.path / PROBE, readings, durable=False)

    def record_divergence(self, reason: str) -> None:
        """Record that the run ended with a non-finite loss."""
        if self._writes:
            write_json(self.path / DIVERGED, {"reason": reason})

    def finish(
        self,
        network: nn.Module,
        curvature: Mapping[str, Any] | None = None,
        predictions: Mapping[str, NDArray[Any]] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write what was measured after the last epoch, if anything, and the network, which marks a finished run.

        Args:
            network: the trained one.
            curvature: the eigenvalue and the loss surface.
            predictions: arrays of the task, by name.
            files: others, by name; TensorBoard gets the PNG files.
        """
        if not self._writes:
            return
        from safetensors.torch import save

        if curvature is not None:
            write_json(self.path / CURVATURE, curvature)
        if predictions:
            write_arrays(self.path / PREDICTIONS, predictions)
        for name, data in (files or {}).items():
            write(self.path / name, data)
        if self._events is not None:
            with writing(self._events_folder):
                self._events.finish(files or {})
        tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
        content = save(tensors, {"run": json.dumps(self.settings)})  # one entry: several are written in a random order
        with writing(self.path / PREVIOUS):
            (self.path / PREVIOUS).unlink(missing_ok=True)  # to save disk space
        self._checksums = {CHECKPOINT: self._checksums[CHECKPOINT], NETWORK: FileDigest.of(content)}
        self._write_checksums()
        write(self.path / NETWORK, content)

    def _start_events(self, epochs: list[dict[str, Any]]) -> Events | None:
        """Write TensorBoard's events again, where TensorBoard is installed."""
        if find_spec("tensorboard") is None:
            return None
        with writing(self._events_folder):
            events = self._stack.enter_context(Events(self._events_folder, self.settings))
            for metrics in epochs:
                events.add(metrics)
        return events


def _parse_checkpoint(path: Path, content: bytes, known: set[FileDigest], device: torch.device) -> dict[str, Any]:
    """Return the tensors and plain values of a checkpoint; nothing in it is executed."""
    if FileDigest.of(content) not in known:
        raise BsamRuntimeError(f"{path} is damaged: its checksum does not match checksums.json")
    try:
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise BsamRuntimeError(
            f"{path} cannot be loaded as a checkpoint (torch.load with weights_only=True failed)"
        ) from error


def _read_json_or_empty(file: Path, expected_type: type[Any]) -> Any:
    """Return the content of a JSON file; an empty dict or list, by type, where it is missing or damaged."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return expected_type()
    return content if isinstance(content, expected_type) else expected_type()
