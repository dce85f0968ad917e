"""What the tests of reports and of commands share."""

import os

import pytest

from bsam.lab.recipes import RECIPES
from bsam.lab.running import runner
from bsam.lab.training import trainer
from finished_runs import finished_run, write_run


@pytest.fixture(autouse=True)
def quick(rough_eigenvalues):
    """Save most of the Hessian products."""


@pytest.fixture
def small_measurements(monkeypatch):
    """Measure what training measures at its end on few samples, with rough eigenvalues."""
    exact = trainer.top_eigenvalues
    monkeypatch.setattr(trainer, "top_eigenvalues", lambda *given, **named: exact(*given, **{**named, "tol": 0.5}))
    monkeypatch.setattr(trainer, "CURVATURE_SAMPLES", 16)


@pytest.fixture
def at_once(monkeypatch):
    """Let the queue look at its runs, and read directories again, without waiting."""
    monkeypatch.setattr(runner, "LOOK", 0)


@pytest.fixture(name="finished_run")
def finished_run_fixture():
    return finished_run


@pytest.fixture
def out(tmp_path):
    """Write the directories of a recipe's finished runs; returns the experiment and the states."""

    def fill(name, seeds=2):
        experiment = RECIPES[name](seeds=seeds)
        return experiment, [write_run(plan.run, tmp_path) for plan in experiment.plans]

    return fill


MPS_CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    [ -n "$DENIED" ] && echo denied && exit 1
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    exit 0
fi
read command
echo "$command" >> "$CALLS"
[ -n "$RUNS_ALREADY" ] || [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Install a stand-in for NVIDIA's program, and return the file to which it appends its commands."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(MPS_CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"
