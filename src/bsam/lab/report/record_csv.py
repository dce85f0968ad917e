"""Read others' results from a CSV file."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from .record import Record

REQUIRED = ("experiment", "method", "seed", "score")
OPTIONAL = ("unit", "passes", "radius", "published", "source")


def read_csv(path: Path, problems: list[str]) -> Iterator[Record]:
    """Return others' results from a CSV file with a header and a row for each method and seed.

    Args:
        path: the file. Its columns ``experiment``, ``method``, ``seed`` and ``score`` are required; ``unit``,
            ``passes``, ``radius``, ``published`` and ``source`` are optional, and so are their values.
        problems: gets a sentence about the file if its columns are wrong, and about each row that cannot be used.
    """
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{path} cannot be read ({error}): save it as CSV in UTF-8.")
        return
    header = [name.strip() for name in rows[0]] if rows else []
    wrong = [name for name in header if name not in REQUIRED + OPTIONAL or header.count(name) > 1]
    wrong = wrong or [name for name in REQUIRED if name not in header]
    if wrong:
        problems.append(
            f"{path} has a wrong or missing column {wrong[0]!r}: it needs {', '.join(REQUIRED)} and may have "
            f"{', '.join(OPTIONAL)}, each once."
        )
        return
    for line, cells in enumerate(rows[1:], 2):
        if not any(cells):
            continue
        try:
            yield _csv_record(path, dict(zip(header, (cell.strip() for cell in cells), strict=True)))
        except ValueError as error:
            problems.append(f"{path}, line {line} is left out: {error}.")


def _csv_record(path: Path, cells: Mapping[str, str]) -> Record:
    for name in ("experiment", "method"):
        if not cells[name]:
            raise ValueError(f"its {name} is empty")
    if not cells["seed"].isdecimal():
        raise ValueError(f"its seed must be a whole number from 0, got {cells['seed']!r}")
    if not cells["score"]:
        raise ValueError("its score is empty")
    source = cells.get("source")
    return Record(
        name=path.name,
        folder=path,
        experiment=cells["experiment"],
        method=f"{cells['method']} ({source})" if source else cells["method"],
        seed=int(cells["seed"]),
        state="finished",
        reason=None,
        score=_number(cells, "score"),
        unit=cells.get("unit", ""),
        higher_is_better=True,
        passes=_number(cells, "passes"),
        radius=_number(cells, "radius"),
        published=_number(cells, "published"),
    )


def _number(cells: Mapping[str, str], name: str) -> float | None:
    if not (text := cells.get(name, "")):
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise ValueError(f"its {name} must be a finite number, got {text!r}")
