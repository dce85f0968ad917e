"""Reading a run directory (stand-in with the interface of branch w11-training, which replaces this file)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core.errors import BsamError, BsamRuntimeError
from ..flatness.probe import Reading
from .config import Run, check_settings
from .files import fits, read_json, read_json_lines
from .folder import ANEW
from .folder import NETWORK as NETWORK
from .folder import has_network, last_metrics, read_metrics, read_network, read_run, read_weights
from .result import LossSurface

REPAIR = ANEW
DIVERGED = "diverged.json"
ORIGIN = ("device", "torch", "bsam", "date")


def run_dir_name(run: Run) -> str:
    """Return the name of a run's directory, with a digest of all settings that are not the default."""
    own = (re.sub(r"[^\w.]+", "_", f"{name}{value}") for name, value in run.arguments.items())
    noise = [f"noise{100 * run.label_noise:g}"] if run.label_noise else []
    blank = Run(run.method).settings()
    chosen = {"method": run.method, **{name: value for name, value in run.settings().items() if value != blank[name]}}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([run.model, run.data, run.method, *own, *noise, f"seed{run.seed}", digest])


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    run: Run
    path: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None
    damaged: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.finished or self.diverged is not None

    @property
    def left(self) -> int:
        """Epochs that are left."""
        return 0 if self.over else max(self.run.epochs - len(self.epochs), 0)

    def __str__(self) -> str:
        if self.diverged is not None:
            return "diverged"
        if self.finished:
            return "done"
        return f"epoch {len(self.epochs)} of {self.run.epochs}" if self.epochs else "missing"


class RunDir:
    """A run directory, to read."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def run(self) -> Run:
        """Return the settings."""
        return read_run(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each finished epoch."""
        return read_metrics(self.path)

    def last_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last epoch of a finished run."""
        return last_metrics(self.path)

    def probe(self) -> list[dict[str, Any]]:
        """Return the readings of the probe."""
        file = self.path / "probe.jsonl"
        hint = f"remove {NETWORK} beside it, and {REPAIR}"
        rows = read_json_lines(file, hint)
        if not fits(rows, list[Reading]):
            raise BsamRuntimeError(f"{file} is damaged: it does not hold all numbers of each step; {hint}")
        return rows

    def machines(self) -> list[dict[str, Any]]:
        """Return the machines that worked on it."""
        file = self.path / "environment.json"
        if not file.exists():
            return []
        hint = "remove the file to report without the machine that the run was on"
        found = read_json(file, list, hint)
        if not all(isinstance(one, dict) and all(isinstance(one.get(name), str) for name in ORIGIN) for one in found):
            raise BsamRuntimeError(f"{file} is damaged: {' and '.join(ORIGIN)} are not in each entry; {hint}")
        return found

    def _curvature(self) -> dict[str, Any]:
        file = self.path / "curvature.json"
        if not file.exists():
            return {}
        found = {"relief": None, **read_json(file, dict, REPAIR)}
        if not fits(found, {"top_eigenvalue": float | None, "relief": LossSurface | None}):
            raise BsamRuntimeError(f"{file} is damaged: it does not hold an eigenvalue and a landscape; {REPAIR}")
        return found

    def top_eigenvalue(self) -> float | None:
        """Return the largest eigenvalue of the Hessian."""
        return self._curvature().get("top_eigenvalue")

    def surface(self) -> LossSurface | None:
        """Return the landscape."""
        found = self._curvature().get("relief")
        return None if found is None else LossSurface(tuple(found["axis"]), tuple(map(tuple, found["loss"])))

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of the network."""
        return read_weights(self.path)

    def load_into(self, network: nn.Module) -> nn.Module:
        """Load the trained network."""
        return read_network(self.path, network)

    def state(self, run: Run, *, verify: bool = False) -> RunState:
        """Return how far the run is."""
        if not (self.path / "config.json").exists():
            return RunState(run, self.path)
        check_settings(self.path, self.run().settings(), json.loads(json.dumps(run.settings())))
        epochs: list[dict[str, Any]] = []
        damaged = _damage(lambda: epochs.extend(self.metrics()))
        score = f"{run.eval_split}_accuracy"
        if epochs and epochs[-1].get(score) is None:
            epochs, damaged = [], f"{self.path / 'metrics.jsonl'} is damaged: it has no {score}; {REPAIR}"
        network = (self.path / NETWORK).exists()
        if network and damaged is None:
            damaged = _damage(lambda: self._check_end(verify))
        finished = network and damaged is None
        lost = not finished and (self.path / DIVERGED).exists()
        reason = str(read_json(self.path / DIVERGED, dict, "remove the file").get("reason")) if lost else None
        return RunState(run, self.path, tuple(epochs), finished, reason, damaged)

    def _check_end(self, verify: bool) -> None:
        self.last_metrics()
        if not has_network(self.path):
            raise BsamRuntimeError(f"{self.path / NETWORK} is damaged; {REPAIR}")
        if verify:
            self.weights()
            self._curvature()


def _damage(read: Callable[[], object]) -> str | None:
    try:
        read()
    except BsamError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return str(error)
    return None
