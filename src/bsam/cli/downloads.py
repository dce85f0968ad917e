"""``--download``: a data set from its authors, with a bar."""

from __future__ import annotations

from pathlib import Path

from ..core.extras import need
from ..core.refusal import Refusal
from ..data import dataset_entry, download


def download_to(name: str, folder: Path | None) -> None:
    """Get a data set into a folder, unless it is there."""
    if not dataset_entry(name).sources:
        raise Refusal(f"{name} comes with scikit-learn: leave --download out")
    if folder is None:
        raise Refusal("say with --data-dir in which folder to put what is downloaded")
    need("rich", "train")
    from rich.console import Console

    from ..report.progress import progress

    stage = "MB of data"
    with progress(Console(), {stage: 1}) as bars:
        download(name, folder, lambda done, total: bars.reach(stage, done // 10**6, total // 10**6))
