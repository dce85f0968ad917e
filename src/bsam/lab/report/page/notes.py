"""What run directories say about the data of an experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from ....common.errors import BsamError
from ...data.arrays import duplicate_warnings
from ...training.run_dir import RunDir


def evaluated_on(runs: pd.DataFrame) -> str:
    """Return the size of the set that the runs of an experiment are evaluated on, to add to a sentence."""
    sizes = [note.get("eval_samples") for note in _notes(runs, "identity")]
    known = sorted({size for size in sizes if isinstance(size, int)})
    if not known:
        return ""
    splits = {settings["eval_split"] for settings in runs["settings"] if settings}
    split = f"{splits.pop()} " if len(splits) == 1 else ""
    return f"; evaluated on {' or '.join(f'{size:,}' for size in known)} {split}samples"


def duplicates_of(runs: pd.DataFrame) -> list[str]:
    """Return the warnings about image files with the same content in two sets or in two classes."""
    sentences: list[str] = []
    for note in _notes(runs, "data"):
        duplicates = note.get("duplicates")
        if isinstance(duplicates, dict) and all(isinstance(number, int) for number in duplicates.values()):
            sentences += duplicate_warnings(duplicates)
    return list(dict.fromkeys(sentences))


def _notes(runs: pd.DataFrame, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield a note of each run; runs whose directory is gone have empty ones."""
    for path in runs["path"].dropna():
        with contextlib.suppress(BsamError):  # a damaged file
            yield RunDir(path).note(name)
