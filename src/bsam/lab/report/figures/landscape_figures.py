"""Contours of the pictures of recipes, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....flatness.products import Array
from ...inference.flatness_numbers import extremes
from ...recipes.experiments import Recipe
from ...training.run_dir import RunDir, RunState
from .flatness_figures import LEVELS as LEVELS
from .flatness_figures import STEEPNESS as STEEPNESS
from .flatness_figures import shared_range as shared_range
from .panels import panel_title, typeset


@dataclass(frozen=True)
class RecipeLandscape:
    """The loss around the network of a row."""

    title: str
    axis: list[float]
    loss: list[list[float]]
    centre: float
    lowest: float
    highest: float


def recipe_landscapes_info(recipe: Recipe, states: Sequence[RunState]) -> list[RecipeLandscape]:
    """Return the landscapes of finished runs."""
    infos = []
    for state in states:
        if state.finished and (surface := RunDir(state.path).surface()) is not None:
            loss, axis = np.array(surface.loss, dtype=float), np.array(surface.axis)
            infos.append(RecipeLandscape(recipe.cell(state.run).row, axis.tolist(), loss.tolist(), **extremes(loss)))
    return infos


def draw_contours(figure: Any, group: Sequence[tuple[RecipeLandscape, Any]]) -> None:
    """Draw contours on shared levels, with one colour bar.

    Args:
        figure: a figure or subfigure.
        group: the models with their panels.
    """
    levels, colours = _levels([info for info, _ in group])
    clipped = any(np.max(np.nan_to_num(info.loss, nan=np.inf)) > levels[-1] for info, _ in group)
    style = {"levels": levels, **colours, "extend": "max" if clipped else "neither"}
    for info, ax in group:
        loss = _clipped(info, levels[-1]).T  # the first direction is the horizontal axis
        filled = ax.contourf(info.axis, info.axis, loss, **style)
        ax.contour(info.axis, info.axis, loss, levels=levels, colors="white", linewidths=0.6)
        ax.plot(0, 0, marker="+", color="white", markersize=9)
        ax.set_title(_title(info), fontsize=10)
        ax.set_aspect("equal")
        _label(ax, info)
    axes = [ax for _, ax in group]
    figure.colorbar(filled, ax=axes, label="loss", format="%.3g", ticks=levels, shrink=0.85, aspect=25, pad=0.02)


def _title(info: RecipeLandscape) -> str:
    return f"{typeset(panel_title(info.title))}\nloss {info.centre:.3g}"


def _label(ax: Any, info: RecipeLandscape) -> None:
    """Label the first direction, with ticks at the ends and the centre only: more would run into the labels."""
    ends = [info.axis[0], 0, info.axis[-1]]
    ax.set(xticks=ends, yticks=ends, xlabel="first direction")


def _levels(infos: Sequence[RecipeLandscape]) -> tuple[Array, dict[str, Any]]:
    """Return levels for all models, denser near the bottom, and colours in equal steps between them."""
    from matplotlib.colors import PowerNorm

    finite = [info for info in infos if np.isfinite(info.lowest)]
    low, ceiling = shared_range([info.lowest for info in finite], [info.highest for info in finite])
    levels = low + (ceiling - low) * np.linspace(0, 1, LEVELS) ** STEEPNESS
    return levels, {"cmap": "viridis", "norm": PowerNorm(1 / STEEPNESS, levels[0], levels[-1])}


def _clipped(info: RecipeLandscape, ceiling: float) -> Array:
    return np.nan_to_num(np.minimum(np.array(info.loss, dtype=float), ceiling), nan=ceiling, posinf=ceiling)
