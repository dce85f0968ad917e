"""The states of the runs of an experiment, read from their directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..tasks import TASKS
from ..training.config import Run
from ..training.run_dir import RunDir, RunState, run_dir_name


def state_of(run: Run, out: Path) -> RunState:
    """Return the state of a run, read from its directory below ``out``."""
    return RunDir(out / run_dir_name(run)).state(run)


def states_of(runs: Sequence[Run], out: Path) -> list[RunState]:
    """Return the state of each run."""
    return [state_of(run, out) for run in runs]


def score_of(state: RunState) -> float:
    """Return the score of a finished run as tables show it: after the last epoch, not the best one."""
    return TASKS[state.run.task].measure.shown(state.epochs[-1], state.run.eval_split)
