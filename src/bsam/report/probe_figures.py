"""What the probe saw during training: sharpness, and the cosine of g and g_min. First the numbers, then the drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BsamRuntimeError
from ..data import DATASETS
from ..models import MODELS
from ..recipes.catalogue import Recipe
from ..recipes.runner import State
from ..recipes.variants import variant_of
from ..training.files import fits, read_json_lines
from .figures import COLOURS
from .panels import figure, legend, save, tidy

SERIES = ("max_sharpness", "min_sharpness", "bilateral", "cosine", "rho_min")
SHARPNESS = {"max_sharpness": "MaxS", "min_sharpness": "MinS", "bilateral": "BilS"}
MEND = "remove model.safetensors beside it, and `bsam run` without --report writes both anew, from the checkpoint"
SMOOTHED = 40  # a smooth line has about so many independent points


@dataclass(frozen=True)
class Readings:
    """The readings of a place of the recipe's table, step by step, the mean over the seeds; each on one mini-batch."""

    title: str
    where: str
    part: str
    row: str
    steps: tuple[int, ...]
    series: dict[str, tuple[float, ...]]
    n: int


def readings_info(recipe: Recipe, states: Sequence[State]) -> list[Readings]:
    """One entry per place of the table, of finished runs."""
    groups: dict[tuple[str, str], list[State]] = {}
    for state in states:
        if state.finished:
            place = recipe.place(state.run)
            groups.setdefault((place.part, place.row), []).append(state)
    return [_readings(part, row, group) for (part, row), group in groups.items()]


def _readings(part: str, row: str, states: Sequence[State]) -> Readings:
    seeds = [_read(state.path) for state in states]
    run, steps = states[0].run, tuple(reading["step"] for reading in max(seeds, key=len))
    for state, seed in zip(states, seeds, strict=True):
        if tuple(reading["step"] for reading in seed) != steps:
            raise BsamRuntimeError(
                f"{state.path / 'probe.jsonl'} is damaged: it lacks steps that other seeds have; {MEND}"
            )
    series = {
        name: tuple(np.mean([[reading[name] for reading in seed] for seed in seeds], axis=0).tolist())
        for name in SERIES
    }
    return Readings(
        variant_of(run).title,
        f"{MODELS[run.model].title} on {DATASETS[run.data].title}",
        part,
        row,
        steps,
        series,
        len(seeds),
    )


def _read(folder: Path) -> list[dict[str, Any]]:
    """The readings of a run; a number that is not finite is null in JSON."""
    file = folder / "probe.jsonl"
    rows = read_json_lines(file, MEND)
    kinds = {"step": int, **dict.fromkeys(SERIES, float)}
    if not all(fits({name: row[name] for name in row if name in kinds}, kinds) for row in rows):
        raise BsamRuntimeError(f"{file} is damaged: it does not hold all numbers of each step; {MEND}")
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def smooth(values: Sequence[float], points: int = SMOOTHED) -> list[float]:
    """A running mean, centred; narrower at both ends.

    Example:
        >>> smooth([0.0, 3.0, 0.0, 3.0, 0.0, 3.0], points=2)
        [1.5, 1.0, 2.0, 1.0, 2.0, 1.5]
    """
    half = len(values) // points // 2
    return [float(np.mean(values[max(i - half, 0) : i + half + 1])) for i in range(len(values))]


def plot_sharpness(found: Sequence[Readings], path: Path) -> None:
    """A panel per method, on one scale: MaxS, MinS and BilS over the steps."""
    drawn = figure(3.4 * len(found), 3.9)
    axes = drawn.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, readings in zip(axes, found, strict=True):
        for i, (name, label) in enumerate(SHARPNESS.items()):
            _course(ax, readings.steps, readings.series[name], COLOURS[i + 1], label)
        _finish(ax, readings.title)
    axes[0].set_ylabel("difference in loss, on a mini-batch")
    legend(drawn, columns=len(SHARPNESS))
    _headline(drawn, found, " (at each method's own radii: BSAM's $\\rho^{min}$ falls with the learning rate)")
    save(drawn, path)


def plot_conflicts(found: Sequence[Readings], path: Path) -> None:
    """A column per form of BSAM: the cosine of g and g_min over the steps, and rho_min below it, a line per schedule."""
    parts, rows = (list(dict.fromkeys(getattr(readings, name) for readings in found)) for name in ("part", "row"))
    colours = dict(zip(rows, COLOURS[1:], strict=False))  # the same one for a schedule in all columns
    drawn = figure(4.2 * len(parts), 5.6)
    axes = drawn.subplots(2, len(parts), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    for (upper, lower), part in zip(axes.T, parts, strict=True):
        own = [readings for readings in found if readings.part == part]
        for readings in own:
            _course(
                upper,
                readings.steps,
                readings.series["cosine"],
                colours[readings.row],
                f"$\\rho^{{min}}$ {readings.row}",
            )
            lower.plot(readings.steps, readings.series["rho_min"], color=colours[readings.row], linewidth=1.5)
        upper.axhline(0, color="black", linewidth=0.8)
        upper.set_title(own[0].title, fontsize=10)
        tidy(upper)
        _finish(lower)
    axes[0, 0].set_ylabel("cosine of $g$ and $g^{min}$")
    axes[1, 0].set_ylabel(r"$\rho^{min}$")
    legend(drawn, columns=len(rows))
    _headline(drawn, found)
    save(drawn, path)


def _course(ax: Any, steps: Sequence[int], values: Sequence[float], colour: str, label: str) -> None:
    """Every reading faintly, their running mean in full."""
    ax.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
    ax.plot(steps, smooth(values), color=colour, linewidth=1.6, label=label)


def _finish(ax: Any, title: str = "") -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("step")
    tidy(ax)


def _headline(drawn: Any, found: Sequence[Readings], remark: str = "") -> None:
    drawn.suptitle(
        f"{found[0].where}: running mean over the steps, {seeds_text(readings.n for readings in found)}{remark}",
        fontsize=11,
    )


def seeds_text(counts: Iterable[int]) -> str:
    """Of how many runs each line is the mean.

    Example:
        >>> seeds_text([1, 1]), seeds_text([3, 3]), seeds_text([3, 2])
        ('one seed', 'mean of 3 seeds', 'mean of 2 to 3 seeds')
    """
    low, *_, high = sorted([*counts] * 2)
    return "one seed" if high == 1 else f"mean of {high} seeds" if low == high else f"mean of {low} to {high} seeds"
