"""The measurements of flatness as plain numbers: eigenvalues, densities, landscapes, and the readings of a probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import BsamValueError
from ...flatness.density import Density
from ...flatness.landscape import Landscape
from ...flatness.probe import Reading
from ...flatness.spectrum import Eigenvalues
from ..training.run_dir import RunDir

NEAR = 0.1  # above the loss at the centre of a landscape
READING_FIELDS = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True)
class SpectrumInfo:
    """The top eigenvalues of a model, with maximum, mean and variance as the paper prints them."""

    title: str
    group: str
    values: list[float]
    residuals: list[float]
    maximum: float
    mean: float
    variance: float
    converged: bool
    products: int
    which: str = "largest"
    note: str = ""  #: as in Eigenvalues
    measured_on: str = ""  #: the loss and its samples, for the label of the axis


@dataclass(frozen=True)
class DensityInfo:
    """The density of all eigenvalues of a model, with its first two moments."""

    title: str
    group: str
    grid: list[float]
    density: list[float]
    nodes: list[float]
    weights: list[float]
    mean: float
    second_moment: float
    sigma: float
    products: int
    note: str = ""  #: as in Density
    measured_on: str = ""  #: as in SpectrumInfo


def spectrum_info(
    eigenvalues: Mapping[str, Eigenvalues], group: str = "", which: str = "largest"
) -> list[SpectrumInfo]:
    """Return maximum, mean and variance of each model's top eigenvalues.

    Args:
        eigenvalues: by title.
        group: the name of their group; models of one group are drawn on one scale.
        which: which eigenvalues these are, as in :func:`bsam.flatness.top_eigenvalues`.

    Example:
        >>> top = Eigenvalues(
        ...     np.array([3.0, 1.0]), np.array([0.0, 0.1]), np.bool_(True), products=9
        ... )
        >>> info = spectrum_info({"SGD": top})[0]
        >>> info.maximum, info.mean, info.variance
        (3.0, 2.0, 1.0)
    """
    infos = []
    for title, e in eigenvalues.items():
        moments = {"maximum": e.values.max(), "mean": e.values.mean(), "variance": e.values.var()}
        numbers = _plain_values({**vars(e), **moments})
        del numbers["vectors"]
        infos.append(SpectrumInfo(title, group, **numbers, which=which))
    return infos


def density_info(densities: Mapping[str, Density], group: str = "") -> list[DensityInfo]:
    """Return the density of each model, with the traces of the Hessian and of its square per parameter.

    Args:
        densities: by title.
        group: the name of their group; models of one group are drawn on one scale.
    """
    infos = []
    for title, d in densities.items():
        moments = {"mean": d.weights @ d.nodes, "second_moment": d.weights @ d.nodes**2}
        infos.append(DensityInfo(title, group, **_plain_values({**vars(d), **moments})))
    return infos


def _plain_values(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return NumPy arrays and scalars as lists and plain numbers."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in numbers.items()}


@dataclass(frozen=True)
class LandscapeInfo:
    """A two-dimensional landscape and its extremes."""

    title: str
    group: str
    axis: list[float]
    loss: list[list[float]]  #: a row for each point along the first direction
    centre: float
    lowest: float  #: of the finite losses
    highest: float
    share_near: float  #: the share of the grid where the loss is at most 0.1 above the centre


def landscape_info(landscapes: Mapping[str, Landscape], group: str = "") -> list[LandscapeInfo]:
    """Return the loss at the centre, its extremes, and the share of the grid where it is close to the centre's.

    Args:
        landscapes: two-dimensional landscapes, by title.
        group: the name of their group; models of one group are drawn on one scale.

    Example:
        >>> axis = np.array([-1.0, 0.0, 1.0])
        >>> info = landscape_info(
        ...     {"SGD": Landscape((axis, axis), np.add.outer(axis**2, axis**2))}
        ... )[0]
        >>> info.centre, info.lowest, info.highest, round(info.share_near, 3)
        (0.0, 0.0, 2.0, 0.111)
    """
    infos = []
    for title, land in landscapes.items():
        if land.loss.ndim != 2:
            raise BsamValueError(
                f"the landscape of {title} has {land.loss.ndim} dimension(s) and needs two: call landscape(..., dims=2)"
            )
        middle = len(land.axes[0]) // 2
        centre = float(land.loss[middle, middle])
        finite = land.loss[np.isfinite(land.loss)]
        lowest, highest = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
        near = float(np.mean(land.loss <= centre + NEAR))
        axis, loss = land.axes[0].tolist(), land.loss.tolist()
        infos.append(LandscapeInfo(title, group, axis, loss, centre, lowest, highest, near))
    return infos


def probe_info(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Return the readings as columns by name.

    Example:
        >>> rest = [1.0] * 6 + [0]
        >>> probe_info(
        ...     [Reading(0, 2.0, 0.3, 0.1, 0.4, *rest), Reading(10, 1.0, 0.2, 0.1, 0.3, *rest)]
        ... )["bilateral"]
        [0.4, 0.3]
    """
    return _columns([asdict(reading) for reading in readings])


def read_probe(folder: Path) -> dict[str, list[float]]:
    """Return the readings of a run as columns by name; null in the file becomes NaN."""
    return _columns(RunDir(folder).probe())


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {name: [math.nan if row[name] is None else row[name] for row in rows] for name in READING_FIELDS}
