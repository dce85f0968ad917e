"""Write a run directory during training, and resume from its checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...common.checks import check_number
from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from ..common.files import (
    load_torch,
    locked,
    read_bytes,
    read_json,
    reading,
    refuse_other_files,
    remove_drafts,
    save_tensors,
    usable,
    write,
    write_json,
    write_json_lines,
)
from ..config import Run
from ..tasks import task_class
from . import run_dir
from .distributed import DistributedContext
from .environment import environment_info
from .run_dir import RunDir, check_settings, network_identity, run_dir_name
from .trainer import Trainer

IDENTITY = "identity.json"
CHECKPOINT_EVERY = 60.0  # seconds: writing takes as long as a third of a short epoch


class RunWriter(RunDir):
    """Write a run directory, which stays locked until the end of the block.

    Args:
        path: created if it does not exist, and removed again if the run ends before anything is written. A directory
            with another run or with other files raises a BsamError and is not changed. None writes nothing.
        run: the settings.
        context: the processes of the run; only the first one writes.
        checkpoint_every: the minimum time between two checkpoints, in seconds.
        about: what the run is, for ``run.json``; None writes none.
    """

    def __init__(
        self,
        path: str | Path | None,
        run: Run,
        context: DistributedContext,
        checkpoint_every: float,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path or "")
        self._about = about
        self._every = check_number("checkpoint_every", checkpoint_every, low=0)
        self.checkpoint = ""  #: the epoch, and perhaps the step, of the checkpoint; empty if there is none
        self.settings, self._context = run.settings(), context
        self._run = run
        self._kind = type(run.task)
        self._reads, self._writes = path is not None, path is not None and context.is_main
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RunWriter:
        if self._writes:
            require_package("safetensors", "train")  # before the first epoch, not after the last
            with usable(self.path, "a run"):
                if (self.path / run_dir.CONFIG).exists():
                    check_settings(self.path, self.run(self._kind).settings(), self.settings)
                elif self.path.exists():
                    refuse_other_files(self.path, (run_dir.LOG,))
            self._stack.enter_context(locked(self.path, "training"))
            remove_drafts(self.path, kept=run_dir.ABOUT)  # a report may write that one meanwhile
        self._context.barrier()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has_checkpoint(self) -> bool:
        """Return whether an earlier call wrote a checkpoint."""
        return self._reads and super().has_checkpoint()

    def resume(
        self, trainer: Trainer, network: Path | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Load the checkpoint, if there is one, and return the metrics and the probe's readings so far.

        Args:
            trainer: gets the state of the checkpoint.
            network: the file with the trained network of another run that a new run starts from.
        """
        epochs, readings = [], []
        if self.has_checkpoint():
            hint = "remove it to train from the start, or choose another folder"
            with reading(self.path / run_dir.CHECKPOINT, hint):  # also fails for a checkpoint of another network
                state = load_torch(read_bytes(self.path / run_dir.CHECKPOINT), self._context.device)
                trainer.load_state_dict(state)
                epochs, readings = state["epochs"], state["readings"]
        elif self._reads and (self.path / run_dir.NETWORK).exists():
            raise BsamRuntimeError(
                f"{self.path} has {run_dir.NETWORK} but no {run_dir.CHECKPOINT} to continue from: remove "
                f"{run_dir.NETWORK} to train from the start, or choose another folder"
            )
        if self._writes:
            self._begin(trainer, network, epochs, readings)
        self._note_checkpoint(trainer, epochs)
        return epochs, readings

    def _begin(
        self, trainer: Trainer, network: Path | None, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]
    ) -> None:
        """Write the settings, the digests of data and initial network, the machine, and the metrics so far.

        The metrics are written again because a killed process may have written those of later epochs. Raise if the task
        or the data has changed.
        """
        task, file = trainer.task, self.path / IDENTITY
        events = self.path / "tensorboard"
        if events.is_symlink() or (events.exists() and not events.is_dir()):  # old events are removed from it
            raise BsamRuntimeError(f"{events} is not a folder, which TensorBoard needs: remove it to continue")
        identity: dict[str, Any] = {"task": task.identity(self._run), "data": task.fingerprint()}
        before = identity
        if self.has_checkpoint() and file.exists():
            before = read_json(file, dict, "remove it to continue", identity)
        if before["task"] != identity["task"]:
            check_settings(self.path, {"task": before["task"]}, {"task": identity["task"]})
        if before["data"] != identity["data"]:
            raise BsamRuntimeError(
                f"the data has changed since the run in {self.path} began: restore it, or choose another folder"
            )
        initial = before.get("init") if network is None else network_identity(network)
        if initial is not None:
            identity["init"] = initial
        execution = {"processes": self._context.size, "compiled": trainer.compiled, "captured": trainer.captured}
        machine = {**environment_info(self._context.device), **execution}
        write_json(self.path / run_dir.CONFIG, self.settings)
        if self._about is not None:
            write_json(self.path / run_dir.ABOUT, dict(self._about))
        write_json(file, {**identity, "eval_samples": task.eval_samples})
        write_json(self.path / run_dir.MACHINES, [*self.machines(), machine])
        for name, value in task.notes().items():
            write_json(self.path / f"{name}.json", value)
        (self.path / run_dir.DIVERGED).unlink(missing_ok=True)
        self._events: Events | None = None
        if find_spec("tensorboard") is not None:
            self._events = Events(events, self.settings)
            self._stack.callback(self._events.writer.close)
            for metrics in epochs:  # again, because the events of a killed process may be truncated
                self._events.add(metrics)
        self._write_metrics(epochs, readings)

    def save(
        self, trainer: Trainer, epochs: list[dict[str, Any]], readings: list[dict[str, Any]], is_last: bool
    ) -> None:
        """Write all metrics and readings after an epoch, and a checkpoint if one is due or this is the last epoch."""
        if self._writes:
            due = is_last or time.monotonic() - self._checkpoint_time >= self._every
            if due:
                self._write_checkpoint(trainer, epochs, readings)
            if self._events is not None:
                self._events.add(epochs[-1])
            self._write_metrics(epochs, readings)
        self._context.barrier()

    def save_checkpoint(self, trainer: Trainer, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        """Write a checkpoint in the middle of an epoch."""
        if self._writes:
            self._write_checkpoint(trainer, epochs, readings)
        self._context.barrier()

    def _write_checkpoint(self, trainer: Trainer, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        buffer = io.BytesIO()
        torch.save({**trainer.state_dict(), "epochs": epochs, "readings": readings}, buffer)
        write(self.path / run_dir.CHECKPOINT, buffer.getbuffer())
        self._note_checkpoint(trainer, epochs)

    def _note_checkpoint(self, trainer: Trainer, epochs: list[dict[str, Any]]) -> None:
        self._checkpoint_time = time.monotonic()
        if trainer.steps_done:
            self.checkpoint = f"step {trainer.steps_done} of epoch {len(epochs) + 1}"
        elif epochs:
            self.checkpoint = f"epoch {len(epochs)}"

    def _write_metrics(self, epochs: list[dict[str, Any]], readings: list[dict[str, Any]]) -> None:
        write_json_lines(self.path / run_dir.METRICS, epochs)
        if readings:
            write_json_lines(self.path / run_dir.PROBE, readings)
        else:
            # a process that was killed before its first checkpoint may have left it
            (self.path / run_dir.PROBE).unlink(missing_ok=True)

    def record_divergence(self, reason: str) -> None:
        """Record that the run ended with a non-finite loss."""
        if self._writes:
            write_json(self.path / run_dir.DIVERGED, {"reason": reason})

    def finish(
        self,
        network: nn.Module,
        flatness: Mapping[str, Any],
        predictions: Mapping[str, NDArray[Any]],
        files: Mapping[str, bytes],
    ) -> None:
        """Write the results after the last epoch, and finally the network, which marks the run as finished.

        Args:
            network: the trained network.
            flatness: what was measured of it, without the digest of its weights; empty if nothing was.
            predictions: arrays of the task, by name.
            files: further files, by name; TensorBoard shows the PNG files.
        """
        if not self._writes:
            return
        tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
        content = save_tensors(tensors, {"run": json.dumps(self.settings)})
        if flatness:
            key = {"run_dir": run_dir_name(self._run), "sha256": hashlib.sha256(content).hexdigest()}
            stored = {"settings": {"images": flatness["samples"]}, "models": [{**key, **flatness}]}
            write_json(self.path / run_dir.FLATNESS, stored)
        if predictions:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **predictions)  # type: ignore[arg-type] # any name is allowed
            write(self.path / run_dir.PREDICTIONS, buffer.getvalue())
        for name, data in files.items():
            write(self.path / name, data)
        if self._events is not None:
            self._events.finish(files)
        write(self.path / run_dir.NETWORK, content)


def _metric(settings: Mapping[str, Any]) -> str:
    """Return the name of the score of a run; empty if its task is passed to ``fit`` alone."""
    try:
        return task_class(settings["task"]).score.metric(settings["eval_split"])
    except BsamValueError:
        return ""


class Events:
    """Write the TensorBoard events of a run, after removing older ones from the folder.

    Args:
        folder: the folder for the events.
        settings: the settings of the run, shown as hyperparameters with the task's measure as their metric.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(folder)
        self._epoch = 0
        flat = {**settings, **settings["base_arguments"], **settings["arguments"]}
        measure = _metric(settings)
        shown = {
            # protobuf rejects surrogates, which stand for undecodable bytes of a path
            name: value if isinstance(value, (bool, int, float)) else str(value).encode("utf-8", "replace").decode()
            for name, value in flat.items()
            if value is not None and name not in ("arguments", "base_arguments")
        }
        # add_hparams would write them to a second folder, which TensorBoard shows as another run
        *start, self._end = hparams(shown, {measure: 0.0} if measure else {})
        for summary in start:
            self.writer._get_file_writer().add_summary(summary)
        self.writer.flush()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of an epoch, with the epoch as the step."""
        self._epoch = metrics["epoch"]
        for name, value in metrics.items():
            if name != "epoch" and isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, self._epoch)
        self.writer.flush()

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add the PNG files, and mark the run as finished."""
        for name in (name for name in files if name.endswith(".png")):
            from PIL import Image

            pixels = np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB"))
            self.writer.add_image(Path(name).stem, pixels, self._epoch, dataformats="HWC")
        self.writer._get_file_writer().add_summary(self._end)
        self.writer.flush()
