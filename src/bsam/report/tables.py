"""The demo's table: first the numbers, then the drawing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.extras import need
from .results import Row

if TYPE_CHECKING:
    from rich.table import Table

MEASURES = ("test_accuracy", "train_loss", "max_sharpness", "min_sharpness", "bilateral", "top_eigenvalue")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (that of a sample, n - 1 below) of n values; of one value there is no deviation."""

    mean: float
    std: float | None
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation.

    Example:
        >>> spread([1.0, 3.0])
        Spread(mean=2.0, std=1.4142135623730951, n=2)
        >>> spread([1.0])
        Spread(mean=1.0, std=None, n=1)
    """
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def summary_info(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per noise rate and method: a :class:`Spread` of every measure over the seeds, and ``relative_time``,
    the time of a step over SGD's.

    Each run is compared with SGD's run at the same noise rate and seed, which ran at about the same time; the median of
    these is taken. Without SGD
    there is no relative time: None.
    """
    sgd = {(row["label_noise"], row["seed"]): row["seconds_per_step"] for row in rows if row["method"] == "sgd"}
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label_noise"], row["method"]), []).append(row)
    return [
        {
            **{name: group[0][name] for name in ("method", "title", "label_noise", "lr", "weight_decay", "arguments")},
            **{name: spread([row[name] for row in group]) for name in MEASURES},
            "relative_time": statistics.median(
                row["seconds_per_step"] / sgd[row["label_noise"], row["seed"]] for row in group
            )
            if sgd
            else None,
        }
        for group in groups.values()
    ]


def summary_tables(summary: Sequence[dict[str, Any]]) -> list[Table]:
    """One table per noise rate."""
    need("rich", "demo")
    return [
        _table(noise, [entry for entry in summary if entry["label_noise"] == noise])
        for noise in dict.fromkeys(entry["label_noise"] for entry in summary)
    ]


def _table(noise: float, entries: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{heading(noise)}, n = {entries[0]['test_accuracy'].n}"
    table = Table(
        title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False, title_style="bold", title_justify="left"
    )
    table.add_column("method", no_wrap=True)
    for name in ("acc. %", "loss", "MaxS", "MinS", "BilS", "λmax", "time", "lr", "rho", "decay"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        accuracy = entry["test_accuracy"]
        deviation = "" if accuracy.std is None else f" ± {100 * accuracy.std:.1f}"
        table.add_row(
            entry["title"],
            f"{100 * accuracy.mean:.1f}{deviation}",
            f"{entry['train_loss'].mean:.3f}",
            *(f"{entry[name].mean:.4f}" for name in ("max_sharpness", "min_sharpness", "bilateral")),
            f"{entry['top_eigenvalue'].mean:.3g}",
            "-" if entry["relative_time"] is None else f"{entry['relative_time']:.2f}",
            f"{entry['lr']:g}",
            radius(entry["arguments"]),
            f"{entry['weight_decay']:g}",
        )
    return table


def heading(noise: float) -> str:
    """What stands above the numbers of a noise rate.

    Example:
        >>> heading(0.4), heading(0.0)
        ('40% of the training labels flipped', 'Clean labels')
    """
    return f"{noise:.0%} of the training labels flipped" if noise else "Clean labels"


def radius(arguments: dict[str, float]) -> str:
    """The radius for the table: one where all are equal, the weight of the loss for SAF and MESA, a dash where there is
    neither.

    Example:
        >>> radius({"rho_max": 0.1, "rho_min": 0.1, "passes": 2}), radius({"rho_max": 0.1, "rho_min": 0.05}), radius({"lam": 0.3}), radius({})
        ('0.1', '0.1/0.05', 'λ0.3', '-')
    """
    if "lam" in arguments:
        return f"λ{arguments['lam']:g}"
    return "/".join(dict.fromkeys(f"{value:g}" for name, value in arguments.items() if name.startswith("rho"))) or "-"
