"""Pose training: captured steps equal plain steps, and crops from files equal crops on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.tasks.pose import Pose
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer

pytestmark = pytest.mark.gpu
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SAME = {"task": "pose", "data": "stick_figures", "model": "simcc_resnet8", "weight_decay": 0.0}
SMALL = {**SAME, "image_size": 32, "simcc_sigma": 3.0, "batch": 16, "epochs": 2}
RUNS = {
    "bsam on adam": Run.of("bsam", {"rho_max": 0.1, "rho_min": 0.1}, base="adam", lr=1e-3, **SMALL),
    "sgd": Run.of("sgd", lr=0.01, **SMALL),
    "frozen": Run.of("sam", base="sgd", freeze_backbone=True, lr=0.01, flip_test=True, **SMALL),
}
# Relative to the distance from the start. BSAM takes a difference of two gradients, and Adam divides small numbers by
# small ones: on a CPU, changing the initial weights by a relative 1e-7 gives 2 % after these eight steps. Another
# radius gives 36 %. On a GPU, 7 % were measured. The help of --capture states these numbers.
TOLERANCE = {"bsam on adam": 0.15, "sgd": 2e-2, "frozen": 2e-2}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.fixture(scope="module")
def figures():
    return stick_figures(64, side=32)


def train(run, data, device=CUDA):
    with side_stream(device):
        trainer = Trainer(run, Pose(run, device, data=data), DistributedContext(device))
        metrics = [{**trainer.train_epoch(number), **trainer.evaluate()} for number in range(run.epochs)]
        shown = trainer.predictions()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return trainer, [{**epoch, "seconds": 0} for epoch in metrics], shown


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_are_plain_steps(name, figures):
    run = RUNS[name]
    captured, metrics, _ = train(run, figures)
    plain, expected, _ = train(replace(run, capture=False), figures)
    assert type(captured.take_step) is CapturedSteps
    assert captured.take_step._graphs
    assert not isinstance(plain.take_step, CapturedSteps)
    start = Pose(run, CUDA, data=figures).network()
    trained = [key for key, p in start.named_parameters() if p.requires_grad]
    networks = (captured.network, plain.network, start)
    a, b, c = (torch.cat([net.get_parameter(key).flatten() for key in trained]).detach() for net in networks)
    assert (a - b).norm() < TOLERANCE[name] * (b - c).norm()
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-2)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-2)
        assert ours["test_pck"] == pytest.approx(theirs["test_pck"], abs=0.05)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_crops_from_files_train_bit_for_bit_as_crops_on_the_device(run, figures, tmp_path):
    parts = []
    for name, part in (("train", figures.train), ("test", figures.test)):
        np.save(tmp_path / f"{name}.npy", part.x.permute(0, 2, 3, 1).numpy())
        mapped = torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="c")).permute(0, 3, 1, 2)
        parts.append(replace(part, x=mapped, images=tuple(f"{i}.jpg" for i in range(len(part)))))
    streamed, metrics, shown = train(run, replace(figures, train=parts[0], test=parts[1]))
    on_device, expected, seen = train(run, figures)
    assert (streamed.task._x.device.type, on_device.task._x.device.type) == ("cpu", "cuda")
    assert metrics == expected
    for name, tensor in streamed.network.state_dict().items():
        assert torch.equal(tensor, on_device.network.state_dict()[name]), name
    for name in ("pixels", "found", "truth"):
        assert np.array_equal(shown[name], seen[name])
    for ours, theirs in zip(streamed.task.examples(20), on_device.task.examples(20), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len({epoch["train_loss"] for epoch in metrics}) == 2  # the network was trained


def test_scores_and_losses_are_those_of_the_cpu(figures):
    run = RUNS["bsam on adam"]
    here, there = Pose(run, CUDA, data=figures), Pose(run, CPU, data=figures)
    with torch.no_grad():
        on_gpu, expected = (task.evaluate(task.network().eval()) for task in (here, there))
    assert on_gpu["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-2)
    assert on_gpu["test_pck"] == pytest.approx(expected["test_pck"], abs=0.05)
    assert here.baseline() == there.baseline()
    for task in (here, there):
        task.begin_epoch(1)
    index = torch.arange(8)
    ours, theirs = here.batch(index.to(CUDA)), there.batch(index)
    torch.testing.assert_close(ours[0].cpu(), theirs[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours[1].cpu(), theirs[1], atol=1e-3, rtol=0)
