"""What the tests of reports and of commands share."""

import os
import sys

import pytest
import torch

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
    """Let the queue look at its runs often, and read directories again almost without waiting."""
    monkeypatch.setattr(runner, "LOOK", 0.05)


@pytest.fixture
def script_path(monkeypatch):
    """Search for modules as the console script does; folders that commands add are gone after the test."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def terminal(monkeypatch):
    """A function that lets the error stream be a terminal; pytest replaces the stream before each test."""
    return lambda: monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)


@pytest.fixture
def gpus(monkeypatch):
    """A function that sets the number of GPUs that torch sees."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.fixture
def pages(monkeypatch):
    """The options of the pages of studies, which are not drawn."""
    options = []
    monkeypatch.setattr("bsam.lab.report.recipe_results.write_page", lambda *given, **named: options.append(named))
    return options


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
