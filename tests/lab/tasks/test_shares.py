"""Several processes, here threads, evaluate a network together: the metrics are those of one process, bit for bit."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from bsam.lab.config import Run
from bsam.lab.tasks import classification, pose
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.pose import Pose
from bsam.lab.tasks.splits import Shares
from pose_runs import draw_figures

CPU = torch.device("cpu")


class Counted(nn.Module):
    """A network, and the number of samples in each of its batches."""

    def __init__(self, network):
        super().__init__()
        self.network, self.sizes = network, []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.network(x)


def together(task, network, size):
    """Evaluate in threads; return the metrics and the batches of each."""
    everything, barrier = {}, threading.Barrier(size)

    def process(rank):
        def gather(results):
            barrier.wait(30)
            everything[rank] = results
            barrier.wait(30)
            return [everything[other] for other in range(size)]

        own, counted = copy.copy(task), Counted(network)
        own.shares = Shares(rank, size, gather)
        return own.evaluate(counted), counted.sizes

    with ThreadPoolExecutor(size) as pool:
        return zip(*pool.map(process, range(size)), strict=True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_classification(size, monkeypatch):
    """The last batch is smaller, and there may be fewer batches than processes."""
    monkeypatch.setitem(classification.SMALL_IMAGE_BATCHES, "cpu", 30)
    task = Classification(Run.of("sgd", eval_split="holdout", label_noise=0.4), CPU)
    network = task.network().eval()
    whole = Counted(network)
    expected = task.evaluate(whole)
    assert set(expected) == {"holdout_loss", "holdout_accuracy", "holdout_clean_accuracy", "memorised"}
    metrics, sizes = together(task, network, size)
    assert metrics == (expected,) * size
    assert sorted(whole.sizes) == sorted(count for part in sizes for count in part)
    assert max(map(len, sizes)) < len(whole.sizes)


@pytest.mark.parametrize("size", [2, 5])
def test_pose(size, monkeypatch):
    monkeypatch.setattr(pose, "EVALUATION_BATCH", 8)
    draw_figures(120, monkeypatch)
    same = {"task": "pose", "data": "stick_figures", "model": "simcc_resnet8", "image_size": 32}
    run = Run.of("sgd", limit_train=8, limit_test=30, **same)
    task = Pose(run, CPU)
    network = task.network().eval()
    expected = task.evaluate(network)
    metrics, sizes = together(task, network, size)
    assert metrics == (expected,) * size
    assert sorted(count for part in sizes for count in part) == [6, 8, 8, 8]
