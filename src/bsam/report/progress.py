"""Progress in the terminal: bars, the plan of a recipe, and how long it will take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..data import dataset_entry
from ..models import model_entry
from ..recipes.eta import EtaEstimator
from ..recipes.experiments import Recipe
from ..recipes.runner import Callbacks, Progress
from ..recipes.variants import variant_of
from ..training.config import Run
from ..training.run_dir import LOG, RunState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.table import Table


class Bars:
    """One bar per stage."""

    def __init__(self, bars: RichProgress, totals: Mapping[str, int]) -> None:
        self._bars = bars
        self._tasks = {stage: bars.add_task(stage, total=total, start=False) for stage, total in totals.items()}

    def reach(self, stage: str, done: int, total: int) -> None:
        """Move a bar to ``done`` of ``total``; a bar that moves back starts again, with its time."""
        task = self._tasks[stage]
        if done < self._bars.tasks[task].completed:
            self._bars.reset(task, start=False)
        self._bars.start_task(task)  # now: the stages before do not count
        self._bars.update(task, completed=done, total=total)

    def describe(self, stage: str, words: str) -> None:
        """Put other words in front of a bar."""
        self._bars.update(self._tasks[stage], description=words)


@contextlib.contextmanager
def progress(console: Console, totals: Mapping[str, int], left: bool = True) -> Iterator[Bars]:
    """Show one bar per stage, all from the start; with the time that is left by the speed of the bar, or without."""
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description:11}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        *((rich.TextColumn("left"), rich.TimeRemainingColumn()) if left else ()),
    )
    with rich.Progress(*columns, console=console) as bars:
        yield Bars(bars, totals)


def duration(seconds: float) -> str:
    """Return a duration in words.

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
    """Return the result of :meth:`bsam.recipes.eta.EtaEstimator.total` in words.

    Example:
        >>> time_left((400.0, 0)), time_left((400.0, 2)), time_left((0.0, 5))
        ('about 7 min', 'about 7 min, and 2 runs unlike any that was measured', 'unknown before the first epoch')
    """
    seconds, unknown = left
    if not unknown:
        return f"about {duration(seconds)}"
    rest = f"{unknown} run{'s' if unknown > 1 else ''} unlike any that was measured"
    return f"about {duration(seconds)}, and {rest}" if seconds else "unknown before the first epoch"


def name_of(run: Run, method: str | None = None) -> str:
    """Return a run in words.

    Args:
        run: the run.
        method: the title of its method; None takes that of the tables.

    Example:
        >>> name_of(
        ...     Run(
        ...         "bsam", {"rho_min": 0.1}, model="resnet18", data="cifar10", label_noise=0.2
        ...     )
        ... )
        'ResNet-18, CIFAR-10, BSAM (Algorithm 1), rho_min 0.1, 20% noise, seed 0'
        >>> name_of(Run("sgd", model="resnet18", data="cifar10", weight_bits=4))
        'ResNet-18, CIFAR-10, SGD, 4 bits, seed 0'
    """
    is_tuning = run.eval_split != "test"
    shown = run.arguments if is_tuning else [name for name in run.arguments if name.startswith("rho")]
    own = [f"{name} {run.arguments[name]}" for name in shown]
    own += [f"lr {run.lr:g}", f"weight decay {run.weight_decay:g}"] if is_tuning else []
    noise = [f"{run.label_noise:.0%} noise"] if run.label_noise else []
    titles = [model_entry(run.model).title, dataset_entry(run.data).title, method or variant_of(run).title]
    own += [] if run.weight_bits is None else [f"{run.weight_bits} bits"]
    return ", ".join([*titles, *own, *noise, f"seed {run.seed}"])


def plan_info(recipe: Recipe, states: Sequence[RunState]) -> list[tuple[str, str, float | None]]:
    """Return each run in words, its state, and the seconds that are left; None where nothing like it was measured."""
    eta = EtaEstimator(states)
    return [(name_of(state.run, recipe.method_title(state.run)), str(state), eta.left(state)) for state in states]


def plan_table(recipe: Recipe, states: Sequence[RunState]) -> Table:
    """Return the plan for the terminal."""
    from rich import box
    from rich.table import Table

    title = f"{recipe.title}: {len(states)} runs"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_style="bold", title_justify="left")
    for name, side in (("run", "left"), ("state", "left"), ("left", "right")):
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for name, state, seconds in plan_info(recipe, states):
        table.add_row(name, state, "?" if seconds is None else duration(seconds) if seconds else "-")
    return table


def totals(states: Sequence[RunState]) -> str:
    """Return the plan in a sentence.

    Example:
        >>> from pathlib import Path
        >>> started = RunState(Run("sgd", epochs=3), Path("a"), ({"seconds": 2.0},))
        >>> totals([started, RunState(Run("sgd", epochs=3), Path("b"))])
        '2 runs: 0 ended, 1 started, 1 not started. Time left: about 10 s.'
    """
    ended = sum(state.ended for state in states)
    started = sum(bool(state.epochs) and not state.ended for state in states)
    counts = f"{len(states)} runs: {ended} ended, {started} started, {len(states) - ended - started} not started."
    return f"{counts} Time left: {time_left(EtaEstimator(states).total(states))}."


def counts(found: Progress) -> str:
    """Return in words how many runs are running, failed and waiting, and the time that is left.

    Example:
        >>> counts(Progress(12, 5, 2, 1, (400.0, 0)))
        '2 running, 1 failed, 4 waiting, left: about 7 min'
    """
    waiting = max(0, found.total - found.done - found.running - found.failed)
    return f"{found.running} running, {found.failed} failed, {waiting} waiting, left: {time_left(found.left)}"


@contextlib.contextmanager
def run_bars(
    console: Console, recipe: Recipe, runs: int, stage: str = "runs", several: bool = False
) -> Iterator[Callbacks]:
    """Show a bar for the runs and one for the epochs of the current run, and a line for each run that starts.

    Args:
        console: where.
        recipe: the experiment.
        runs: the number of runs.
        stage: the name of their bar.
        several: whether runs are trained at the same time. Then there is no bar for epochs, but the numbers of runs
            that are done, running and failed, and a line for each run that ends.
    """
    with progress(console, {stage: runs, **({} if several else {"epochs": 1})}, left=not several) as bars:

        def name(state: RunState) -> str:
            return name_of(state.run, recipe.method_title(state.run))

        def on_start(state: RunState, found: Progress) -> None:
            on_progress(found)
            if not several:
                console.print(f"{name(state)}. Left: {time_left(found.left)}", style="dim", highlight=False)
                bars.reach("epochs", len(state.epochs), state.run.epochs)

        def on_end(state: RunState, found: Progress) -> None:
            on_progress(found)
            if state.diverged is not None:
                console.print(f"{name(state)}: {state.diverged}", style="red", highlight=False)
            elif several:
                done = f"{found.done} of {found.total} done, {counts(found)}"
                console.print(f"{name(state)}: done. {done}", style="dim", highlight=False)

        def on_fail(state: RunState, message: str) -> None:
            log = state.path / LOG
            see = f" See {log}" if log.exists() else ""  # there is none where the folder cannot be written
            console.print(f"{name(state)}: {message}.{see}", style="red", highlight=False)

        def on_progress(found: Progress) -> None:
            bars.reach(stage, found.done + found.failed, runs)
            if several:
                bars.describe(stage, counts(found))

        yield Callbacks(
            on_start, lambda done, total: bars.reach("epochs", done, total), on_end, on_fail, on_progress, console.print
        )
