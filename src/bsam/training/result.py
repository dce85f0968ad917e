"""The result of a finished run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..flatness.sharpness import Sharpness
from .config import Run


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch. ``sharpness`` is of the training data, with the labels used in training."""

    metrics: Mapping[str, float]
    sharpness: Sharpness | None = None


@dataclass(frozen=True)
class LossSurface:
    """The loss on a plane through the network, as plain numbers: a row for each point along the first direction. The
    network is at the centre.
    """

    axis: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Result:
    """A finished run. Eigenvalue and landscape (``surface``) are of the network after the last epoch, on some training
    data, with the labels used in training.
    """

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  #: the mean over an epoch, whose steps may differ; of these the median
    top_eigenvalue: float | None = None  #: the largest of the Hessian; NaN where that is not finite
    surface: LossSurface | None = None
    measure: str = "accuracy"  #: of the task

    def __repr__(self) -> str:
        """Return what matters in one line."""
        run, score = self.run, f"{self.measure} {self.score:.4g}"
        return f"Result({run.method}, {run.data}, seed {run.seed}: {score} after {run.epochs} epoch(s))"

    @property
    def last(self) -> Epoch:
        """The epoch that is reported, which is the last one and never the best one."""
        return self.epochs[-1]

    @property
    def score(self) -> float:
        """The task's measure (accuracy, as a share) after the last epoch, on the evaluation split."""
        return self.last.metrics[f"{self.run.eval_split}_{self.measure}"]


def result_of(run: Run, epochs: list[dict[str, Any]], steps: int, measure: str) -> Result:
    """A finished run from its metrics, epoch by epoch."""
    found = [
        Epoch(
            {k: v for k, v in e.items() if k != "sharpness"},
            None if e.get("sharpness") is None else Sharpness(**e["sharpness"]),
        )
        for e in epochs
    ]
    return Result(run, tuple(found), statistics.median(e["seconds"] for e in epochs) / steps, measure=measure)
