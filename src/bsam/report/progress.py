"""Bars that say how long it will take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .extras import need

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def progress(console: Console, totals: Mapping[str, int]) -> Iterator[Callable[[str, int], None]]:
    """One bar per stage, all in view from the start; gives the function that moves a stage's bar on."""
    need("rich", "demo")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks = {stage: bars.add_task(stage, total=total, start=False) for stage, total in totals.items()}

        def advance(stage: str, runs: int) -> None:
            bars.start_task(tasks[stage])  # a clock that starts with the first bar would count the stages before
            bars.advance(tasks[stage], runs)

        yield advance
