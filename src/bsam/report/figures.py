"""The demo's figure: first the numbers, then the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipes.demo import Cell
from ..training.loop import Epoch
from .extras import need
from .tables import Spread, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#666666", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by the colour-blind, too
DASHES = ("-", "--", "-", "-.", ":", "--")


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
        accuracy = tuple(spread([epoch.accuracy for epoch in epochs]) for epochs in by_epoch)
        curves.append(Curve(cell.contender.title, cell.label_noise, accuracy, tuple(spread([_bilateral(e) for e in epochs]) for epochs in by_epoch)))
    return curves


def _bilateral(epoch: Epoch) -> float:
    assert epoch.sharpness is not None  # final runs measure it
    return epoch.sharpness.bilateral


def plot_curves(curves: Sequence[Curve], path: Path) -> None:
    """Draw accuracy above sharpness, one column per noise rate: the mean over the seeds, in a band of one standard deviation."""
    need("matplotlib", "plot")
    from matplotlib.figure import Figure  # not pyplot: no window, no global state
    from matplotlib.ticker import LogLocator

    noise_rates = list(dict.fromkeys(curve.label_noise for curve in curves))
    figure = Figure(figsize=(5.2 * len(noise_rates), 7.2), layout="constrained")
    axes = figure.subplots(2, len(noise_rates), squeeze=False, sharex=True)
    for column, noise in enumerate(noise_rates):
        upper, lower = axes[0, column], axes[1, column]
        shown = [curve for curve in curves if curve.label_noise == noise]
        for i, curve in enumerate(shown):
            _draw(upper, [_scaled(s, 100) for s in curve.accuracy], curve.title, i)
            _draw(lower, curve.bilateral, curve.title, i)
        final = [100 * curve.accuracy[-1].mean for curve in shown]
        upper.set_title(f"{noise:.0%} of the training labels flipped" if noise else "clean labels")
        upper.set_ylim(max(0, min(final) - 12), min(100.5, max(final) + 4))  # the end is the story; the first epochs may leave below
        lower.set_yscale("log", subs=[])
        lower.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # decades alone may leave an axis without a number
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("epoch")
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[1, 0].set_ylabel("sharpness BilS on the training data")
    axes[0, 0].legend(loc="lower right", frameon=False)
    seeds = curves[0].accuracy[0].n
    figure.suptitle(f"Digits: mean of {seeds} seeds" + (", band of one standard deviation" if seeds > 1 else ""))
    figure.savefig(path, dpi=150)


def _scaled(s: Spread, factor: float) -> Spread:
    return Spread(factor * s.mean, None if s.std is None else factor * s.std, s.n)


def _draw(ax: Axes, values: Sequence[Spread], title: str, i: int) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = range(1, len(values) + 1)
    means, deviations = [v.mean for v in values], [v.std or 0.0 for v in values]
    colour = COLOURS[i % len(COLOURS)]
    ax.plot(epochs, means, color=colour, linestyle=DASHES[i % len(DASHES)], label=title, linewidth=1.8, marker="o" if len(values) == 1 else "")
    low = [max(m - d, m / 10) for m, d in zip(means, deviations, strict=True)]  # a band that reaches 0 would have no end on a log axis
    ax.fill_between(epochs, low, [m + d for m, d in zip(means, deviations, strict=True)], color=colour, alpha=0.13, linewidth=0)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
