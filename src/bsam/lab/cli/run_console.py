"""A study on the terminal: its plan, the time it will take, the progress of its runs, and its table."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from ..common.printing import count_text
from ..common.progress import ProgressLine, duration
from ..config import BASE, Run
from ..recipes.plan import row_title
from ..recipes.study import Study
from ..recipes.variants import passes_of
from ..report.table import Column, Table
from ..running.runner import Progress, StudyCallbacks
from ..tasks import task_of
from ..training.run_dir import LOG, RunState

# the settings that determine how long a pass over the data takes
COST = ("model", "data", "batch", "accumulate", "limit_train", "precision", "compile", "probe")


class EtaEstimator:
    """Estimate the remaining time of runs from the median time of a pass in runs with the same network and data.

    The median ignores the few slow epochs that compile. Evaluation is not counted.

    Args:
        states: the runs with the measured epochs.
    """

    def __init__(self, states: Iterable[RunState]) -> None:
        seconds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for state in states:
            seconds[_kind(state.run)] += [metrics["seconds"] / passes_of(state.run) for metrics in state.epochs]
        self._per_pass = {kind: median(values) for kind, values in seconds.items() if values}

    def left(self, state: RunState) -> float | None:
        """Return a run's remaining seconds; None without measurements of similar runs."""
        if not state.left:
            return 0.0
        seconds = self._per_pass.get(_kind(state.run))
        return None if seconds is None else state.left * passes_of(state.run) * seconds

    def total(self, states: Iterable[RunState]) -> tuple[float, int]:
        """Return the remaining seconds of all runs, and the number of runs without an estimate."""
        estimates = [self.left(state) for state in states]
        return sum(seconds for seconds in estimates if seconds is not None), estimates.count(None)


def _kind(run: Run) -> tuple[Any, ...]:
    return (*(getattr(run, name) for name in COST), run.task.cost)


def time_left(left: tuple[float, int]) -> str:
    """Return the result of :meth:`EtaEstimator.total` in words.

    Example:
        >>> time_left((400.0, 0)), time_left((400.0, 2)), time_left((0.0, 5))
        ('about 7 min', 'about 7 min, and 2 runs without an estimate', 'unknown before the first epoch')
    """
    seconds, unknown = left
    if not unknown:
        return f"about {duration(seconds)}"
    rest = f"{count_text(unknown, 'run')} without an estimate"
    return f"about {duration(seconds)}, and {rest}" if seconds else "unknown before the first epoch"


def run_title(run: Run) -> str:
    """Return network, data and row of a run, and the settings that tell it from the other runs of a study."""
    is_tuning = run.eval_split != "test"
    task = task_of(run)
    parts = [*task.titles(run), row_title(run)]
    if is_tuning:
        parts.append(f"lr {run.lr:g}")
    if is_tuning or run.method == BASE:
        parts.append(f"weight decay {run.weight_decay:g}")
    if run.method == BASE:
        parts.append(count_text(run.epochs, "epoch"))
    parts += [task.network_words(run), task.data_words(run), f"seed {run.seed}"]
    return ", ".join(part for part in parts if part)


def plan_table(study: Study, states: Sequence[RunState]) -> Table:
    """Return the plan: each run, its state, and the time left."""
    eta = EtaEstimator(states)
    data = []
    for state in states:
        seconds = eta.left(state)
        if seconds is None:
            left = "?"
        else:
            left = duration(seconds) if seconds else ""
        data.append({"run": run_title(state.run), "state": str(state), "left": left})
    columns = (Column("run", "run", words=True), Column("state", "state", words=True), Column("left", "left"))
    return Table.of(f"{study.title}: {count_text(len(states), 'run')}", data, columns)


def totals(states: Sequence[RunState]) -> str:
    """Return the counts of runs and the time left in two sentences."""
    finished = sum(state.finished for state in states)
    stopped = sum(state.stopped for state in states)
    diverged = sum(state.diverged is not None for state in states)
    started = sum(bool(state.epochs) and not state.ended for state in states)
    unreadable = sum(state.unreadable is not None for state in states)
    waiting = len(states) - finished - stopped - diverged - started - unreadable
    always = ("finished", "in progress", "not started")
    numbers = {
        "finished": finished,
        "stopped early": stopped,
        "diverged": diverged,
        "unreadable": unreadable,
        "in progress": started,
        "not started": waiting,
    }
    counts = ", ".join(f"{number} {words}" for words, number in numbers.items() if number or words in always)
    return f"{count_text(len(states), 'run')}: {counts}. Time left: {time_left(EtaEstimator(states).total(states))}."


def counts(progress: Progress) -> tuple[int, int, str]:
    """Return the numbers of finished and of failed or diverged runs, and what is known of the others in words."""
    states = progress.states
    done = sum(state.finished or state.stopped for state in states)
    failed = len(progress.failed) + sum(state.diverged is not None for state in states)
    seconds, unknown = EtaEstimator(states).total(state for state in states if state.path.name not in progress.failed)
    at_a_time = max(1, min(progress.slots, len(states) - done - failed))
    waiting = max(0, len(states) - done - failed - progress.running)
    left = time_left((seconds / at_a_time, unknown))
    return done, failed, f"{progress.running} running, {failed} failed, {waiting} waiting, left: {left}"


@contextlib.contextmanager
def show_runs() -> Iterator[StudyCallbacks]:
    """Show how many runs have ended and the time left, on a line per stage, and print a line for each run that ends.

    Messages that several runs have in common, such as that their initial weights are random, are printed once.
    """
    printed: set[str] = set()
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        stage = ""

        def on_message(sentence: str) -> None:
            if sentence not in printed:
                printed.add(sentence)
                line.say(sentence)

        def on_end(state: RunState, progress: Progress, failed: str | None) -> None:
            log = state.path / LOG
            see = f". See {log}" if failed and log.exists() else ""  # there is none if the folder is not writable
            done, _, rest = counts(progress)
            end = failed or state.diverged or f"done. {done} of {len(progress.states)} done, {rest}"
            line.say(f"{run_title(state.run)}: {end}{see}")

        def on_progress(progress: Progress) -> None:
            nonlocal line, stage
            if stage != progress.stage:
                stack.close()
                line = stack.enter_context(ProgressLine())
                stage = progress.stage
            done, failed, rest = counts(progress)
            line.reach(stage, done + failed, len(progress.states), rest)

        yield StudyCallbacks(on_end=on_end, on_progress=on_progress, on_message=on_message)
