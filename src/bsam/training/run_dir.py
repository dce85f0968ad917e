"""The directory of one run: its name, the state of the run, and the contents of its files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..common.errors import BsamError, BsamRuntimeError, BsamValueError
from ..data import FOLDER, dataset_entry
from .config import BASE, Run, check_settings
from .files import read_json, read_json_lines, reading
from .result import LossSurface

CONFIG, METRICS, PROBE, MACHINES = "config.json", "metrics.jsonl", "probe.jsonl", "environment.json"
CHECKPOINT, NETWORK, CURVATURE, DIVERGED = "checkpoint.pt", "model.safetensors", "curvature.json", "diverged.json"
PREDICTIONS = "predictions.npz"
LOG = "log.txt"
RERUN = "run the command that trained it again, which writes the file from the checkpoint"
REPAIR = f"remove it, and {NETWORK} beside it if there is one, then {RERUN}"


def run_dir_name(run: Run) -> str:
    """Return a name that describes the run and is unique: it ends in a digest of all settings that are not defaults.

    Example:
        >>> run_dir_name(Run("bsam", {"passes": 2}, data="cifar10", label_noise=0.4, seed=1))
        'digits_net-cifar10-bsam-passes2-noise40-seed1-e2096c1b'
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
class RunState:
    """The state of a run.

    Args:
        run: its settings.
        path: its directory.
        epochs: the metrics of the finished epochs.
        finished: whether the trained network is there, too.
        diverged: the message of a run that ended with a non-finite loss; else None.
    """

    run: Run
    path: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the run is finished or diverged."""
        return self.finished or self.diverged is not None

    @property
    def left(self) -> int:
        """The number of epochs that are left."""
        return 0 if self.ended else max(self.run.epochs - len(self.epochs), 0)

    def __str__(self) -> str:
        if self.diverged is not None:
            return "diverged"
        if self.finished:
            return "done"
        return f"epoch {len(self.epochs)} of {self.run.epochs}" if self.epochs else "missing"


class RunDir:
    """Read the directory of a run.

    ``config.json`` has the settings, ``identity.json`` the task and a digest of the data, ``environment.json`` each
    machine that worked on it, ``metrics.jsonl`` a line per epoch, ``tensorboard/`` the same for TensorBoard,
    ``probe.jsonl`` the probe's readings, ``checkpoint.pt`` the state after the last epoch, ``curvature.json`` the
    eigenvalue and the loss surface after the last epoch, ``model.safetensors`` the trained network, and
    ``predictions.npz`` its outputs for some samples. Other files hold notes of the task: of classification
    ``flipped.json``, ``data.json``, ``inputs.json`` and ``weights.json``; of pose ``data.json``, ``pose.json``,
    ``baseline.json`` and ``weights.json``. ``bsam train`` adds ``classes.md``, ``confusion.png`` and ``mistakes.png``
    to a run of classification. Each file is written completely or not at all, except ``log.txt``, to which ``bsam
    run`` adds epochs, messages and errors. A file that cannot be read raises a BsamRuntimeError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def run(self) -> Run:
        """Return the settings."""
        settings = read_json(self.path / CONFIG, dict, "choose another folder, or remove that one")
        try:
            return Run(**settings)
        except (BsamError, TypeError) as error:
            raise BsamRuntimeError(
                f"{self.path / CONFIG} does not describe a run of this version of bsam ({error}): choose another folder"
            ) from error

    def finished_run(self) -> Run:
        """Return the settings; raise if the directory does not hold a finished run."""
        if not (self.path / CONFIG).exists():
            raise BsamValueError(f"{self.path} is not a run directory of bsam train: it has no {CONFIG}")
        state = self.state(self.run())
        if not state.finished:
            raise BsamRuntimeError(
                f"the run in {self.path} is not finished ({len(state.epochs)} of {state.run.epochs} epochs are): run "
                "the command that started it again to continue"
            )
        return state.run

    def state(self, run: Run) -> RunState:
        """Return the state of the run; raise if the directory holds a run with other settings."""
        if not (self.path / CONFIG).exists():
            return RunState(run, self.path)
        check_settings(self.path, self.run().settings(), run.settings())
        epochs, diverged = self.metrics(), None
        finished = len(epochs) == run.epochs and (self.path / NETWORK).exists()
        if not finished and (self.path / DIVERGED).exists():
            diverged = str(read_json(self.path / DIVERGED, dict, "remove it to continue the run").get("reason"))
        return RunState(run, self.path, tuple(epochs), finished, diverged)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each finished epoch; none where there is no ``metrics.jsonl``."""
        file = self.path / METRICS
        return read_json_lines(file, REPAIR) if file.exists() else []

    def last_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last finished epoch."""
        return self.metrics()[-1]

    def probe(self) -> list[dict[str, Any]]:
        """Return the probe's readings; a number that is not finite is None."""
        return read_json_lines(self.path / PROBE, REPAIR)

    def note(self, name: str) -> dict[str, Any]:
        """Return one of the files that a task writes, as ``data.json``, by name; an empty dict if it wrote none."""
        file = self.path / f"{name}.json"
        return read_json(file, dict, REPAIR) if file.exists() else {}

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return what the network said of some samples, as its task wrote it; an empty dict if it wrote nothing."""
        file = self.path / PREDICTIONS
        if not file.exists():
            return {}
        with reading(file, REPAIR), file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            return dict(found)

    def machines(self) -> list[dict[str, Any]]:
        """Return what is known of each machine that worked on the run, with dates."""
        file = self.path / MACHINES
        return read_json(file, list, "remove it, and the machines are not reported") if file.exists() else []

    def top_eigenvalue(self) -> float | None:
        """Return the largest eigenvalue of the Hessian after the last epoch; None if the run has none."""
        return self._curvature().get("top_eigenvalue")

    def surface(self) -> LossSurface | None:
        """Return the loss surface after the last epoch; None if the run has none."""
        found = self._curvature().get("surface")
        if found is None:
            return None
        rows = (tuple(math.nan if value is None else value for value in row) for row in found["loss"])
        return LossSurface(tuple(found["axis"]), tuple(rows))

    def _curvature(self) -> dict[str, Any]:
        file = self.path / CURVATURE
        return read_json(file, dict, REPAIR) if file.exists() else {}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the trained network, by name."""
        from safetensors.torch import load

        with reading(self.path / NETWORK, f"remove it, then {RERUN}"):
            return load((self.path / NETWORK).read_bytes())

    def load_into(self, network: nn.Module) -> nn.Module:
        """Load the trained network's weights into one of its architecture, and return it."""
        weights = self.weights()
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise BsamRuntimeError(
                f"{self.path / NETWORK} is not of the network that {CONFIG} names ({' '.join(str(error).split())}): "
                f"remove it, then {RERUN}"
            ) from error
        return network
