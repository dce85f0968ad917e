"""Bars that say how long it will take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..core.extras import need

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class Bars:
    """One bar per stage."""

    def __init__(self, bars: Progress, totals: Mapping[str, int]) -> None:
        self._bars = bars
        self._tasks = {stage: bars.add_task(stage, total=total, start=False) for stage, total in totals.items()}

    def advance(self, stage: str, steps: int) -> None:
        """Move a bar on."""
        self._bars.start_task(
            self._tasks[stage]
        )  # a clock that starts with the first bar would count the stages before
        self._bars.advance(self._tasks[stage], steps)

    def reach(self, stage: str, done: int, total: int) -> None:
        """Move a bar to where ``done`` of ``total`` are done; one that falls back starts anew, with its clock."""
        task = self._tasks[stage]
        if done < self._bars.tasks[task].completed:
            self._bars.reset(task, start=False)
        self._bars.start_task(task)
        self._bars.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress(console: Console, totals: Mapping[str, int]) -> Iterator[Bars]:
    """One bar per stage, all in view from the start."""
    need("rich", "train")
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield Bars(bars, totals)
