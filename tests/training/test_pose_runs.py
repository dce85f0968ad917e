"""Runs that find joints: resumed bit for bit, with a frozen backbone, diverged, and measured."""

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
from bsam.data.pose.stick_figures import stick_figures
from bsam.flatness import HessianOperator, top_eigenvalues
from bsam.recipes.measure import FlatnessSettings, measure
from bsam.recipes.subjects import find_models, load_run
from bsam.tasks.pose import Pose
from bsam.training.config import POSE, Run
from bsam.training.distributed import DistributedContext
from bsam.training.loop import Diverged, fit
from bsam.training.run_dir import RunDir
from bsam.training.trainer import Trainer
from helpers import draw_persons

CPU = torch.device("cpu")
RADII = {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.02}
SMALL = {**POSE, "task": "pose", "model": "simcc_resnet8", "image_size": 32, "simcc_sigma": 3.0}
RUN = Run("bsam", RADII, data="stick_figures", **{**SMALL, "batch": 8, "epochs": 2})


@pytest.fixture(autouse=True)
def _few_figures(monkeypatch):
    monkeypatch.setattr("bsam.data.NUM_FIGURES", 16)


def weights_before(run, data):
    return {name: t.clone() for name, t in Pose(run, CPU, data=data).network().state_dict().items()}


def assert_same_end(runs, *folders):
    one, other = (runs.end(folder) for folder in folders)
    assert runs.same(one, other)
    for name in ("pose", "baseline", "data"):
        assert RunDir(folders[0]).note(name) == RunDir(folders[1]).note(name) != {}
    ours, theirs = (RunDir(folder).predictions() for folder in folders)
    assert list(ours) == list(theirs) == ["pixels", "found", "truth"]
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_run_goes_on_bit_for_bit(tmp_path, runs):
    run = replace(RUN, flip_test=True)
    runs.train(run, tmp_path / "whole")
    for epoch in range(run.epochs):
        runs.train(run, tmp_path / "stopped", stop=epoch + 1)
    last = runs.train(run, tmp_path / "stopped")
    assert_same_end(runs, tmp_path / "whole", tmp_path / "stopped")
    assert last.score == RunDir(tmp_path / "whole").last_metrics()["test_pck"]
    state = runs.load(tmp_path / "whole")["optimizer"]
    assert {"exp_avg", "exp_avg_sq"} <= state["state"][0].keys()  # of Adam


def test_a_run_on_image_files_goes_on_without_its_cache_and_not_with_other_joints(tmp_path, runs):
    table = draw_persons(tmp_path / "lspet")
    run = replace(RUN, data="lspet", limit_train=16)
    runs.train(run, tmp_path / "whole", data_dir=tmp_path)
    runs.train(run, tmp_path / "halves", stop=1, data_dir=tmp_path)
    shutil.rmtree(tmp_path / "lspet/.bsam-cache")
    before = runs.contents(tmp_path / "halves")
    table[3, 0, 1] += 1
    savemat(tmp_path / "lspet/joints.mat", {"joints": table})
    with pytest.raises(bsam.BsamError, match="the data has changed since the run in"):
        runs.train(run, tmp_path / "halves", data_dir=tmp_path)
    assert runs.contents(tmp_path / "halves") == before
    table[3, 0, 1] -= 1
    savemat(tmp_path / "lspet/joints.mat", {"joints": table})
    shutil.rmtree(tmp_path / "lspet/.bsam-cache")
    runs.train(run, tmp_path / "halves", data_dir=tmp_path)
    assert_same_end(runs, tmp_path / "whole", tmp_path / "halves")


def test_a_network_that_diverges_is_a_sentence_in_a_folder_and_numbers_without(tmp_path):
    run = replace(RUN, lr=1e30, curvature=True)
    with pytest.raises(
        Diverged, match=r"loss is (nan|inf) in epoch 1: a smaller lr \(now 1e\+30\) .* No epoch was fin"
    ):
        fit(run, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run/predictions.npz").exists()
    found = fit(run, device="cpu")
    assert len(found.epochs) == 2
    assert not math.isfinite(found.last.metrics["test_loss"])
    assert 0 <= found.score <= 1
    assert math.isnan(found.top_eigenvalue)


def trained(run, data):
    trainer = Trainer(run, Pose(run, CPU, data=data), DistributedContext(CPU))
    for number in range(run.epochs):
        trainer.train_epoch(number)
        trainer.evaluate()
    return trainer


@pytest.fixture(scope="module")
def figures():
    return stick_figures(16, side=32)


def test_a_frozen_backbone_stays_as_it_was_and_the_head_is_trained_on_its_features(figures):
    """By Adam. The features are those of running statistics, which no pass moves."""
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


def test_the_methods_step_is_bsams(figures):
    """One step of BSAM around SGD on a batch of all figures, against Algorithm 1."""
    radii = {"rho_max": 0.1, "rho_min": 0.1}
    run = replace(RUN, arguments=radii, base="sgd", momentum=0.0, batch=16, epochs=1, lr=0.02)
    after = trained(run, figures).network
    task = Pose(run, CPU, data=figures)
    network = task.network()
    order = np.random.default_rng((run.seed, 0, 0x0DE)).permutation(16)
    batch = task.batch(torch.from_numpy(order))
    parameters = list(network.parameters())
    start = [p.detach().clone() for p in parameters]

    def gradient(shift=None):
        with torch.no_grad():
            for p, w, e in zip(parameters, start, shift or [0.0] * len(start), strict=True):
                p.copy_(w + e)
        return torch.autograd.grad(task.losses(network(batch[0]), batch).mean(), parameters)

    def norm(vectors):
        return torch.cat([v.flatten() for v in vectors]).norm()

    g = gradient()
    e = [0.1 * v / norm(g) for v in g]
    g_max, g_min = gradient(e), gradient([-v for v in e])
    ratio = norm(g_max) / norm(g_min)
    for p, w, a, b, c in zip(after.parameters(), start, g, g_max, g_min, strict=True):
        expected = -0.02 * (a + b - ratio * c)
        assert (p - w - expected).norm() <= 2e-2 * expected.norm()


def test_a_finished_run_is_measured(tmp_path, runs):
    run = replace(RUN, epochs=1, method="base", arguments={})
    runs.train(run, tmp_path / "run")
    network, loss, batches = load_run(tmp_path / "run", 3, CPU)
    assert find_models([tmp_path / "run"]).titles == ["run"]
    task = Pose(run, CPU)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(batches, task.examples(3), strict=True))
    saved = runs.load(tmp_path / "run")["network"]
    assert all(torch.equal(t, saved[name]) for name, t in network.state_dict().items())
    its = FlatnessSettings(k=1, tol=0.1, trace_samples=6, density_steps=2, density_probes=1, points=3)
    found = measure(network, loss, batches, its)
    assert found.samples == 3
    numbers = [found.sharpness.loss, *found.eigenvalues.values, found.trace.value, *found.landscape.loss.flatten()]
    assert np.isfinite(numbers).all()
    ((x, y),) = batches
    with torch.no_grad():
        assert found.sharpness.loss == pytest.approx(float(loss(network.eval()(x), y)), rel=1e-5)


class Tiny(nn.Module):
    """Twelve weights in place of a network."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.Linear(3, 2, bias=False)
        self.mix = nn.Linear(2, 2)

    def forward(self, x):
        seen = torch.tanh(self.maps(x.double().mean((2, 3))))
        bins = torch.linspace(-1, 1, 64, dtype=torch.float64)
        return (self.mix(seen)[:, None, :, None] * (bins + bins**3)).expand(-1, 14, -1, -1)


def test_the_largest_eigenvalue_of_the_loss_is_that_of_the_hessian(figures):
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
    found = top_eigenvalues(HessianOperator(network, task.loss, batches), k=1, tol=1e-8)
    assert found.values[0] == pytest.approx(float(eigenvalues[-1]), rel=1e-6)
    assert eigenvalues[-1] > 1e-3


def test_the_notes_of_a_run_are_read_back(tmp_path, runs):
    runs.train(replace(RUN, epochs=1), tmp_path / "run")
    run_dir, task = RunDir(tmp_path / "run"), Pose(RUN, CPU)
    assert run_dir.note("baseline") == task.notes()["baseline"]
    assert type(task.inputs).from_json(run_dir.note("pose")) == task.inputs
    assert run_dir.note("weights") == {}
    metrics = run_dir.last_metrics()
    parts = ("head", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
    assert {f"test_pck_{part}" for part in parts} | {"test_pck", "test_loss"} <= metrics.keys()
    (tmp_path / "run/pose.json").write_text("[")
    with pytest.raises(bsam.BsamError, match=r"pose\.json cannot be read .*remove it, and model\.safetensors"):
        run_dir.note("pose")
