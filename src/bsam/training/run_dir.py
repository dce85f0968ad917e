"""The directory of one run: its name, the state of the run, and the contents of its files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.errors import BsamError, BsamRuntimeError, BsamValueError
from ..data import FOLDER, dataset_entry
from ..flatness.probe import Reading
from ..flatness.sharpness import Sharpness
from ..models.weights import WeightsReport
from ..tasks import TASKS
from ..tasks.image_inputs import Inputs
from ..tasks.pose_inputs import PoseInputs
from .config import BASE, Run, check_settings
from .files import fits, read_arrays, read_bytes, read_json, read_json_lines
from .result import LossSurface
from .run_state import RunState

CONFIG, METRICS, PROBE, MACHINES = "config.json", "metrics.jsonl", "probe.jsonl", "environment.json"
CHECKPOINT, PREVIOUS, NETWORK = "checkpoint.pt", "checkpoint-before.pt", "model.safetensors"
CHECKSUMS, CURVATURE, DIVERGED = "checksums.json", "curvature.json", "diverged.json"
PREDICTIONS = "predictions.npz"
LOG = "log.txt"
REPAIR = "run the command that trained it again to restore the file from the checkpoint"
_METRIC_TYPES: dict[str, Any] = {"epoch": int, "sharpness": Sharpness | None}  # all others are floats
_NOTES: dict[str, Any] = {
    "data": {"split": str, "images": dict[str, int], "left_out": list[str]},
    "inputs": Inputs,
    "weights": WeightsReport,
    "pose": PoseInputs,
    "baseline": {"title": str, "scores": dict[str, float]},
}
_MACHINE = ("device", "torch", "bsam", "date")  # of a machine's description, what a report needs


def run_dir_name(run: Run) -> str:
    """Return a name that describes the run and is unique: it ends in a digest of all settings that are not defaults.

    Example:
        >>> run_dir_name(
        ...     Run(
        ...         "bsam",
        ...         {"passes": 2},
        ...         model="resnet18",
        ...         data="cifar10",
        ...         label_noise=0.4,
        ...         seed=1,
        ...     )
        ... )
        'resnet18-cifar10-bsam-passes2-noise40-seed1-69df74c7'
    """
    default = _default_settings(run.method)  # a setting that Run gets in a later version leaves the names as they are
    chosen = {name: value for name, value in run.settings().items() if name == "method" or value != default[name]}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    arguments = (re.sub(r"[^\w.]+", "_", f"{name}{json.dumps(run.arguments[name])}") for name in run.arguments)
    noise = [f"noise{100 * run.label_noise:g}"] if run.label_noise else []
    method = run.base if run.method == BASE else run.method
    named = run.model, dataset_entry(run.data).title if run.data.startswith(FOLDER) else run.data
    model, data = (re.sub(r"[^\w.]+", "_", name) for name in named)
    return "-".join([model, data, method, *arguments, *noise, f"seed{run.seed}", digest])


@cache
def _default_settings(method: str) -> Mapping[str, Any]:
    return Run(method).settings()


@dataclass(frozen=True)
class FileDigest:
    """SHA-256 and size of a file, by which damage is detected."""

    sha256: str
    size: int

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        """Return the digest of a file's content."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))


class RunDir:
    """Read the directory of a run.

    ``config.json`` has the settings, ``identity.json`` the task and a digest of the data, ``environment.json`` each
    machine that worked on it, ``metrics.jsonl`` a line per epoch, ``tensorboard/`` the same for TensorBoard,
    ``probe.jsonl`` the probe's readings, ``checkpoint.pt`` the state after the last epoch (and, until the run is
    finished, ``checkpoint-before.pt`` the state before), ``curvature.json`` the eigenvalue and the loss surface after
    the last epoch, ``model.safetensors`` the trained network, ``predictions.npz`` what it says of some samples, and
    ``checksums.json`` the SHA-256 and the size of checkpoints and network. Other files hold notes of the task: of
    classification ``flipped.json``, ``data.json``, ``inputs.json`` and ``weights.json``; of pose ``data.json``,
    ``pose.json``, ``baseline.json`` and ``weights.json``. ``bsam train`` adds ``classes.md``, ``confusion.png`` and
    ``mistakes.png`` to a run of classification. Each file is written completely or not at all, but for
    ``log.txt``, to which ``bsam run`` adds epochs, messages and errors. A damaged file raises a BsamRuntimeError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def run(self) -> Run:
        """Return the settings."""
        try:
            settings = read_json(self.path / CONFIG, dict, "choose another folder, or remove that one")
            if unknown := settings.keys() - {field.name for field in fields(Run)}:
                names = f"unknown settings: {', '.join(sorted(unknown))}"
                raise BsamRuntimeError(
                    f"it is of another version of bsam, or of another program ({names}): choose another folder"
                )
            return Run(**settings)
        except (BsamError, TypeError) as error:
            raise BsamRuntimeError(f"{self.path} is not a run directory: {error}") from error

    def finished_run(self) -> Run:
        """Return the settings; raise if the directory does not hold a finished run."""
        if not (self.path / CONFIG).exists():
            raise BsamValueError(f"{self.path} is not a run directory of bsam train: it has no {CONFIG}")
        state = self.state(self.run())
        if state.damaged is not None:
            raise BsamRuntimeError(state.damaged)
        if not state.finished:
            raise BsamRuntimeError(
                f"the run in {self.path} is not finished ({len(state.epochs)} of {state.run.epochs} epochs are): run "
                "the command that started it again to continue"
            )
        return state.run

    def state(self, run: Run, *, verify: bool = False) -> RunState:
        """Return the state of the run; raise if the directory holds a run with other settings.

        Args:
            run: the run that the directory should hold.
            verify: whether to read all results of a finished run, and not only the metrics and the network's size.
        """
        if not (self.path / CONFIG).exists():
            return RunState(run, self.path)
        try:
            found = self.run()
        except BsamError as error:
            return RunState(run, self.path, damaged=str(error))
        check_settings(self.path, found.settings(), run.settings())
        epochs: list[dict[str, Any]] = []
        damaged, finished = None, (self.path / NETWORK).exists()
        try:
            epochs = self._metrics_of(run)
            if finished:
                self._check_results(verify)
        except BsamError as error:
            if isinstance(error.__cause__, OSError):
                raise
            finished, damaged = False, str(error)
        diverged = None if finished else self._divergence()
        return RunState(run, self.path, tuple(epochs), finished, diverged, damaged)

    def _metrics_of(self, run: Run) -> list[dict[str, Any]]:
        epochs = self.metrics()
        score = f"{run.eval_split}_{TASKS[run.task].measure.name}" if run.task in TASKS else "epoch"
        if epochs and epochs[-1].get(score) is None:
            raise BsamRuntimeError(f"{self.path / METRICS} is damaged: it has no {score}; {REPAIR}")
        return epochs

    def _check_results(self, verify: bool) -> None:
        self.last_metrics()
        if verify:
            self.weights()
            self.surface()
            return
        known = self.checksums().get(NETWORK)
        if known is None or known.size != (self.path / NETWORK).stat().st_size:
            raise BsamRuntimeError(f"{self.path / NETWORK} is damaged; {REPAIR}")

    def _divergence(self) -> str | None:
        file = self.path / DIVERGED
        if not file.exists():
            return None
        hint = "remove the file to continue the run after its last checkpoint"
        return str(read_json(file, dict, hint).get("reason", "diverged"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each finished epoch; none where there is no ``metrics.jsonl``."""
        file = self.path / METRICS
        if not file.exists():
            return []
        rows = read_json_lines(file, REPAIR)
        if rows and "memorised" in rows[-1]:  # epochs of an older version have none
            rows = [row if "memorised" in row else {**row, "memorised": None} for row in rows]
        types = {name: _METRIC_TYPES.get(name, float) for name in {"epoch", "seconds", *rows[0]}} if rows else {}
        intact = all(fits(row, types) and row["seconds"] is not None for row in rows)
        if not intact or [row["epoch"] for row in rows] != [*range(1, len(rows) + 1)]:
            raise BsamRuntimeError(f"{file} is damaged: it does not hold the same numbers of each epoch; {REPAIR}")
        return rows

    def last_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last epoch; raise if not all epochs are there."""
        found, epochs = self.metrics(), self.run().epochs
        if len(found) != epochs:
            raise BsamRuntimeError(f"{self.path / METRICS} does not hold the run's {epochs} epochs; {REPAIR}")
        return found[-1]

    def probe(self) -> list[dict[str, Any]]:
        """Return the probe's readings; a number that is not finite is None."""
        file, hint = self.path / PROBE, f"remove {NETWORK} beside it, then {REPAIR}"
        rows = read_json_lines(file, hint)
        if not fits(rows, list[Reading]):
            raise BsamRuntimeError(f"{file} is damaged: it does not hold all numbers of each step; {hint}")
        return rows

    def note(self, name: str) -> dict[str, Any]:
        """Return one of the files that a task writes, as ``data.json``, by name; an empty dict if it wrote none."""
        file, hint = self.path / f"{name}.json", f"remove {NETWORK} beside it, then {REPAIR}"
        if not file.exists():
            return {}
        found = read_json(file, dict, hint)
        if not fits(found, _NOTES[name]):
            raise BsamRuntimeError(f"{file} is damaged: it does not hold what the task wrote; {hint}")
        return found

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return what the network said of some samples, as its task wrote it; an empty dict if it wrote nothing."""
        file = self.path / PREDICTIONS
        return read_arrays(file, f"remove {NETWORK} beside it, then {REPAIR}") if file.exists() else {}

    def machines(self) -> list[dict[str, Any]]:
        """Return what is known of each machine that worked on the run, with dates."""
        file, hint = self.path / MACHINES, "remove the file to report without the machine that the run was on"
        if not file.exists():
            return []
        found = read_json(file, list, hint)
        if not all(isinstance(one, dict) and all(isinstance(one.get(name), str) for name in _MACHINE) for one in found):
            raise BsamRuntimeError(f"{file} is damaged: {' and '.join(_MACHINE)} are not in each entry; {hint}")
        return found

    def top_eigenvalue(self) -> float | None:
        """Return the largest eigenvalue of the Hessian after the last epoch; None if the run has none."""
        return self._curvature()["top_eigenvalue"]

    def surface(self) -> LossSurface | None:
        """Return the loss surface after the last epoch; None if the run has none."""
        found = self._curvature()["relief"]
        if found is None:
            return None
        rows = (tuple(math.nan if value is None else value for value in row) for row in found["loss"])
        return LossSurface(tuple(found["axis"]), tuple(rows))

    def _curvature(self) -> dict[str, Any]:
        file = self.path / CURVATURE
        if not file.exists():
            return {"top_eigenvalue": None, "relief": None}
        found = read_json(file, dict, REPAIR)
        if not fits(found, {"top_eigenvalue": float | None, "relief": LossSurface | None}) or not _is_square(found):
            raise BsamRuntimeError(f"{file} is damaged: it does not hold an eigenvalue and a loss surface; {REPAIR}")
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the trained network, by name."""
        from safetensors.torch import load

        file = self.path / NETWORK
        content = read_bytes(file)
        if FileDigest.of(content) != self.checksums().get(NETWORK):
            raise BsamRuntimeError(f"{file} is damaged: its checksum does not match checksums.json; {REPAIR}")
        return load(content)

    def load_into(self, network: nn.Module) -> nn.Module:
        """Load the trained network's weights into one of its architecture, and return it."""
        if not (self.path / NETWORK).exists():
            raise BsamRuntimeError(
                f"{self.path} has no {NETWORK}: the run is not finished. Continue it by `bsam train --out {self.path}` "
                "with the same settings"
            )
        try:
            network.load_state_dict(self.weights())
        except BsamError:
            raise
        except RuntimeError as error:
            raise BsamRuntimeError(
                f"{self.path / NETWORK} is not of the network that config.json names ({' '.join(str(error).split())}): "
                f"remove it, then {REPAIR}"
            ) from error
        return network

    def checksums(self) -> dict[str, FileDigest]:
        """Return the checksums of checkpoints and network, by file name."""
        try:
            found = json.loads((self.path / CHECKSUMS).read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        if fits(found, dict[str, FileDigest]):
            return {name: FileDigest(**one) for name, one in found.items()}
        if any((self.path / name).exists() for name in (CHECKPOINT, PREVIOUS, NETWORK)):
            raise BsamRuntimeError(
                f"{self.path / CHECKSUMS} is missing or damaged, so that checkpoints and network cannot be verified: "
                "restore it, or remove the directory to train the run again"
            )
        return {}


def _is_square(found: Mapping[str, Any]) -> bool:
    surface = found["relief"]
    return surface is None or {len(surface["loss"]), *map(len, surface["loss"])} == {len(surface["axis"])}
