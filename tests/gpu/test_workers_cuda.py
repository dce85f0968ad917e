"""Processes forked from one that has imported torch can use the GPU, even if this process uses it, too."""

from __future__ import annotations

import json
import os

import pytest

from bsam.lab.cli import main
from bsam.lab.running.executors import RUNS_PER_GPU
from bsam.lab.training.machine import is_mps_installed

pytestmark = pytest.mark.gpu


def test_runs_train_on_the_device_at_the_same_time(tmp_path):
    """First in this process, then in two others."""
    losses = []
    for jobs in "12":
        out = tmp_path / jobs
        command = ["run", "classification", "--scale", "smoke", "--only", "sgd", "--device", "cuda", "--out", str(out)]
        assert main([*command, "--jobs", jobs]) == 0
        runs = [run for run in json.loads((out / "results.json").read_text())["runs"] if run["state"] == "done"]
        assert len(runs) == 3
        assert all(run["machines"][0]["captured"] for run in runs)
        losses.append([run["last"]["train_loss"] for run in runs])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # training on a GPU is not repeated bit for bit


def test_by_default_runs_share_the_device_through_mps(tmp_path, capsys):
    """One run at a time where MPS is not installed."""
    command = ["run", "classification", "--scale", "smoke", "--only", "sgd", "--seeds", "2", "--device", "cuda:0"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    sentence = f"Training {RUNS_PER_GPU} runs at a time on 1 GPU (NVIDIA MPS); choose another number with --jobs."
    assert (sentence in " ".join(capsys.readouterr().out.split())) == is_mps_installed()
    logs = [path.read_text().splitlines() for path in tmp_path.glob("*/log.txt")]
    assert len(logs) == 6
    starts, ends = ([log[line][: len("2000-01-01 00:00:00")] for log in logs] for line in (0, -1))
    pids = {int(log[0].split("process ")[1].split()[0]) for log in logs}
    if is_mps_installed():
        assert os.getpid() not in pids
        assert len(pids) == RUNS_PER_GPU
        assert sum(start <= min(ends) for start in starts) >= RUNS_PER_GPU
    else:
        assert pids == {os.getpid()}
