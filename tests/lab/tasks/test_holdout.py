"""Training samples that are held out: not trained on, as noisy as the others, and scored by true labels beside that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bsam.lab.config import Run
from bsam.lab.data import DATASETS
from bsam.lab.data.arrays import Examples, flip_labels
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.pose import Pose
from bsam.lab.tasks.splits import holdout_mask
from bsam.lab.training import Machine, fit

CPU = torch.device("cpu")
SHARED = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "eval_split": "holdout"}


class Constant(nn.Module):
    """Predict the class that is asked for, for each image that it is shown."""

    def __init__(self, images, classes):
        super().__init__()
        self.known = {image.numpy().tobytes(): int(label) for image, label in zip(images, classes, strict=True)}

    def forward(self, x):
        found = [self.known[image.numpy().tobytes()] for image in x]
        return nn.functional.one_hot(torch.tensor(found), 10).float()


@pytest.mark.parametrize("limit", [None, 200])
def test_held_out_images_are_not_trained_on_and_keep_their_flipped_labels(limit):
    run = Run.of("sgd", label_noise=0.4, seed=3, limit_train=limit, **SHARED)
    task, data = Classification(run, CPU), DATASETS["digits"].load().train
    data = data if limit is None else data.some(limit)
    noisy, _ = flip_labels(data.y, 0.4, 10, seed=3)
    held_out = holdout_mask(len(data), seed=3)
    n = {640: 200, 200: 100}[len(data)]
    assert int(held_out.sum()) == n
    assert (task.samples, task.eval_samples) == (len(data) - n, n)
    trained = torch.cat([x for x, _ in task.examples()])
    labels = torch.cat([y for _, y in task.examples()])
    assert torch.equal(trained, data.x[~held_out])
    assert torch.equal(labels, noisy[~held_out])
    wrong = (noisy != data.y).float()
    assert 0.2 < float(wrong[held_out].mean()) < 0.6  # as noisy as the others, by chance
    by_noisy, by_true = (task.evaluate(Constant(data.x, y)) for y in (noisy, data.y))
    right = 1 - float(wrong[held_out].mean())
    assert (by_noisy["holdout_accuracy"], by_noisy["holdout_clean_accuracy"]) == (1.0, pytest.approx(right))
    assert (by_true["holdout_accuracy"], by_true["holdout_clean_accuracy"]) == (pytest.approx(right), 1.0)
    assert (by_noisy["memorised"], by_true["memorised"]) == (1.0, 0.0)  # of the images that are trained on
    batch = task.batch(torch.arange(task.samples))
    assert torch.equal(batch[1], noisy[~held_out])


def test_how_many_samples_are_held_out():
    """A fifth, at least 200, and at most half."""
    sizes = {2: 1, 99: 49, 310: 155, 400: 200, 640: 200, 1000: 200, 1005: 201, 50_000: 10_000}
    assert {samples: int(holdout_mask(samples, 0).sum()) for samples in sizes} == sizes


def test_a_limit_holds_for_both_scores():
    run = Run.of("sgd", label_noise=0.4, limit_test=10, **SHARED)
    task, data = Classification(run, CPU), DATASETS["digits"].load().train
    noisy, _ = flip_labels(data.y, 0.4, 10, seed=0)
    found = task.evaluate(Constant(data.x, noisy))
    assert found["holdout_accuracy"] == 1.0
    rows = Examples(data.x, noisy).at(holdout_mask(len(data), 0)).balanced_indices(10)
    right = (noisy == data.y)[holdout_mask(len(data), 0)][rows]
    assert found["holdout_clean_accuracy"] == pytest.approx(float(right.float().mean()))


def test_which_images_are_held_out_depends_on_the_seed_and_not_on_which_labels_are_flipped():
    masks = [holdout_mask(1000, seed) for seed in range(20)]
    assert torch.equal(masks[0], holdout_mask(1000, 0))
    assert len({tuple(mask.tolist()) for mask in masks}) == 20
    labels = torch.zeros(1000, dtype=torch.int64)
    flipped = [(flip_labels(labels, 0.4, 10, seed)[0] != 0)[mask].float().mean() for seed, mask in enumerate(masks)]
    assert np.mean(flipped) == pytest.approx(0.4, abs=0.05)


def test_without_flipped_labels_there_is_one_score():
    found = fit(Run.of("sgd", epochs=1, **SHARED), machine=Machine("cpu"))
    assert set(found.last.metrics) == {"epoch", "train_loss", "lr", "seconds", "holdout_loss", "holdout_accuracy"}
    assert found.score == found.last.metrics["holdout_accuracy"]


def test_the_last_persons_are_held_out():
    data = stick_figures(40, side=32)
    settings = {"task": "pose", "model": "simcc_resnet8", "data": "stick_figures"}
    run = Run.of("base", base="adam", image_size=32, eval_split="holdout", **settings)
    task = Pose(run, CPU, data=data)
    n = len(data.train) // 2  # so few that half of them are held out
    assert (task.samples, task.eval_samples, len(task._test)) == (n, n, n)
    joints = torch.cat([y for _, y in task.examples()])
    whole = Pose(Run.of("base", base="adam", image_size=32, **settings), CPU, data=data)
    assert torch.equal(joints, torch.cat([y for _, y in whole.examples()])[:n])
    assert torch.equal(task._test.y, data.train.y[n:])
    assert "holdout_pck" in task.evaluate(task.network().eval())
