"""Runs that begin with the trained network of another run."""

from __future__ import annotations

from pathlib import Path

from ..common.errors import BsamValueError
from ..data import dataset_entry
from .config import Run
from .run_dir import NETWORK, RunDir


def initial_network(run: Run, place: Path | None = None) -> Path | None:
    """Return the file with the network that a run begins with; None if it names no other run. Raise if that is not
    finished, or of another network.

    Args:
        run: the settings.
        place: the directory of the other run, if that is not the path in the settings.
    """
    if run.init is None:
        return None
    place = place or Path(run.init).expanduser()
    if not place.is_dir():
        raise BsamValueError(f"there is no folder {place}: --init names the directory of a run of bsam train")
    other = RunDir(place).finished_run()
    if other.model != run.model:
        raise BsamValueError(
            f"the run in {place} trained {other.model}, and this run trains {run.model}: give --model {other.model}, "
            "or another run to begin with"
        )
    theirs, ours = dataset_entry(other.data).classes, dataset_entry(run.data).classes
    if None not in (theirs, ours) and theirs != ours:
        raise BsamValueError(
            f"the run in {place} learned {theirs} classes ({other.data}), and {run.data} has {ours}: begin with a run "
            "on data with as many, or with --weights"
        )
    if other.weight_bits is not None:
        raise BsamValueError(f"the run in {place} trained a quantized network: begin with a run of a float one")
    return place / NETWORK
