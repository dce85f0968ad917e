"""Runs on poses: resumed, with a frozen backbone, diverged, and measured."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import nn

import bsam
from bsam.flatness import HessianOperator, top_eigenvalues
from bsam.lab.config import Run
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.inference.run_flatness import FlatnessSettings, find_models, load_run, measure
from bsam.lab.tasks.pose import Pose
from bsam.lab.training import Machine, fit
from bsam.lab.training.machine import DistributedContext
from bsam.lab.training.run_dir import RunDir
from bsam.lab.training.trainer import Trainer
from helpers import draw_persons
from pose_runs import draw_figures

CPU = torch.device("cpu")
RADII = {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}
SMALL = {"task": "pose", "model": "simcc_resnet8", "image_size": 32, "simcc_sigma": 3.0}
CHEAP = {"density_steps": 2, "density_probes": 1}
RUN = Run.of("bsam", RADII, data="stick_figures", **{**SMALL, "batch": 8, "epochs": 2})


@pytest.fixture(autouse=True)
def _few_figures(monkeypatch):
    draw_figures(16, monkeypatch)


def weights_before(run, data):
    return {name: t.clone() for name, t in Pose(run, CPU, data=data).network().state_dict().items()}


def test_a_run_on_image_files_continues_bit_for_bit_unless_the_joints_changed(tmp_path, runs):
    table = draw_persons(tmp_path / "lspet")
    run, whole, stopped = RUN.changed(data="lspet", limit_train=16, flip_test=True), tmp_path / "a", tmp_path / "b"
    runs.train(run, whole, data_dir=tmp_path)
    runs.train(run, stopped, stop=1, data_dir=tmp_path)
    before = runs.contents(stopped)
    table[3, 0, 1] += 1
    savemat(tmp_path / "lspet/joints.mat", {"joints": table})
    with pytest.raises(bsam.BsamError, match="has changed"):
        runs.train(run, stopped, data_dir=tmp_path)
    assert runs.contents(stopped) == before
    table[3, 0, 1] -= 1
    savemat(tmp_path / "lspet/joints.mat", {"joints": table})
    shutil.rmtree(tmp_path / "lspet/.bsam-cache")
    result = runs.train(run, stopped, data_dir=tmp_path)
    assert runs.same(runs.end(whole), runs.end(stopped))
    assert result.score == RunDir(whole).last_metrics()["test_pck"]
    for name in ("pose", "baseline", "data"):
        assert RunDir(whole).note(name) == RunDir(stopped).note(name) != {}
    expected, predicted = (RunDir(folder).predictions() for folder in (whole, stopped))
    assert list(expected) == list(predicted) == ["pixels", "found", "truth"]
    assert all(np.array_equal(expected[name], predicted[name]) for name in expected)
    assert {"exp_avg", "exp_avg_sq"} <= runs.load(whole)["optimizer"]["state"][0].keys()  # of Adam


def test_a_diverged_network_is_evaluated():
    result = fit(replace(RUN, lr=1e30, epochs=1), machine=Machine("cpu"))
    assert not math.isfinite(result.last.metrics["test_loss"])
    assert 0 <= result.score <= 1


def trained(run, data):
    trainer = Trainer(run, Pose(run, CPU, data=data), DistributedContext(CPU))
    for number in range(run.epochs):
        trainer.train_epoch(number)
        trainer.evaluate()
    return trainer


@pytest.fixture(scope="module")
def figures():
    return stick_figures(16, side=32)


def test_with_a_frozen_backbone_the_head_is_trained_on_fixed_features(figures):
    """The features use the running statistics of batch norm, which no pass changes."""
    run = replace(RUN, method="base", arguments={}, freeze_backbone=True, schedule="constant", augment="none")
    before = weights_before(run, figures)
    after = trained(run, figures).network.state_dict()
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert changed == {f"head.{layer}.{kind}" for layer in ("maps", "x", "y") for kind in ("weight", "bias")}

    task = Pose(run, CPU, data=figures)
    network = task.network().eval()
    ((x, y),) = task.examples()
    with torch.no_grad():
        features = network.backbone(x)
    optimizer = torch.optim.Adam(network.head.parameters(), lr=run.lr)
    for epoch in range(run.epochs):
        order = np.random.default_rng((run.seed, epoch, 0x0DE)).permutation(16)
        for index in torch.from_numpy(order).view(2, 8):
            optimizer.zero_grad()
            task.loss(network.head(features[index]), y[index]).backward()
            optimizer.step()
    for name, p in network.head.state_dict().items():
        way = (p - before[f"head.{name}"]).norm()
        assert (after[f"head.{name}"] - p).norm() < 1e-2 * way


def test_the_head_has_its_learning_rate(figures):
    """Adam's first step is the learning rate in each entry."""
    run = replace(RUN, method="base", arguments={}, batch=16, epochs=1, head_lr=0.02, lr=1e-3)
    before = weights_before(run, figures)
    after = trained(run, figures).network
    for name, p in after.named_parameters():
        step = (p.detach() - before[name]).abs()
        assert float(step.median()) == pytest.approx(0.02 if name.startswith("head.") else 1e-3, rel=0.02), name


def test_a_finished_run_is_read_and_measured(tmp_path, runs):
    run = replace(RUN, epochs=1, method="base", arguments={})
    runs.train(run, tmp_path / "run")
    network, loss, batches = load_run(tmp_path / "run", 3, CPU)
    assert find_models([tmp_path / "run"]).titles == ["run"]
    task, run_dir = Pose(run, CPU), RunDir(tmp_path / "run")
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, task.examples(3), strict=True))
    saved = runs.load(tmp_path / "run")["network"]
    assert all(torch.equal(t, saved[name]) for name, t in network.state_dict().items())
    measured = measure(network, loss, batches, FlatnessSettings(k=1, tol=0.5, trace_samples=6, points=3, **CHEAP))
    assert measured["samples"] == 3
    flatness = [
        *measured["eigenvalues"]["values"],
        measured["trace"]["value"],
        *np.ravel(measured["landscape"]["loss"]),
    ]
    assert np.isfinite(flatness).all()
    ((x, y),) = batches
    with torch.no_grad():
        assert measured["sharpness"]["loss"] == pytest.approx(float(loss(network.eval()(x), y)), rel=1e-5)

    assert run_dir.note("baseline") == task.notes()["baseline"]
    assert type(task.inputs).from_json(run_dir.note("pose")) == task.inputs
    assert run_dir.note("weights") == {}
    parts = ("head", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
    assert {f"test_pck_{part}" for part in parts} | {"test_pck", "test_loss"} <= run_dir.last_metrics().keys()
    (tmp_path / "run/pose.json").write_text("[")
    with pytest.raises(bsam.BsamError, match="pose"):
        run_dir.note("pose")


class Tiny(nn.Module):
    """A network with twelve weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.Linear(3, 2, bias=False)
        self.mix = nn.Linear(2, 2)

    def forward(self, x):
        features = torch.tanh(self.maps(x.double().mean((2, 3))))
        bins = torch.linspace(-1, 1, 64, dtype=torch.float64)
        return (self.mix(features)[:, None, :, None] * (bins + bins**3)).expand(-1, 14, -1, -1)


def test_the_largest_eigenvalue_is_that_of_the_dense_hessian(figures):
    task = Pose(RUN, CPU, data=figures)
    network = Tiny().double()
    batches = task.examples(8)
    ((x, y),) = batches
    w = nn.utils.parameters_to_vector(network.parameters()).detach()
    shapes = {name: p.shape for name, p in network.named_parameters()}

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return task.loss(torch.func.functional_call(network, named, (x,)), y)

    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, w))
    computed = top_eigenvalues(HessianOperator(network, task.loss, batches), k=1, tol=1e-8)
    assert computed.values[0] == pytest.approx(float(eigenvalues[-1]), rel=1e-6)
    assert eigenvalues[-1] > 1e-3
