"""The result of a finished run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...flatness.sharpness import Sharpness
from .config import Run


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch. ``sharpness`` is measured on the training data, with the labels used in training."""

    metrics: Mapping[str, float]
    sharpness: Sharpness | None = None


@dataclass(frozen=True)
class LossSurface:
    """The loss on a plane with the network at its centre, as plain numbers: one row per point along the first
    direction.
    """

    axis: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Result:
    """A finished run. The eigenvalue and the loss surface are computed after the last epoch, on a part of the training
    data, with the labels used in training.
    """

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  #: the mean within an epoch, since steps may differ; the median over epochs
    top_eigenvalue: float | None = None  #: the largest eigenvalue of the Hessian; NaN if the computation failed
    surface: LossSurface | None = None
    measure: str = "accuracy"  #: the name of the task's measure

    def __repr__(self) -> str:
        """Return a one-line summary."""
        run, score = self.run, f"{self.measure} {self.score:.4g}"
        return f"Result({run.method}, {run.data}, seed {run.seed}: {score} after {run.epochs} epoch(s))"

    @property
    def last(self) -> Epoch:
        """The reported epoch, which is the last one, not the best one."""
        return self.epochs[-1]

    @property
    def score(self) -> float:
        """The task's measure after the last epoch, on the evaluation split; accuracy is between 0 and 1."""
        return self.last.metrics[f"{self.run.eval_split}_{self.measure}"]


def result_of(run: Run, epochs: list[dict[str, Any]], steps: int, measure: str) -> Result:
    """Return the result of a finished run from its metrics, epoch by epoch."""
    history = [
        Epoch(
            {k: v for k, v in e.items() if k != "sharpness"},
            None if e.get("sharpness") is None else Sharpness(**e["sharpness"]),
        )
        for e in epochs
    ]
    return Result(run, tuple(history), statistics.median(e["seconds"] for e in epochs) / steps, measure=measure)
