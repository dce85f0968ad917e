"""Processes forked from one that has imported torch can use the GPU, even if this process uses it, too."""

from __future__ import annotations

import json
import os

import pytest
import torch

from bsam.cli import main
from bsam.running.processes import worker_pool

pytestmark = pytest.mark.gpu


def on_the_device(count: int) -> tuple[int, float, str]:
    values = torch.arange(count, device="cuda", dtype=torch.float64)
    return os.getpid(), (values @ values).item(), str(values.device)


def test_workers_and_this_process_use_the_device():
    assert on_the_device(4)[1] == 14
    with worker_pool(2) as pool:
        results = [future.result() for future in [pool.submit(on_the_device, 1000) for _ in range(8)]]
    assert {value for _, value, _ in results} == {332833500}
    assert {device for *_, device in results} == {"cuda:0"}
    assert os.getpid() not in {pid for pid, *_ in results}


def test_runs_train_on_the_device_at_the_same_time(tmp_path):
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
