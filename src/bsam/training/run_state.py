"""How far a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Run


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Args:
        run: its settings.
        path: its directory.
        epochs: the metrics of the finished epochs.
        finished: whether the trained network is there, too.
        diverged: the message of a run that ended with a non-finite loss; else None.
        damaged: which of its files is damaged, and what to do; else None. Such a run is not finished.
    """

    run: Run
    path: Path
    epochs: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    diverged: str | None = None
    damaged: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the run is finished or diverged."""
        return self.finished or self.diverged is not None

    @property
    def left(self) -> int:
        """The number of epochs that are left."""
        return 0 if self.ended else max(self.run.epochs - len(self.epochs), 0)

    def __str__(self) -> str:
        if self.diverged is not None:
            return "diverged"
        if self.finished:
            return "done"
        return f"epoch {len(self.epochs)} of {self.run.epochs}" if self.epochs else "missing"
