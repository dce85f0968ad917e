"""A recipe in the terminal: its plan, and how it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.extras import need
from ..data import DATASETS
from ..models import MODELS
from ..recipes.catalogue import Recipe
from ..recipes.runner import Callbacks, EtaEstimator, State
from ..recipes.variants import variant_of
from ..training.config import Run
from .progress import progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def duration(seconds: float) -> str:
    """In words.

    Example:
        >>> duration(0.4), duration(50), duration(400), duration(9000), duration(400_000)
        ('0.4 s', '50 s', '7 min', '2.5 h', '4.6 d')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, top in ((1, "s", 100), (60, "min", 100)):
        if seconds / size < top:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def time_left(left: tuple[float, int]) -> str:
    """What :meth:`bsam.recipes.runner.EtaEstimator.total` found, in words.

    Example:
        >>> time_left((400.0, 0)), time_left((400.0, 2)), time_left((0.0, 5))
        ('about 7 min', 'about 7 min, and 2 runs like none that was measured', 'unknown before the first epoch')
    """
    seconds, unknown = left
    if not unknown:
        return f"about {duration(seconds)}"
    return (
        f"about {duration(seconds)}, and {unknown} run{'s' if unknown > 1 else ''} like none that was measured"
        if seconds
        else "unknown before the first epoch"
    )


def name_of(run: Run) -> str:
    """A run in words.

    Example:
        >>> name_of(Run("bsam", {"rho_min": 0.1}, model="resnet18", data="cifar10", label_noise=0.2))
        'ResNet-18, CIFAR-10, BSAM (Algorithm 1), rho_min 0.1, 20% noise, seed 0'
    """
    own = [f"{name} {run.arguments[name]:g}" for name in ("rho_min", "rho_min_floor") if name in run.arguments]
    noise = [f"{run.label_noise:.0%} noise"] if run.label_noise else []
    return ", ".join(
        [MODELS[run.model].title, DATASETS[run.data].title, variant_of(run).title, *own, *noise, f"seed {run.seed}"]
    )


def plan_info(states: Sequence[State]) -> list[tuple[str, str, float | None]]:
    """Each run in words, how far it is, and seconds that are left of it; None where nothing like it was measured."""
    clock = EtaEstimator(states)
    return [(name_of(state.run), str(state), clock.left(state)) for state in states]


def plan_table(recipe: Recipe, states: Sequence[State]) -> Table:
    """The plan for the terminal."""
    need("rich", "train")
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{recipe.title}: {len(states)} runs",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title_style="bold",
        title_justify="left",
    )
    for name, side in (("run", "left"), ("state", "left"), ("left", "right")):
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for name, state, seconds in plan_info(states):
        table.add_row(name, state, "?" if seconds is None else duration(seconds) if seconds else "-")
    return table


def totals(states: Sequence[State]) -> str:
    """The plan in a sentence.

    Example:
        >>> from pathlib import Path
        >>> totals([State(Run("sgd", epochs=3), Path("a"), ({"seconds": 2.0},)), State(Run("sgd", epochs=3), Path("b"))])
        '2 runs: 0 over, 1 begun, 1 missing. Time left: about 10 s.'
    """
    over, begun = sum(state.over for state in states), sum(bool(state.epochs) and not state.over for state in states)
    missing = len(states) - over - begun
    return f"{len(states)} runs: {over} over, {begun} begun, {missing} missing. Time left: {time_left(EtaEstimator(states).total(states))}."


@contextlib.contextmanager
def watching(console: Console, runs: int) -> Iterator[Callbacks]:
    """A watcher that shows two bars: the recipe's runs, and the epochs of the one that is on; above them a line for
    each run that is over.
    """
    with progress(console, {"runs": runs, "epochs": 1}) as bars:

        def begins(state: State, over: int, left: tuple[float, int]) -> None:
            console.print(f"{name_of(state.run)}. Left: {time_left(left)}", style="dim", highlight=False)
            bars.reach("runs", over, runs)
            bars.reach("epochs", len(state.epochs), state.run.epochs)

        def ends(state: State) -> None:
            bars.advance("runs", 1)
            if state.diverged is not None:
                console.print(f"{name_of(state.run)}: {state.diverged}", style="red", highlight=False)

        yield Callbacks(begins, lambda done, total: bars.reach("epochs", done, total), ends, console.print)
