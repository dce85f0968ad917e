"""Parts of the pictures of recipes, with matplotlib: line styles, a shared legend, saving."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....common.extras import require_package
from ...training.files import write

MAX_COLUMNS = 4
DPI = 150  # pixels per inch of a saved figure
TITLE_WIDTH = 34  # characters per line of a panel's title
# distinguishable by colour-blind readers
COLOURS = ("#666666", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", (0, (8, 1)), "-.", ":")  # 5 dash patterns and 7 colours give 35 different lines


def line_style(number: int) -> dict[str, Any]:
    """Return colour and dashes of the n-th line; the first 35 differ."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}


def seeds_text(counts: Iterable[int]) -> str:
    """Return the number of seeds behind each line in words.

    Example:
        >>> seeds_text([1, 1]), seeds_text([3, 3]), seeds_text([3, 2])
        ('one seed', 'mean of 3 seeds', 'mean of 2 to 3 seeds')
    """
    low, *_, high = sorted([*counts] * 2)
    return "one seed" if high == 1 else f"mean of {high} seeds" if low == high else f"mean of {low} to {high} seeds"


def typeset(text: str) -> str:
    r"""Return text for matplotlib with the names of radii as mathematical symbols.

    Example:
        >>> typeset("BSAM, rho_min 0.1"), typeset("rho falls, $5")
        ('BSAM, $\\rho_{\\min}$ 0.1', '$\\rho$ falls, \\$5')
    """
    escaped = text.replace("$", r"\$")
    return re.sub(r"\brho(?:_(max|min))?\b", lambda name: rf"$\rho_{{\{name[1]}}}$" if name[1] else r"$\rho$", escaped)


def integer_ticks(ax: Any) -> None:
    """Set the ticks of the horizontal axis at whole numbers, for epochs and steps."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))


def panel_title(text: str) -> str:
    """Return a title wrapped to the width of a panel.

    Example:
        >>> panel_title("BSAM (Algorithm 1), rho_min 0.1, seed 0")
        'BSAM (Algorithm 1), rho_min 0.1,\\nseed 0'
    """
    return textwrap.fill(text, TITLE_WIDTH)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; sizes are in inches."""
    require_package("matplotlib", "plot")
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | Path) -> None:
    """Write a figure in the format of the path's suffix.

    It is drawn in memory first, so that an error leaves an existing file unchanged.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks are drawn as boxes
        figure.savefig(buffer, format=Path(path).suffix[1:] or None, dpi=DPI)
    write(Path(path), buffer.getvalue())


def tidy(ax: Any) -> None:
    """Remove the top and right spines, and add a faint grid."""
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, columns: int, **options: Any) -> None:
    """Draw one shared legend below the panels, with the lines of published numbers last."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = sorted(handles, key=lambda label: label.endswith("paper"))
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        **options,
    )
