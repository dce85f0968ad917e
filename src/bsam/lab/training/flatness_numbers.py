"""The measurements of flatness as plain numbers: eigenvalues, densities, landscapes, and the readings of a probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BsamValueError
from ...flatness.density import Density
from ...flatness.landscape import Landscape
from ...flatness.probe import Reading
from ...flatness.spectrum import Eigenvalues
from ..common.files import reading
from .run_dir import PROBE, REPAIR, RunDir

NEAR = 0.1  # above the loss at the centre of a landscape
READING_FIELDS = tuple(field.name for field in fields(Reading))


def spectrum_info(eigenvalues: Eigenvalues, which: str = "largest") -> dict[str, Any]:
    """Return the numbers of a model's top eigenvalues, with maximum, mean and variance as the paper prints them.

    Args:
        eigenvalues: the eigenvalues.
        which: which eigenvalues these are, as in :func:`bsam.flatness.top_eigenvalues`.

    Example:
        >>> top = Eigenvalues(
        ...     np.array([3.0, 1.0]), np.array([0.0, 0.1]), np.bool_(True), products=9
        ... )
        >>> info = spectrum_info(top)
        >>> info["maximum"], info["mean"], info["variance"]
        (3.0, 2.0, 1.0)
    """
    values = eigenvalues.values
    moments = {"maximum": values.max(), "mean": values.mean(), "variance": values.var()}
    numbers = _plain_values({**vars(eigenvalues), **moments, "which": which})
    del numbers["vectors"]
    return numbers


def largest_eigenvalue(entry: Mapping[str, Any]) -> float | None:
    """Return the largest eigenvalue in an entry of ``flatness.json``: None if it was not measured, NaN if that failed.

    Example:
        >>> largest_eigenvalue({"eigenvalues": {"maximum": 3.0, "converged": True}})
        3.0
    """
    if not (part := entry.get("eigenvalues")):
        return None
    value = math.nan if part["maximum"] is None else part["maximum"]  # JSON has no NaN
    if not isinstance(value, float | int):
        raise BsamValueError(f"maximum must be a number, got {value!r}")
    return float(value) if part["converged"] else math.nan


def density_info(density: Density) -> dict[str, Any]:
    """Return the numbers of a density, with the traces of the Hessian and of its square per parameter."""
    nodes = density.nodes
    weights = density.weights
    return _plain_values({**vars(density), "mean": weights @ nodes, "second_moment": weights @ nodes**2})


def _plain_values(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return NumPy arrays and scalars as lists and plain numbers."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in numbers.items()}


def extremes(loss: NDArray[Any]) -> dict[str, float]:
    """Return the loss at the centre of a landscape, and the lowest and the highest finite loss."""
    finite = loss[np.isfinite(loss)] if np.isfinite(loss).any() else np.array([np.nan])
    centre = loss[len(loss) // 2, len(loss) // 2]
    return {"centre": float(centre), "lowest": float(finite.min()), "highest": float(finite.max())}


def landscape_info(landscape: Landscape) -> dict[str, Any]:
    """Return a two-dimensional landscape and its extremes.

    ``loss`` has a row for each point along the first direction. ``share_near`` is the share of the grid where the loss
    is at most 0.1 above the centre.

    Example:
        >>> axis = np.array([-1.0, 0.0, 1.0])
        >>> info = landscape_info(Landscape((axis, axis), np.add.outer(axis**2, axis**2)))
        >>> info["centre"], info["lowest"], info["highest"], round(info["share_near"], 3)
        (0.0, 0.0, 2.0, 0.111)
    """
    loss = landscape.loss
    if loss.ndim != 2:
        raise BsamValueError(f"the landscape has {loss.ndim} dimension(s) and needs two: call landscape(..., dims=2)")
    ends = extremes(loss)
    near = float(np.mean(loss <= ends["centre"] + NEAR))
    return {"axis": landscape.axes[0].tolist(), "loss": loss.tolist(), **ends, "share_near": near}


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
    with reading(folder / PROBE, REPAIR):
        return _columns(RunDir(folder).probe())


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {name: _column(rows, name) for name in READING_FIELDS}


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [math.nan if row[name] is None else row[name] for row in rows]
