"""Run directories: their names, their files, who reads and who writes them, and the state of a run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.errors import BsamError, BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from ..common.files import (
    MAX_ARRAYS,
    WrongContent,
    load_arrays,
    load_tensors,
    load_torch,
    locked,
    read_bytes,
    read_json,
    read_json_lines,
    reading,
    refuse_other_files,
    remove_drafts,
    save_tensors,
    usable,
    write,
    write_json,
    write_json_lines,
)
from ..common.names import is_own, known_object, names_given
from ..common.own_code import source_digest
from ..config import (
    BASE,
    DIGEST_NAMES,
    TASK_SETTINGS,
    Run,
    TaskSettings,
    default_settings,
    digest,
    settings_of_task,
)
from ..data import FOLDER, dataset_entry
from ..tasks import Task, data_of, describe_task, task_class, task_of
from .machine import DistributedContext, environment_info


class Training(Protocol):
    """What a run directory stores of a run, and where its state is loaded."""

    task: Task
    compiled: bool
    captured: bool
    epochs: list[dict[str, Any]]
    readings: list[dict[str, Any]]

    @property
    def progress(self) -> str:
        """The epoch, or the step of an epoch, that has been reached."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything that changes in training."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""


CONFIG = "config.json"
ABOUT = "run.json"
METRICS = "metrics.jsonl"
PROBE = "probe.jsonl"
MACHINES = "environment.json"
CHECKPOINT = "checkpoint.pt"
NETWORK = "model.safetensors"
IDENTITY = "identity.json"
FLATNESS = "flatness.json"
DIVERGED = "diverged.json"
PREDICTIONS = "predictions.npz"
TASK = "task"  # the note of a task of the user
LOG = "log.txt"
RERUN = "run the training command again, which restores it from the checkpoint"
OWN_CODE = ("task", "model", "method")  # the settings that may name code of the user, besides the data
OTHER_FOLDER = "choose another folder, or remove that one"
REPAIR = f"remove it and {NETWORK} (if there is one), then {RERUN}"


def run_dir_name(run: Run) -> str:
    """Return a unique name that describes the run; it ends in a digest of all settings that are not defaults.

    Example:
        >>> run_dir_name(
        ...     Run.of("bsam", {"passes": 2}, data="cifar10", label_noise=0.4, seed=1)
        ... )
        'digits_net-cifar10-bsam-passes2-noise40-all-seed1-2279fd3a'
    """
    settings = run.settings()
    arguments = (re.sub(r"[^\w.]+", "_", f"{name}{json.dumps(run.arguments[name])}") for name in run.arguments)
    tag = [run.task.tag] if run.task.tag else []
    method = run.base if run.method == BASE else re.sub(r"[^\w.]+", "_", run.method)
    end = digest(settings, {item.name: item.default for item in fields(run.task)})
    return "-".join([subject_name(run), method, *arguments, *tag, f"seed{run.seed}", end])


def subject_name(run: Run) -> str:
    """Return a name for the network and the data of a run, for folders.

    Example:
        >>> subject_name(Run("sgd", model="timm:resnet50", data="folder:/data/my pets"))
        'timm_resnet50-my_pets'
    """
    titles = run.model, dataset_entry(run.data).title if run.data.startswith(FOLDER) else run.data
    return "-".join(re.sub(r"[^\w.]+", "_", title) for title in titles)


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Args:
        run: the settings.
        path: the run directory.
        epochs: the metrics of each finished epoch.
        finished: whether all epochs are finished and the trained network is saved.
        diverged: the message of a run that ended with a non-finite loss; otherwise None.
        until: the epoch to train up to; None trains all.
        unreadable: why the directory cannot be read; otherwise None. Nothing else is then known.
        eval_samples: the number of samples that it is evaluated on; None if it is not known.
        chance: the score of the best constant answer; None if it is not known.
    """

    run: Run
    path: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None
    until: int | None = None
    unreadable: str | None = None
    eval_samples: int | None = None
    chance: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the run has finished, has diverged, or is trained up to ``until``."""
        return self.finished or self.stopped or self.diverged is not None

    @property
    def stopped(self) -> bool:
        """Whether the run is trained up to ``until``, which is not its end."""
        is_reached = self.until is not None and self.until <= len(self.epochs)
        return is_reached and not self.finished and self.diverged is None

    @property
    def left(self) -> int:
        """The number of remaining epochs."""
        return 0 if self.ended else max((self.until or self.run.epochs) - len(self.epochs), 0)

    def __str__(self) -> str:
        if self.unreadable is not None:
            return "unreadable"
        if self.diverged is not None:
            return "diverged"
        if self.finished:
            return "done"
        return f"epoch {len(self.epochs)} of {self.run.epochs}" if self.epochs else "missing"


class RunDir:
    """Read a run directory.

    ``config.json`` has the settings, ``run.json`` what the run is (experiment, row, ...), ``identity.json`` the task, a
    digest of the data, digests of the initial network (if it is that of another run), the number of samples that it is
    evaluated on and digests of the user's modules that the settings name, ``environment.json`` the machines that
    trained the run, ``metrics.jsonl`` a line per epoch, ``tensorboard/`` the same for TensorBoard, ``probe.jsonl`` the
    probe's readings, ``checkpoint.pt`` the state from which training resumes: after the last epoch, after an earlier
    one, or in the middle of one that a signal interrupted, ``flatness.json`` the largest eigenvalue and the loss
    surface of the trained network, ``model.safetensors`` its weights, and ``predictions.npz`` its outputs for some
    samples. The task writes notes: classification ``flipped.json``, ``labels.json``, ``data.json``, ``inputs.json`` and
    ``weights.json``; pose ``data.json``, ``pose.json``, ``baseline.json`` and ``weights.json``. For classification,
    ``bsam train`` adds ``classes.md``, ``confusion.html`` and ``mistakes.png``. Each file is written completely or not
    at all, except ``log.txt``, to which ``bsam run`` appends epochs, messages and errors. A damaged file raises a
    :class:`~bsam.lab.common.files.DamagedFile`; one that cannot be read now, for example because memory ran out,
    a :class:`~bsam.lab.common.files.ReadFailed`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def run(self, kind: type[TaskSettings] | None = None) -> Run:
        """Return the settings; ``kind`` is the class of the settings of your own task."""
        settings = read_json(self.path / CONFIG, dict, OTHER_FOLDER)
        name: Any = settings.get("task")
        note = self.note(TASK, keys=("settings", "presets", "score", "groups", "loss_title"))
        with reading(self.path / f"{TASK}.json", REPAIR):
            describe_task(name, note)
        is_known = kind is not None and kind.name == name
        if is_own(name) and not note and not is_known and known_object(name) is None:
            raise BsamRuntimeError(
                f"{self.path} has no {TASK}.json, which describes the task {name}: run the training command again, "
                "which writes it, or choose another folder"
            )
        try:
            return stored_run(settings, kind)
        except (BsamError, TypeError) as error:
            raise BsamRuntimeError(
                f"{self.path / CONFIG} is not a run of this version of bsam ({error}): choose another folder"
            ) from error

    def about(self) -> dict[str, Any] | None:
        """Return what the plan of the run says about it, such as its experiment and row; None if there is none."""
        file = self.path / ABOUT
        return read_json(file, dict, "remove it; the run is then described by its settings") if file.exists() else None

    def finished_run(self) -> Run:
        """Return the settings; raise if the directory does not hold a finished run."""
        if not (self.path / CONFIG).exists():
            raise BsamValueError(f"{self.path} is not a run directory of bsam train: it has no {CONFIG}")
        state = self.state()
        if not state.finished:
            raise BsamRuntimeError(
                f"the run in {self.path} is not finished ({len(state.epochs)} of {state.run.epochs} epochs): run the "
                "training command again to continue"
            )
        return state.run

    def state(self, run: Run | None = None, until: int | None = None) -> RunState:
        """Return the state of the run; raise if the directory holds a run with other settings.

        Args:
            run: the settings; None takes the stored ones.
            until: the epoch that it is trained up to; None trains all.
        """
        if run is not None and not (self.path / CONFIG).exists():
            return RunState(run, self.path, until=until)
        stored = self.run(None if run is None else type(run.task))
        if run is None:
            run = stored
        check_settings(self.path, stored.settings(), run.settings())
        epochs = self.metrics()
        diverged = None
        samples = None
        chance = None
        finished = len(epochs) == run.epochs and (self.path / NETWORK).exists()
        if not finished and (self.path / DIVERGED).exists():
            diverged = str(read_json(self.path / DIVERGED, dict, "remove it to continue the run", ["reason"])["reason"])
        if run.eval_split != "test":  # whoever reads the results of tuning asks for it
            with contextlib.suppress(BsamRuntimeError):  # damaged: another run may tell
                samples = self.note("identity").get("eval_samples")
                chance = task_of(run).guess(run, self.note)
        return RunState(run, self.path, tuple(epochs), finished, diverged, until, None, samples, chance)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each finished epoch; an empty list if there is no ``metrics.jsonl``."""
        file = self.path / METRICS
        if not file.exists():
            return []
        rows = read_json_lines(file, REPAIR, ["epoch", "seconds"])
        with reading(file, REPAIR):
            for name, value in (item for row in rows for item in row.items()):
                if name != "sharpness" and not isinstance(value, (int, float, NoneType)):
                    raise WrongContent(f"{name} is no number")
        return rows

    def last_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last finished epoch."""
        return self.metrics()[-1]

    def probe(self) -> list[dict[str, Any]]:
        """Return the probe's readings, if there are any; non-finite numbers are None."""
        file = self.path / PROBE
        return read_json_lines(file, REPAIR) if file.exists() else []

    def note(self, name: str, hint: str = REPAIR, keys: Iterable[str] = ()) -> dict[str, Any]:
        """Return a note of the task, or another JSON file (``"data"`` reads ``data.json``); empty if it is missing.

        Args:
            name: the name of the file, without ``.json``.
            hint: what to do if it is damaged.
            keys: keys without which it is damaged.
        """
        file = self.path / f"{name}.json"
        return read_json(file, dict, hint, keys) if file.exists() else {}

    def parsed(self, name: str, parse: Callable[[dict[str, Any]], Any], hint: str = REPAIR) -> Any:
        """Return what a function makes of a note; None if it is missing. A note that the function cannot read is
        damaged; ``hint`` says what to do then.
        """
        note = self.note(name, hint)
        with reading(self.path / f"{name}.json", hint):
            return parse(note) if note else None

    def changed_modules(self, run: Run, roles: Collection[str] = OWN_CODE) -> str:
        """Return the names of the user's modules whose source has changed since the run began, in words; empty if none
        has. Nothing is imported: of a module that is not, and of one without a source file, this is not known.

        Args:
            run: the settings.
            roles: what the modules define.
        """
        name = IDENTITY.removesuffix(".json")
        before = self.parsed(name, lambda note: dict(note.get("modules", {})), "remove it to continue") or {}
        now = _module_digests(run, roles)
        return " and ".join(module for module in now if before.get(module, now[module]) != now[module])

    def stale_code(self, run: Run) -> str | None:
        """Return a warning if the code of the trained network or of its task has changed; otherwise None."""
        changed = self.changed_modules(run, ("task", "model"))
        if not changed:
            return None
        return (
            f"The code of {changed} has changed since the run in {self.path} was trained: the network may compute "
            "something else than the trained one. Restore the code, or train again."
        )

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return the network's outputs for some samples, as the task saved them; an empty dict if there are none."""
        file = self.path / PREDICTIONS
        if not file.exists():
            return {}
        with reading(file, REPAIR):
            return load_arrays(read_bytes(file, MAX_ARRAYS))

    def machines(self) -> list[dict[str, Any]]:
        """Return a description of each machine that trained the run, with dates."""
        file = self.path / MACHINES
        hint = "remove it; the machines will not be reported"
        return read_json(file, list, hint, ["device", "torch", "bsam", "date"]) if file.exists() else []

    def flatness(self) -> list[dict[str, Any]]:
        """Return what was measured after the last epoch, as entries of ``flatness.json``; empty if nothing was."""
        file = self.path / FLATNESS
        return read_json(file, dict, REPAIR, ["models"])["models"] if file.exists() else []

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the trained network, by name."""
        with reading(self.path / NETWORK, f"remove it, then {RERUN}"):
            return load_tensors(read_bytes(self.path / NETWORK))[0]

    def load_into(self, network: nn.Module) -> nn.Module:
        """Load the trained weights into a network of the same architecture, and return it."""
        weights = self.weights()
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise BsamRuntimeError(
                f"{self.path / NETWORK} does not match the network in {CONFIG} ({' '.join(str(error).split())}): "
                f"remove it, then {RERUN}"
            ) from error
        return network


class RunWriter(RunDir):
    """Write a run directory, which stays locked until the stack is closed.

    Args:
        path: created if it does not exist, and removed again if the run ends before anything is written. A directory
            with another run or with other files raises a BsamError and is not changed. None writes nothing.
        run: the settings.
        context: the processes of the run; only the first one writes.
        checkpoint_every: the minimum time between two checkpoints, in seconds.
        stack: is closed at the end of the run.
        about: what the run is, for ``run.json``; None writes none.
    """

    def __init__(
        self,
        path: str | Path | None,
        run: Run,
        context: DistributedContext,
        checkpoint_every: float,
        stack: contextlib.ExitStack,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path or "")
        self.checkpoint = ""  #: the epoch, and perhaps the step, of the checkpoint; empty if there is none
        self._run = run
        self._context = context
        self._every = checkpoint_every
        self._about = about
        self._reads = path is not None
        self._writes = path is not None and context.is_main
        self._events: Events | None = None
        self._stack = stack
        if self._writes:
            require_package("safetensors", "train")  # before the first epoch, not after the last
            with usable(self.path, "a run"):
                if (self.path / CONFIG).exists():
                    check_settings(self.path, self.run(type(run.task)).settings(), run.settings())
                elif self.path.exists():
                    # a killed process may have left the description of the task, which is written first
                    first = (f"{TASK}.json",) if is_own(run.task.name) else ()
                    refuse_other_files(self.path, (LOG, *first))
            stack.enter_context(locked(self.path, "training"))
            remove_drafts(self.path, kept=ABOUT)  # a report may write that one meanwhile
        if context.size > 1:
            context.barrier()
        #: whether no earlier call wrote a checkpoint
        self.is_new = not (self._reads and (self.path / CHECKPOINT).exists())

    def resume(self, trainer: Training, initial: Path | None = None) -> None:
        """Load the checkpoint, if there is one, and write what is known before the first epoch of this call.

        Args:
            trainer: gets the state of the checkpoint.
            initial: the file with the trained network of another run that a new run starts from.
        """
        if not self.is_new:
            hint = "remove it to train from the start, or choose another folder"
            with reading(self.path / CHECKPOINT, hint):  # also fails for a checkpoint of another network
                trainer.load_state_dict(load_torch(read_bytes(self.path / CHECKPOINT), self._context.device))
        elif self._reads and (self.path / NETWORK).exists():
            raise BsamRuntimeError(
                f"{self.path} has {NETWORK} but no {CHECKPOINT} to continue from: remove {NETWORK} to train from the "
                "start, or choose another folder"
            )
        if self._writes:
            self._begin(trainer, initial)
        self._checkpoint_time = time.monotonic()
        self.checkpoint = trainer.progress

    def _begin(self, trainer: Training, initial: Path | None) -> None:
        """Write the settings, the digests of data and initial network, the machine, and the metrics so far.

        The metrics are written again because a killed process may have written those of later epochs. Raise if the data
        has changed.
        """
        task = trainer.task
        file = self.path / IDENTITY
        events = self.path / "tensorboard"
        if events.is_symlink() or (events.exists() and not events.is_dir()):  # old events are removed from it
            raise BsamRuntimeError(f"{events} is not a folder, which TensorBoard needs: remove it to continue")
        identity: dict[str, Any] = {"task": task.identity or self._run.task.name, "data": task.fingerprint()}
        before = identity
        if not self.is_new and file.exists():
            before = read_json(file, dict, "remove it to continue", identity)
        if before["data"] != identity["data"]:
            raise BsamRuntimeError(
                f"the data has changed since the run in {self.path} began: restore it, or choose another folder"
            )
        of_initial = before.get("init") if initial is None else network_identity(initial)
        if of_initial is not None:
            identity["init"] = of_initial
        execution = {"processes": self._context.size, "compiled": trainer.compiled, "captured": trainer.captured}
        machine = {**environment_info(self._context.device), **execution}
        notes = dict(task.notes())
        if TASK in notes:  # first, because nobody can read the settings without it
            write_json(self.path / f"{TASK}.json", notes.pop(TASK))
        write_json(self.path / CONFIG, self._run.settings())
        if self._about is not None:
            write_json(self.path / ABOUT, dict(self._about))
        identity["eval_samples"] = task.eval_samples
        if any(is_own(name) for name in (self._run.task.name, self._run.model, self._run.method)):
            modules = _module_digests(self._run)
            if modules:
                identity["modules"] = modules
        write_json(file, identity)
        write_json(self.path / MACHINES, [*self.machines(), machine])
        for name, value in notes.items():
            write_json(self.path / f"{name}.json", value)
        (self.path / DIVERGED).unlink(missing_ok=True)
        if find_spec("tensorboard") is not None:
            self._events = Events(events, self._run)
            self._stack.callback(self._events.writer.close)
            for metrics in trainer.epochs:  # again, because the events of a killed process may be truncated
                self._events.add(metrics)
        self._write_metrics(trainer)

    def save(self, trainer: Training, is_last: bool) -> None:
        """Write all metrics and readings after an epoch, and a checkpoint if one is due or this is the last epoch."""
        if self._writes:
            if is_last or time.monotonic() - self._checkpoint_time >= self._every:
                self._write_checkpoint(trainer)
            if self._events is not None:
                self._events.add(trainer.epochs[-1])
            self._write_metrics(trainer)
        if self._context.size > 1:
            self._context.barrier()

    def save_checkpoint(self, trainer: Training) -> None:
        """Write a checkpoint in the middle of an epoch."""
        if self._writes:
            self._write_checkpoint(trainer)
        if self._context.size > 1:
            self._context.barrier()

    def _write_checkpoint(self, trainer: Training) -> None:
        buffer = io.BytesIO()
        torch.save(trainer.state_dict(), buffer)
        write(self.path / CHECKPOINT, buffer.getbuffer())
        self._checkpoint_time = time.monotonic()
        self.checkpoint = trainer.progress

    def _write_metrics(self, trainer: Training) -> None:
        write_json_lines(self.path / METRICS, trainer.epochs)
        if trainer.readings:
            write_json_lines(self.path / PROBE, trainer.readings)
        else:
            # a process that was killed before its first checkpoint may have left it
            (self.path / PROBE).unlink(missing_ok=True)

    def record_divergence(self, reason: str) -> None:
        """Record that the run ended with a non-finite loss."""
        if self._writes:
            write_json(self.path / DIVERGED, {"reason": reason})

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
        content = save_tensors(tensors, {"run": json.dumps(self._run.settings())})
        if flatness:
            key = {"run_dir": run_dir_name(self._run), "sha256": hashlib.sha256(content).hexdigest()}
            stored = {"settings": {"images": flatness["samples"]}, "models": [{**key, **flatness}]}
            write_json(self.path / FLATNESS, stored)
        if predictions:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **predictions)  # type: ignore[arg-type] # any name is allowed
            write(self.path / PREDICTIONS, buffer.getvalue())
        for name, data in files.items():
            write(self.path / name, data)
        if self._events is not None:
            self._events.finish(files)
        write(self.path / NETWORK, content)


class Events:
    """Write the TensorBoard events of a run, after removing older ones from the folder.

    Args:
        folder: the folder for the events.
        run: the run, whose settings are shown as hyperparameters with the task's score as their metric.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(folder)
        self._epoch = 0
        settings = run.settings()
        flat = {**settings, **settings["base_arguments"], **settings["arguments"]}
        metric = task_class(run.task.name).score.metric(run.eval_split)
        shown = {
            # protobuf rejects surrogates, which stand for undecodable bytes of a path
            name: value if isinstance(value, (bool, int, float)) else str(value).encode("utf-8", "replace").decode()
            for name, value in flat.items()
            if value is not None and name not in ("arguments", "base_arguments")
        }
        # add_hparams would write them to a second folder, which TensorBoard shows as another run
        *start, self._end = hparams(shown, {metric: 0.0})
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


def _module_digests(run: Run, roles: Collection[str] = OWN_CODE) -> dict[str, str]:
    """Return digests of the source files of the user's modules that a run names, if they are imported."""
    functions = task_of(run).functions(run) | {"method"}
    names = {"task": run.task.name, "model": run.model, "method": run.method}
    modules = {names[role].partition(":")[0] for role in roles if role in functions and is_own(names[role])}
    digests = {module: source_digest(module) for module in sorted(modules)}
    return {module: digest for module, digest in digests.items() if digest is not None}


def stored_run(settings: Mapping[str, Any], kind: type[TaskSettings] | None = None) -> Run:
    """Return the run with stored settings, without presets for those that an older version did not have.

    Runs stored without ``noise_labels`` drew labels from the other classes; older versions stored the settings of all
    tasks with each run.

    Args:
        settings: from :meth:`Run.settings`.
        kind: the settings of a task of the user; other tasks are known by name.
    """
    if "method" not in settings:
        raise BsamValueError("the method is missing")
    name = settings.get("task", Run.task.name)
    if kind is None or kind.name != name:
        kind = settings_of_task(name)
    now = {former: name for name, former in DIGEST_NAMES.items()}
    stored = {now.get(name, name): value for name, value in settings.items()}
    before = {"noise_labels": "other"} if settings.get("label_noise") else {}
    defaults = default_settings(kind)
    of_others = {item.name for other in TASK_SETTINGS.values() for item in fields(other)} - defaults.keys()
    merged = {**defaults, **before, **stored, "task": kind}
    return Run.of(**{name: value for name, value in merged.items() if name not in of_others})


def check_settings(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise if a folder holds results with other settings."""
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differing:
        differences = "; ".join(f"{name} {theirs.get(name)} there, {ours.get(name)} here" for name in differing)
        raise BsamValueError(
            f"{folder} holds results with other settings ({differences}): use the same settings, choose another "
            "folder, or remove that one"
        )


def check_named(
    run: Run,
    folder: Path,
    data: Collection[Any] | None = (),
    models: Collection[Any] = (),
    tasks: Collection[str] = (),
) -> None:
    """Raise if the task, the data or the network of a stored run is code that the user does not name, too.

    A run directory may come from others, and to call the function is to run any code that is installed here.

    Args:
        run: the settings in the run directory.
        folder: the run directory.
        data: the data sets that the user names, or gives as functions; None if the data of the run is not needed.
        models: the networks that the user names, or gives as functions or classes.
        tasks: the tasks that the user names, which are imported then.
    """
    functions = task_of(run).functions(run)
    if "task" in functions and run.task.name not in tasks:
        raise BsamValueError(
            f"the run in {folder} has the task {run.task.name}, a name from its files: if you trust that module, add "
            f"--task {run.task.name}"
        )
    if "data" in functions and data is not None and run.data not in names_given(data, "data"):
        raise BsamValueError(
            f"the data of the run in {folder} is the function {run.data}, which is called only if you name it, too: "
            f"if you trust it, add --data {run.data}"
        )
    if "model" in functions and run.model not in names_given(models, "model"):
        raise BsamValueError(
            f"the network of the run in {folder} is the function {run.model}, which is called only if you name it, "
            f"too: if you trust it, add --model {run.model}"
        )


def check_all_used(
    runs: Mapping[Path, Run],
    data: Collection[Any] = (),
    models: Collection[Any] = (),
    tasks: Collection[str] = (),
) -> None:
    """Raise if the user names a task, data or a network that none of these runs has.

    Args:
        runs: the stored settings, by run directory.
        data, models, tasks: as for :func:`check_named`, which comes first.
    """
    of_runs = {
        "task": (tasks, [run.task.name for run in runs.values()]),
        "data": (data, [run.data for run in runs.values()]),
        "model": (models, [run.model for run in runs.values()]),
    }
    for role, (given, stored) in of_runs.items():
        for name in names_given(given, role):
            if name not in stored:
                words = f"none of the runs has the {role} {name}"
                if len(runs) == 1:
                    words = f"the run in {next(iter(runs))} has the {role} {stored[0]}, not {name}"
                raise BsamValueError(f"{words}: leave out --{role} {name}")


def network_identity(network: Path) -> dict[str, str]:
    """Return digests of the trained network of a run: of its file, and of how it was trained (without the seed).

    Args:
        network: the file, in the run directory.
    """
    run_dir = RunDir(network.parent)
    settings = run_dir.note("config")
    identity = run_dir.note("identity")
    names = {name: DIGEST_NAMES.get(name, name) for name in settings if name not in ("seed", "init", "surface")}
    training = {names[name]: settings[name] for name in names}
    if str(settings.get("data")).startswith(FOLDER):
        training["data"] = identity.get("data", settings["data"])
    training["init"] = identity.get("init", {}).get("training", settings.get("init"))
    with reading(network, RERUN):
        content = read_bytes(network)
    return {
        "network": hashlib.sha256(content).hexdigest(),
        "training": hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest(),
    }


def initial_network(run: Run, directory: Path) -> Path:
    """Return the file with the network that a run starts from.

    Raise a BsamError if the initial run is not finished or its network cannot be used for this run.

    Args:
        run: the settings.
        directory: the directory of the initial run.
    """
    directory = directory.expanduser()
    if not directory.is_dir():
        raise BsamValueError(f"there is no folder {directory}: --init must be a run directory of bsam train")
    initial = RunDir(directory).finished_run()
    if initial.model != run.model:
        raise BsamValueError(
            f"the run in {directory} trained {initial.model}, but this run trains {run.model}: set --model "
            f"{initial.model}, or choose another run for --init"
        )
    theirs = data_of(initial).classes
    ours = data_of(run).classes
    if None not in (theirs, ours) and theirs != ours:
        raise BsamValueError(
            f"the run in {directory} learned {theirs} classes ({initial.data}), but {run.data} has {ours}: start from "
            "a run with the same number of classes, or use --weights"
        )
    if reason := task_of(initial).not_initial(initial):
        raise BsamValueError(f"the run in {directory} {reason}")
    return directory / NETWORK
