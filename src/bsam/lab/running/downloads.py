"""The flag ``--download``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ...common.errors import BsamValueError
from ..data import dataset_entry, download


def download_to(name: str, folder: Path | None) -> None:
    """Download a data set into a folder unless it is there already, with a progress bar on a terminal.

    Raise a BsamValueError if the data set has no download.
    """
    entry = dataset_entry(name)
    if not entry.sources:
        raise BsamValueError(f"{name} {entry.provided}: leave out --download")
    if folder is None:
        raise BsamValueError("--download needs a folder to write to: set --data-dir")
    download(name, folder, progress=sys.stderr.isatty())


def download_all(names: Iterable[str], folder: Path | None) -> None:
    """Download data sets into a folder, each once; skip those without a download, such as digits."""
    for name in dict.fromkeys(names):
        if dataset_entry(name).sources:
            download_to(name, folder)
