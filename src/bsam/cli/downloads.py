"""``--download``: data sets from their authors, with a bar."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..core.errors import BsamValueError
from ..data import dataset_entry, download


def download_to(name: str, folder: Path | None) -> None:
    """Download a data set into a folder, unless it is there, in any layout; raise if it comes with a package."""
    entry = dataset_entry(name)
    if not entry.sources:
        raise BsamValueError(f"{name} comes with scikit-learn: leave --download out")
    if folder is None:
        raise BsamValueError("say with --data-dir in which folder to put what is downloaded")
    if entry.is_in(folder):
        return
    from rich.console import Console

    from ..report.progress import progress

    stage = "MB of data"
    with progress(Console(), {stage: 1}) as bars:
        download(name, folder, lambda done, total: bars.reach(stage, done // 10**6, total // 10**6))


def download_all(names: Iterable[str], folder: Path | None) -> None:
    """Get several data sets into a folder, each once; those that come with a package need nothing.

    Example:
        >>> download_all(["digits", "digits"], None)
    """
    for name in dict.fromkeys(names):
        if dataset_entry(name).sources:
            download_to(name, folder)
