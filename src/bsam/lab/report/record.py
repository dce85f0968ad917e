"""One run, with everything that tables, figures and verdicts show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..training.result import LossSurface


@dataclass(frozen=True)
class Record:
    """One run. Runs of the same ``experiment`` can be compared; those that also share ``method`` are seeds of one row.

    Args:
        name: the name of its folder or file.
        folder: the run directory, the folder of results, or the CSV file.
        experiment: the title of the experiment.
        method: the row of the table.
        seed: the seed.
        state: ``"finished"``, ``"diverged"`` or ``"unfinished"``.
        reason: why it diverged, or how far an unfinished run is.
        score: the score after the last epoch in the unit of the table; None unless finished.
        unit: the unit of the score.
        higher_is_better: whether a higher score is better.
        epochs: the metrics of each epoch; only those of the last one if the others were not kept.
        passes: the forward and backward passes per step.
        seconds: the median seconds per epoch; None if unknown or if runs shared the GPU.
        radius: the total radius: rho, or rho_max + rho_min.
        chosen: how the radius or tuned settings were chosen, in words; empty if there are none or that is unknown.
        tuned: whether its settings were tuned.
        failure: a sentence if it is finished and its network is no better than chance.
        published: the published number.
        settings: all settings of the run; empty for a row of a CSV file.
        probe: the probe's readings.
        top_eigenvalue: the largest eigenvalue of the Hessian after the last epoch.
        surface: the loss surface after the last epoch.
        flatness: the network's entry in a ``flatness.json``, with eigenvalues, density and landscape.
        predictions: the file with the network's outputs.
    """

    name: str
    folder: Path
    experiment: str
    method: str
    seed: int
    state: str
    reason: str | None
    score: float | None
    unit: str
    higher_is_better: bool
    epochs: tuple[Mapping[str, Any], ...] = ()
    passes: float | None = None
    seconds: float | None = None
    radius: float | None = None
    chosen: str = ""
    tuned: bool = False
    failure: str | None = None
    published: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    probe: tuple[Mapping[str, Any], ...] = ()
    top_eigenvalue: float | None = None
    surface: LossSurface | None = None
    flatness: Mapping[str, Any] | None = None
    predictions: Path | None = None


@dataclass(frozen=True)
class Records:
    """Runs, and a sentence about each folder, file or row that could not be read."""

    runs: tuple[Record, ...]
    problems: tuple[str, ...]
