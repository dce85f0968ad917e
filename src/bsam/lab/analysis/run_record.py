"""One run, with everything that tables, figures and verdicts show of it, and the runs of a CSV file."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..training.run_dir import LossSurface

REQUIRED = ("experiment", "method", "seed", "score")  # columns of a CSV file
OPTIONAL = ("unit", "passes", "radius", "published", "source")


@dataclass(frozen=True, kw_only=True)
class StoredNumbers:
    """The numbers of a run that files store.

    Args:
        epochs: the metrics of each epoch; only those of the last one if the others were not kept.
        probe: the probe's readings.
        top_eigenvalue: the largest eigenvalue of the Hessian after the last epoch.
        surface: the loss surface after the last epoch.
        flatness: the network's entry in a ``flatness.json``, with eigenvalues, density and landscape.
        predictions: the file with the network's outputs.
    """

    epochs: tuple[Mapping[str, Any], ...] = ()
    probe: tuple[Mapping[str, Any], ...] = ()
    top_eigenvalue: float | None = None
    surface: LossSurface | None = None
    flatness: Mapping[str, Any] | None = None
    predictions: Path | None = None


@dataclass(frozen=True)
class Record(StoredNumbers):
    """One run. Runs of the same ``experiment`` can be compared; those that also share ``method`` are seeds of one row.

    Args:
        name: the name of its folder or file.
        folder: the run directory, the folder of results, or the CSV file.
        experiment: the title of the experiment.
        method: the row of the table.
        seed: the seed.
        state: ``"finished"``, ``"diverged"`` or ``"unfinished"``.
        reason: why it diverged, or how far an unfinished run is.
        score: the score after the last epoch in the unit of the table; None unless finished.
        unit: the unit of the score.
        higher_is_better: whether a higher score is better.
        passes: the forward and backward passes per step.
        seconds: the median seconds per epoch; None if unknown or if runs shared the GPU.
        radius: the total radius: rho, or rho_max + rho_min.
        chosen: how the radius or tuned settings were chosen, in words; empty if there are none or that is unknown.
        tuned: whether its settings were tuned.
        failure: a sentence if it is finished and its network is no better than chance.
        published: the published number.
        settings: all settings of the run; empty for a row of a CSV file.
    """

    name: str
    folder: Path
    experiment: str
    method: str
    seed: int
    state: str
    reason: str | None
    score: float | None
    unit: str
    higher_is_better: bool
    passes: float | None = None
    seconds: float | None = None
    radius: float | None = None
    chosen: str = ""
    tuned: bool = False
    failure: str | None = None
    published: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """Runs, and a sentence about each folder, file or row that could not be read."""

    runs: tuple[Record, ...]
    problems: tuple[str, ...]


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
