"""The flag ``--download``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ..common.errors import BsamValueError
from ..data import dataset_entry, download


def download_to(name: str, folder: Path | None) -> None:
    """Download a data set into a folder unless it is there, with a progress bar on a terminal.

    One that comes with a package is an error.
    """
    entry = dataset_entry(name)
    if not entry.sources:
        raise BsamValueError(f"{name} {entry.provided}: leave --download out")
    if folder is None:
        raise BsamValueError("say with --data-dir in which folder to put what is downloaded")
    download(name, folder, progress=sys.stderr.isatty())


def download_all(names: Iterable[str], folder: Path | None) -> None:
    """Download several data sets into a folder, each once; those that come with a package need nothing."""
    for name in dict.fromkeys(names):
        if dataset_entry(name).sources:
            download_to(name, folder)
