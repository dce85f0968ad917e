"""Training on images mapped from a file in host memory equals training on images on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.data.augment import ResizedCrop
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.fixture
def data(tmp_path):
    """160 images of 24 x 24 pixels, mapped from a file; with a digest they stay there."""
    random = np.random.default_rng(0)
    np.save(tmp_path / "pixels.npy", random.integers(0, 256, (160, 24, 24, 3), np.uint8))
    images = torch.from_numpy(np.load(tmp_path / "pixels.npy", mmap_mode="c")).permute(0, 3, 1, 2)
    labels = torch.from_numpy(random.integers(0, 4, 160))
    train, test = Examples(images[:128], labels[:128]), Examples(images[128:], labels[128:])
    return Dataset("noise", 4, train, None, test, (0.5,) * 3, (0.25,) * 3, tuple("abcd"), "", digest="of a cache")


def train(run, data):
    with side_stream(CUDA):
        trainer = Trainer(run, Classification(run, CUDA, data=data), DistributedContext(CUDA))
        metrics = [{**trainer.train_epoch(number), **trainer.evaluate()} for number in range(run.epochs)]
    torch.cuda.synchronize()
    return trainer, [{**epoch, "seconds": 0} for epoch in metrics]


RUNS = {
    "bsam": Run("bsam", {"rho_max": 0.1, "rho_min": 0.1}, head_lr=0.1),
    "sgd, plain steps": Run("sgd", capture=False),
    "frozen": Run.of("sam", freeze_backbone=True, label_noise=0.25),
    "random crops": Run("bsam", augment="resized-crop-flip"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_mapped_images_train_bit_for_bit_as_images_on_the_device(run, data):
    run = replace(run, model="resnet8", data="cifar10", epochs=3, batch=16, lr=0.02)  # 24 steps, with augmentation
    mapped, metrics = train(run, data)
    on_device, expected = train(run, replace(data, digest=None))
    assert (mapped.task._train.x.device.type, on_device.task._train.x.device.type) == ("cpu", "cuda")
    assert isinstance(mapped.take_step, CapturedSteps) == isinstance(on_device.take_step, CapturedSteps) == run.capture
    assert metrics == expected
    for name, tensor in mapped.network.state_dict().items():
        assert torch.equal(tensor, on_device.network.state_dict()[name]), name
    for (x, y), (others, labels) in zip(mapped.task.examples(50), on_device.task.examples(50), strict=True):
        assert torch.equal(x, others)
        assert torch.equal(y, labels)
    assert len({epoch["train_loss"] for epoch in metrics}) == 3  # the network was trained


@pytest.mark.parametrize("cubic", [False, True])
def test_captured_random_crops_give_the_numbers_of_the_cpu(cubic):
    x = torch.randint(0, 256, (16, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augment = ResizedCrop(size=40, cubic=cubic, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    draws = [augment.draws(16, seed=0, epoch=epoch, side=64) for epoch in range(2)]
    images, rows = x.cuda(), draws[0].cuda()
    with side_stream(CUDA):
        augment(images, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        augmented = augment(images, rows)
    for epoch in draws:
        rows.copy_(epoch)
        graph.replay()
        torch.testing.assert_close(augmented.cpu(), augment(x, epoch), rtol=0, atol=1e-4)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(augmented, augment(images, epoch.cuda()))


def test_captured_steps_have_the_learning_rates_of_the_parts(data):
    run = Run("sgd", model="resnet8", data="cifar10", epochs=2, batch=16, lr=0.02, head_lr=0.1)
    captured, _ = train(run, data)
    plain, _ = train(replace(run, capture=False), data)
    start = Classification(run, CUDA, data=data).network()
    assert [float(group["lr"]) for group in captured.optimizer.param_groups] == pytest.approx(
        [float(group["lr"]) for group in plain.optimizer.param_groups]
    )
    for is_head in (True, False):  # not every parameter, since a bias that hardly moves is mostly rounding
        a, b, c = (
            torch.cat([p.detach().flatten() for name, p in net.named_parameters() if ("linear" in name) == is_head])
            for net in (captured.network, plain.network, start)
        )
        assert (a - b).norm() < 0.05 * (b - c).norm()
