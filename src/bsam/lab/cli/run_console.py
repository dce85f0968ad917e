"""An experiment on the terminal: its plan, the time it will take, the progress of its runs, and its table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..common.grouping import count_text
from ..common.progress import ProgressLine, duration
from ..recipes.experiments import Experiment
from ..recipes.planning import titles_of
from ..recipes.variants import variant_of
from ..report.recipe_table import PAPER_ROW, TableSection
from ..running.runner import Callbacks, EtaEstimator, Progress
from ..training.config import BASE, Run
from ..training.run_dir import LOG, RunState

if TYPE_CHECKING:
    from rich.table import Table


def time_left(left: tuple[float, int]) -> str:
    """Return the result of :meth:`bsam.lab.running.runner.EtaEstimator.total` in words.

    Example:
        >>> time_left((400.0, 0)), time_left((400.0, 2)), time_left((0.0, 5))
        ('about 7 min', 'about 7 min, and 2 runs without an estimate', 'unknown before the first epoch')
    """
    seconds, unknown = left
    if not unknown:
        return f"about {duration(seconds)}"
    rest = f"{count_text(unknown, 'run')} without an estimate"
    return f"about {duration(seconds)}, and {rest}" if seconds else "unknown before the first epoch"


def name_of(run: Run) -> str:
    """Describe a run."""
    is_tuning = run.eval_split != "test"
    shown = run.arguments if is_tuning else [name for name in run.arguments if name.startswith("rho")]
    settings = [f"{name} {run.arguments[name]}" for name in shown]
    settings += [f"lr {run.lr:g}"] if is_tuning else []
    settings += [f"weight decay {run.weight_decay:g}"] if is_tuning or run.method == BASE else []
    settings += [] if run.weight_bits is None else [f"{run.weight_bits} bits"]
    if run.label_noise:
        wrong = run.wrong_labels()
        settings.append(f"{run.label_noise:.0%} noise" + ("" if wrong is None else f" ({wrong:.0%} wrong)"))
    return ", ".join([*titles_of(run), variant_of(run).title, *settings, f"seed {run.seed}"])


def new_table(title: str, **options: Any) -> Table:
    """Return an empty table for the terminal, in the style of all commands."""
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", **options)


def plan_table(experiment: Experiment, states: Sequence[RunState]) -> Table:
    """Return the plan for the terminal: each run, its state, and the time left."""
    table, eta = new_table(f"{experiment.title}: {len(states)} runs", title_style="bold"), EtaEstimator(states)
    table.add_column("run", overflow="fold")
    table.add_column("state", overflow="fold")
    table.add_column("left", overflow="fold", justify="right")
    for state in states:
        seconds = eta.left(state)
        table.add_row(name_of(state.run), str(state), "?" if seconds is None else duration(seconds) if seconds else "-")
    return table


def totals(states: Sequence[RunState]) -> str:
    """Return the counts of runs and the time left in two sentences."""
    finished = sum(state.finished for state in states)
    diverged = sum(state.diverged is not None for state in states)
    started = sum(bool(state.epochs) and not state.ended for state in states)
    ended = f"{finished} finished" + (f", {diverged} diverged" if diverged else "")
    counts = f"{ended}, {started} in progress, {len(states) - finished - diverged - started} not started"
    return f"{len(states)} runs: {counts}. Time left: {time_left(EtaEstimator(states).total(states))}."


def counts(progress: Progress) -> str:
    """Return the numbers of running, failed and waiting runs, and the time left, in words."""
    waiting = max(0, progress.total - progress.done - progress.running - progress.failed)
    return f"{progress.running} running, {progress.failed} failed, {waiting} waiting, left: {time_left(progress.left)}"


def rich_tables(sections: Sequence[TableSection]) -> list[Table]:
    """Return the sections as tables for the terminal."""
    tables = []
    for section in sections:
        table = new_table(section.title, title_style="bold", min_width=len(section.title), padding=(0, 1, 0, 0))
        table.add_column(section.header[0], no_wrap=not section.wide)
        for name in section.header[1:]:
            is_paper = name == "paper"
            text = name.replace("cross-entropy", "cross-\nentropy")  # rich would break the word anywhere
            table.add_column(text, justify="right", style="dim" if is_paper else "", no_wrap=is_paper, overflow="fold")
        for row in section.rows:
            texts = row[1:]
            if section.wide:
                texts = tuple(text.replace(" ± ", "\n± ").replace(" (", "\n(") for text in texts)
            table.add_row(row[0], *texts, style="dim" if row[0].endswith(PAPER_ROW) else "")
        tables.append(table)
    return tables


@contextlib.contextmanager
def show_runs(runs: int, stage: str = "runs", printed: set[str] | None = None) -> Iterator[Callbacks]:
    """Show how many runs have ended and the time left, and print a line for each run that ends.

    Messages that several runs have in common, such as that their initial weights are random, are printed once.

    Args:
        runs: the number of runs.
        stage: the label of the progress line.
        printed: the messages that were printed in earlier stages; new ones are added.
    """
    printed = set() if printed is None else printed
    with ProgressLine() as line:

        def on_message(sentence: str) -> None:
            if sentence not in printed:
                printed.add(sentence)
                line.say(sentence)

        def on_end(state: RunState, progress: Progress, failed: str | None) -> None:
            log = state.path / LOG
            see = f". See {log}" if failed and log.exists() else ""  # there is none if the folder is not writable
            done = f"done. {progress.done} of {progress.total} done, {counts(progress)}"
            line.say(f"{name_of(state.run)}: {failed or state.diverged or done}{see}")

        def on_progress(progress: Progress) -> None:
            line.reach(stage, progress.done + progress.failed, runs, counts(progress))

        yield Callbacks(on_end=on_end, on_progress=on_progress, on_message=on_message)
