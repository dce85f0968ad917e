"""The demo's figure: first the numbers, then the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.extras import need
from ..recipes.demo import Cell
from ..training.result import Epoch
from .panels import figure, legend, save
from .tables import Spread, heading, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#666666",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # told apart by the colour-blind, too
DASHES = ("-", "--", (0, (8, 1)), "-.", ":")  # five dashes for seven colours: 35 methods before a pair comes again
BANDS = 4  # that can be told apart
LEGEND_COLUMNS = 6


@dataclass(frozen=True)
class Curve:
    """One method at one noise rate: a :class:`Spread` over the seeds per epoch."""

    title: str
    label_noise: float
    accuracy: tuple[Spread, ...]
    bilateral: tuple[Spread, ...]


def curves_info(cells: Sequence[Cell]) -> list[Curve]:
    """Test accuracy and bilateral sharpness over the epochs."""
    curves = []
    for cell in cells:
        by_epoch = list(zip(*(result.epochs for result in cell.results), strict=True))
        accuracy = tuple(spread([epoch.metrics["test_accuracy"] for epoch in epochs]) for epochs in by_epoch)
        curves.append(
            Curve(
                cell.candidate.title,
                cell.label_noise,
                accuracy,
                tuple(spread([_bilateral(e) for e in epochs]) for epochs in by_epoch),
            )
        )
    return curves


def _bilateral(epoch: Epoch) -> float:
    assert epoch.sharpness is not None  # final runs measure it
    return epoch.sharpness.bilateral


def plot_curves(curves: Sequence[Curve], path: Path) -> None:
    """Draw accuracy above sharpness, one column per noise rate: the mean over the seeds, in a band of one standard
    deviation.

    Many bands would hide each other: there, whiskers beside the last epoch show its deviations.
    """
    need("matplotlib", "plot")
    from matplotlib.ticker import LogLocator

    noise_rates = list(dict.fromkeys(curve.label_noise for curve in curves))
    drawn = figure(5.2 * len(noise_rates), 7.6)
    axes = drawn.subplots(2, len(noise_rates), squeeze=False, sharex=True)
    many = len(curves) > BANDS * len(noise_rates)
    for column, noise in enumerate(noise_rates):
        upper, lower = axes[0, column], axes[1, column]
        shown = [curve for curve in curves if curve.label_noise == noise]
        for i, curve in enumerate(shown):
            for ax, values in ((upper, [_scaled(s, 100) for s in curve.accuracy]), (lower, curve.bilateral)):
                _draw(ax, values, curve.title, i)
                (_whisker if many else _band)(ax, values, i)
        final = [100 * curve.accuracy[-1].mean for curve in shown]
        upper.set_title(heading(noise))
        upper.set_ylim(
            max(0, min(final) - 12), min(100.5, max(final) + 4)
        )  # the end is the story; the first epochs may leave below
        lower.set_yscale("log", subs=[])
        lower.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # decades alone may leave an axis without a number
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("epoch")
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[1, 0].set_ylabel("sharpness BilS on the training data")
    legend(drawn, columns=LEGEND_COLUMNS, handlelength=3)
    seeds = curves[0].accuracy[0].n
    deviation = f", {'at the end a whisker' if many else 'band'} of one standard deviation" if seeds > 1 else ""
    drawn.suptitle(f"Digits: mean of {seeds} seeds{deviation}")
    save(drawn, path)


def _scaled(s: Spread, factor: float) -> Spread:
    return Spread(factor * s.mean, None if s.std is None else factor * s.std, s.n)


def _draw(ax: Axes, values: Sequence[Spread], title: str, i: int) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs, means = range(1, len(values) + 1), [v.mean for v in values]
    ax.plot(
        epochs,
        means,
        color=_colour(i),
        linestyle=DASHES[i % len(DASHES)],
        label=title,
        linewidth=1.8,
        marker="o" if len(values) == 1 else "",
    )
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _band(ax: Axes, values: Sequence[Spread], i: int) -> None:
    low, high = zip(*map(_ends, values), strict=True)
    ax.fill_between(range(1, len(values) + 1), low, high, color=_colour(i), alpha=0.13, linewidth=0)


def _whisker(ax: Axes, values: Sequence[Spread], i: int) -> None:
    x = len(values) * (1.02 + 0.012 * i)  # side by side
    ax.vlines(x, *_ends(values[-1]), color=_colour(i), linewidth=1.5)
    ax.plot(x, values[-1].mean, color=_colour(i), marker="o", markersize=3.5)


def _ends(v: Spread) -> tuple[float, float]:
    deviation = v.std or 0.0
    return max(
        v.mean - deviation, v.mean / 10
    ), v.mean + deviation  # one that reaches 0 would have no end on a log axis


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]
