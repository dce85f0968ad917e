"""Start a run from the trained network of another run."""

from __future__ import annotations

from pathlib import Path

from ...common.errors import BsamValueError
from ..data import dataset_entry
from .config import Run
from .run_dir import NETWORK, RunDir


def initial_network(run: Run, directory: Path | None = None) -> Path | None:
    """Return the file with the network that a run starts from, or None if ``run.init`` is None.

    Raise a BsamError if the initial run is not finished or its network cannot be used for this run.

    Args:
        run: the settings.
        directory: the directory of the initial run, if it is not at the path in ``run.init``.
    """
    if run.init is None:
        return None
    directory = directory or Path(run.init).expanduser()
    if not directory.is_dir():
        raise BsamValueError(f"there is no folder {directory}: --init must be a run directory of bsam train")
    initial = RunDir(directory).finished_run()
    if initial.model != run.model:
        raise BsamValueError(
            f"the run in {directory} trained {initial.model}, but this run trains {run.model}: set --model "
            f"{initial.model}, or choose another run for --init"
        )
    theirs, ours = dataset_entry(initial.data).classes, dataset_entry(run.data).classes
    if None not in (theirs, ours) and theirs != ours:
        raise BsamValueError(
            f"the run in {directory} learned {theirs} classes ({initial.data}), but {run.data} has {ours}: start from "
            "a run with the same number of classes, or use --weights"
        )
    if initial.weight_bits is not None:
        raise BsamValueError(f"the run in {directory} trained a quantized network: start from a run of a float network")
    return directory / NETWORK
