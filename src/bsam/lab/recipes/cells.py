"""The cells of a recipe's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .columns import SeedStatistics
from .paper import Published


@dataclass(frozen=True)
class TableCell:
    """The position of a run's number in a table."""

    section: str
    row: str
    column: str


@dataclass(frozen=True)
class CellSummary:
    """A cell of the table.

    Args:
        cell: its position.
        ours: the score after the last epoch, over the finished seeds.
        diverged: the number of seeds that diverged.
        missing: the number of seeds that are not finished.
        paper: the published number.
        details: the recipe's further columns, by name.
        chosen: the settings that tuning chose, by name.
    """

    cell: TableCell
    ours: SeedStatistics | None
    diverged: int
    missing: int
    paper: Published | None
    details: Mapping[str, SeedStatistics | None] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None
