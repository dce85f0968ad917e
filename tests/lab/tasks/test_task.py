"""A second kind of training through the unchanged loop: its own data, network, loss and metric, with Adam as base."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.lab.config import Run, TaskSettings
from bsam.lab.tasks.task import BaseTask, Score
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.run_dir import RunDir, run_dir_name
from helpers import trained_as

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RegressionSettings(TaskSettings):
    name = "regression"
    delta: float
    widths: tuple[int, ...] = (32,)


SETTINGS = {"base": "adam", "lr": 0.02, "weight_decay": 0.0, "batch": 50, "seed": 3}
RUN = Run("bsam", {"rho_max": 0.05, "rho_min": 0.05}, epochs=4, task=RegressionSettings(1.0), **SETTINGS)


class Regression(BaseTask):
    """Points in the plane, moved a little in each epoch, to two numbers: a Huber loss, judged by the share of variance
    explained.
    """

    settings_type = RegressionSettings
    score = Score("explained", "variance explained in %", 100)
    samples, classes = 230, 2

    def __init__(self, run, device, data_dir=None):
        self.run, self.device = run, device
        points = torch.rand(330, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
        targets = torch.stack((points.prod(1), points.sin().sum(1)), 1)
        self.x, self.y = points[:230].to(device), targets[:230].to(device)
        self.test = points[230:].to(device), targets[230:].to(device)
        self.shift = torch.zeros(230, 2)

    def network(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 2)).to(self.device)

    def begin_epoch(self, epoch):
        self.shift = 0.02 * torch.randn(230, 2, generator=torch.Generator().manual_seed(1000 * self.run.seed + epoch))

    def batch(self, index):
        return self.x[index] + self.shift[index], self.y[index], index

    def losses(self, outputs, y):
        return nn.functional.huber_loss(outputs, y, reduction="none", delta=self.run.task.delta).sum(1)

    @torch.no_grad()
    def evaluate(self, network):
        x, y = self.test
        left = (network(x) - y).square().sum() / (y - y.mean(0)).square().sum()
        return {"test_explained": 1 - float(left)}

    def examples(self, limit=None):
        return [(self.x[:limit], self.y[:limit])]

    def loss(self, outputs, y):
        return nn.functional.huber_loss(outputs, y, reduction="none", delta=self.run.task.delta).sum(1).mean()

    def fingerprint(self):
        return "points of seed 0"

    def notes(self):
        return {"regression": {"points": 230}}


def train(folder, run=RUN, stop=None, task=Regression):
    def each(epoch, metrics):
        if epoch == stop:
            raise InterruptedError

    with trained_as(task):
        return fit(run, folder, Machine("cpu", checkpoint_every=0), callbacks=RunCallbacks(on_epoch=each))


def test_another_task_learns_is_kept_and_goes_on_bit_for_bit(tmp_path):
    result = train(tmp_path / "a")
    for stop in (1, 2, 3):
        with pytest.raises(InterruptedError):
            train(tmp_path / "b", stop=stop)
    first, second = ([{**e.metrics, "seconds": 0} for e in one.epochs] for one in (result, train(tmp_path / "b")))
    assert first == second
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    found = [metrics["test_explained"] for metrics in RunDir(tmp_path / "a").metrics()]
    assert found[-1] > found[0]
    assert (tmp_path / "a" / "regression.json").exists()
    task = Regression(RUN, CPU)
    network = RunDir(tmp_path / "a").load_into(task.network()).eval()
    assert task.evaluate(network)["test_explained"] == found[-1]


@pytest.mark.parametrize("method", ["base", "bsam"])
def test_its_steps_are_those_of_a_plain_loop(method):
    """Adam on the Huber loss of moved points, in the order and with the dropout that the loop draws; for BSAM three of
    its own passes.
    """
    run = replace(RUN, method=method, arguments={} if method == "base" else RUN.arguments, epochs=2)
    result = train(None, run)
    task = Regression(run, CPU)
    network = task.network().train()
    base = torch.optim.Adam(network.parameters(), lr=0.02, betas=(0.9, 0.999))
    optimizer = base if method == "base" else bsam.BSAM(base, network, rho_max=0.05, rho_min=0.05)
    for epoch in range(2):
        task.begin_epoch(epoch)
        network.train()
        torch.manual_seed(int(np.random.default_rng((3, epoch, 0x4E57, 0)).integers(2**63)))
        order, losses = np.random.default_rng((3, epoch, 0x0DE)).permutation(230), []
        for i in range(4):
            chosen = torch.from_numpy(order[50 * i : 50 * i + 50])
            base.param_groups[0]["lr"] = 0.02 * math.cos(math.pi / 2 * (4 * epoch + i) / 8) ** 2

            def closure():
                optimizer.zero_grad()
                loss = task.loss(network(task.x[chosen] + task.shift[chosen]), task.y[chosen])
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert result.epochs[epoch].metrics["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
        assert result.epochs[epoch].metrics["test_explained"] == pytest.approx(
            task.evaluate(network.eval())["test_explained"], rel=1e-4, abs=1e-5
        )


def test_sharpness_and_the_probe_know_its_loss():
    run = replace(RUN, epochs=1, sharpness_rho=0.05, probe=1, curvature=True)
    result = train(None, run)
    assert 0 < result.last.sharpness.loss < 3
    assert result.top_eigenvalue > 0


class Elsewhere(Regression):
    def fingerprint(self):
        return "points of seed 1"


def test_a_run_goes_on_with_its_data_or_not_at_all(tmp_path):
    with pytest.raises(InterruptedError):
        train(tmp_path, stop=2)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(bsam.BsamError, match="data has changed"):
        train(tmp_path, task=Elsewhere)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_its_settings_are_stored_and_a_run_goes_on_only_with_the_same(tmp_path):
    with pytest.raises(InterruptedError):
        train(tmp_path, stop=1)
    stored = RunDir(tmp_path).note("config")
    assert (stored["task"], stored["delta"], stored["widths"]) == ("regression", 1.0, [32])
    assert not {"label_smoothing", "simcc_k"} & set(stored)
    assert RunDir(tmp_path).run(RegressionSettings) == RUN == Run.of(**{**RUN.settings(), "task": RegressionSettings})
    with pytest.raises(bsam.BsamError, match="regression"):  # its class is not known by its name
        RunDir(tmp_path).run()
    other = RUN.changed(delta=0.5)
    assert (other.task, run_dir_name(other) == run_dir_name(RUN)) == (RegressionSettings(0.5), False)
    with pytest.raises(bsam.BsamError, match=r"delta 1.0 there, 0.5 here"):
        train(tmp_path, other)
    with pytest.raises(bsam.BsamError, match="simcc_k"):
        RUN.changed(simcc_k=3.0)


def test_a_setting_of_a_task_needs_a_name_that_runs_do_not_use():
    @dataclass(frozen=True)
    class Twice(TaskSettings):
        name = "twice"
        lr: float = 0.1

    with pytest.raises(bsam.BsamError, match="lr of Twice"):
        Run("sgd", task=Twice())
    for nameless in (TaskSettings(), "pose", None):
        with pytest.raises(bsam.BsamError, match="task"):
            Run("sgd", task=nameless)


@pytest.mark.parametrize(
    "metrics", [{"explained": 0.5}, {"test_r2": 0.5}, {"test_explained": torch.tensor(0.5)}, 0.5], ids=str
)
def test_metrics_without_the_measure_raise_in_the_first_epoch(metrics):
    class Wrong(Regression):
        def evaluate(self, network):
            return metrics

    with pytest.raises(bsam.BsamError, match="test_explained"):
        train(None, replace(RUN, epochs=1), task=Wrong)
