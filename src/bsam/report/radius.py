"""The study of the total radius: its picture, and how the methods differ where their total radii are equal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipes.experiments import Recipe
from ..recipes.radius import total_radius
from ..recipes.states import score_of
from ..recipes.variants import variant_of, variants
from ..training.config import BASE
from ..training.run_dir import RunDir, RunState
from .figures import network_and_data, score_metric
from .panels import figure, legend, line_style, save, seeds_text, tidy
from .summaries import CellSummary, SeedStatistics, seed_statistics

FOLLOW, SAM = variants()["sam-follow"].name, variants()["sam"].name
BSAM_NAMES = ("bsam", "bsam-2")
Value = Callable[[RunState], float | None]


@dataclass(frozen=True)
class RadiusLine:
    """A method's numbers against its total radius: for each of the metrics a statistic per radius, None where there
    is no number. Of the base optimizer alone the radius is 0.
    """

    title: str
    totals: tuple[float, ...]
    metrics: tuple[tuple[SeedStatistics | None, ...], ...]


def _memorised(state: RunState) -> float | None:
    share = state.epochs[-1].get("memorised")
    return None if share is None else 100 * share


METRICS: Mapping[str, Value] = {
    "": score_of,  # its label is that of the task's measure
    "flipped labels memorised, %": _memorised,
    "largest eigenvalue of the Hessian": lambda state: RunDir(state.path).top_eigenvalue(),
}


def radius_lines_info(states: Sequence[RunState]) -> list[RadiusLine]:
    """Return a line per method, of finished runs, in the order of the tables."""
    order = [variant.title for variant in variants().values()]
    groups: dict[str, dict[float, list[RunState]]] = {}
    for state in states:
        if state.finished:
            groups.setdefault(variant_of(state.run).title, {}).setdefault(total_radius(state.run), []).append(state)
    return [
        RadiusLine(
            title,
            tuple(sorted(points)),
            tuple(tuple(_statistics(points[x], value) for x in sorted(points)) for value in METRICS.values()),
        )
        for title, points in sorted(groups.items(), key=lambda group: order.index(group[0]))
    ]


def _statistics(states: Sequence[RunState], value: Value) -> SeedStatistics | None:
    found = [number for state in states if (number := value(state)) is not None]
    return seed_statistics(found) if found else None


def draw_radius(recipe: Recipe, states: Sequence[RunState], path: Path) -> None:
    """Draw accuracy, memorised labels and the largest eigenvalue against the total radius, a line per method; the base
    optimizer alone is a horizontal line.
    """
    lines, run = radius_lines_info(states), states[0].run
    drawn = figure(13.0, 4.4)
    axes = drawn.subplots(1, len(METRICS))
    for i, (ax, label) in enumerate(zip(axes, METRICS, strict=True)):
        for number, line in enumerate(lines):
            _draw_line(ax, line, i, number)
        _label_axis(ax, label or score_metric(run).label, sorted({x for line in lines for x in line.totals if x}))
    counts = [point.n for line in lines for point in line.metrics[0] if point is not None]
    legend(drawn, columns=len(lines), handlelength=3)
    spread = ", whiskers of one standard deviation" if max(counts) > 1 else ""
    noise = f"{run.label_noise:.0%} of the training labels flipped"
    drawn.suptitle(f"{network_and_data(run)}, {noise}: {seeds_text(counts)}{spread}", fontsize=11)
    save(drawn, path)


def _draw_line(ax: Any, line: RadiusLine, which: int, number: int) -> None:
    style = line_style(number)
    known = [(x, point) for x, point in zip(line.totals, line.metrics[which], strict=True) if point is not None]
    if known and line.totals == (0.0,):
        ax.axhline(known[0][1].mean, label=line.title, linewidth=1.2, **style)
        return
    x = [total * 1.03**number for total, _ in known]  # whiskers side by side
    deviations = [point.std or 0.0 for _, point in known]
    ax.errorbar(
        x,
        [point.mean for _, point in known],
        deviations if any(deviations) else None,
        label=line.title,
        marker="o",
        markersize=4,
        capsize=3,
        **style,
    )


def _label_axis(ax: Any, label: str, ticks: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel(r"total radius: $\rho$, or $\rho_{\max} + \rho_{\min}$")
    ax.set_ylabel(label)
    tidy(ax)


def radius_findings(_: Sequence[CellSummary], states: Sequence[RunState]) -> list[str]:
    """Return how BSAM differs from SAM at equal total radii, and at equal rho, by the seeds that both have."""
    scores: dict[tuple[str, float], dict[int, float]] = {}
    for state in states:
        if state.finished and state.run.method != BASE:
            key = variant_of(state.run).name, round(total_radius(state.run), 9)
            scores.setdefault(key, {})[state.run.seed] = score_of(state)
    lines = []
    for (name, total), ours in scores.items():
        if name in BSAM_NAMES:
            others = {"SAM (follow)": (FOLLOW, total), "SAM": (SAM, total), "SAM at rho_max": (SAM, total / 2)}
            found = [
                f"minus {title} {text}"
                for title, (other, radius) in others.items()
                if (text := _difference(ours, scores.get((other, round(radius, 9)), {})))
            ]
            if found:
                lines.append(f"{variants()[name].title}, total radius {total:g}: {'; '.join(found)}.")
    if lines:
        lines.insert(0, "Differences in points, mean ± standard error over the seeds that both have (their number):")
    return lines


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not found:
        return ""
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):+.1f}{error} ({len(found)})"
