"""timm's RandAugment, Mixup and CutMix, compared with calls of timm on one image or one batch at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from bsam.common.timm_import import import_timm
from bsam.lab.config import Run
from bsam.lab.data import Dataset
from bsam.lab.data.augment import EXAMPLE, Augment, TimmAugment, normalise
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, fit
from helpers import trained_as

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def images(n, channels=3, side=16):
    return torch.randint(
        0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(n), dtype=torch.uint8
    )


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    "name", ["rand-m9-mstd0.5-inc1", "rand-m7-n3-mstd101", "rand-tweights-p0.8", "rand-t3a-m9-mstd1", "rand-t3aw-p1-m5"]
)
def test_rand_augment_is_that_of_timm_after_crop_and_flip(name, channels, black_without_bits):
    import_timm()
    from timm.data.auto_augment import rand_augment_transform

    mean, std = MEAN[:channels], STD[:channels]
    augment = TimmAugment(mean=mean, std=std, aa=name)
    x = images(64, channels)
    draws = augment.draws(64, seed=3, epoch=1, side=16)
    plain = Augment(cutout=0)
    np.testing.assert_array_equal(draws[:, :6], plain.draws(64, seed=3, epoch=1, side=16))
    fill = tuple(round(255 * value) for value in mean)
    transform = rand_augment_transform(name, {"img_mean": fill if channels == 3 else fill[0]})
    expected, changed = [], 0
    for image, seed in zip(plain.moved(x, draws[:, :6]), draws[:, 6].tolist(), strict=True):
        random.seed(seed)
        np.random.seed(seed)
        array = image.permute(1, 2, 0).numpy()
        after = np.asarray(transform(Image.fromarray(array[:, :, 0] if channels == 1 else array)))
        changed += not np.array_equal(after.reshape(array.shape), array)
        expected.append(torch.from_numpy(after.reshape(array.shape).copy()).permute(2, 0, 1))
    assert changed > 32
    assert torch.equal(augment(x, draws), normalise(torch.stack(expected), mean, std))


def test_random_numbers_depend_on_seed_epoch_and_image_only():
    augment, x = TimmAugment(aa="rand-m9-mstd0.5"), images(6)
    draws = augment.draws(6, seed=0, epoch=0, side=16)
    whole = augment(x, draws)
    random.seed(5)
    np.random.seed(5)
    before = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert torch.equal(augment(x[2:4], draws[2:4]), whole[2:4])
    assert (random.random(), np.random.rand()) == before  # those of the program are not touched
    seeds = {int(s) for epoch in (0, 1) for seed in (0, 1) for s in augment.draws(6, seed, epoch, 16)[:, 6]}
    assert len(seeds) == 24


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_is_that_of_timm(mixup, cutmix):
    """The shares of the classes are those of the pixels, from images that are mixed by their number."""
    augment, kinds = TimmAugment(mixup=mixup, cutmix=cutmix), set()
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 10, 10).clone()
    for first in range(12):
        mixed, shares = augment.mix(x.clone(), torch.arange(4), 5, 7, 0, first)
        assert shares.shape == (4, 5)
        for i in range(4):
            lam = float(shares[i, i])
            assert float(shares[i, 3 - i]) == pytest.approx(1 - lam, abs=1e-6)
            assert float(mixed[i].mean()) == pytest.approx(lam * i + (1 - lam) * (3 - i), abs=1e-5)
        kinds.add("cut" if len(mixed[0].unique()) > 1 else "mix" if 0 < float(shares[0, 0]) < 1 else "none")
        again, _ = augment.mix(x.clone(), torch.arange(4), 5, 7, 0, first)
        assert torch.equal(mixed, again)
    assert ("cut" in kinds, "mix" in kinds) == (cutmix > 0, mixup > 0)


def byte_data():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 96)
    x = (60 * rng.random((96, 8, 8, 3)) + 60 * y[:, None, None, None]).astype(np.uint8)
    return Dataset.from_arrays((x[:64], y[:64]), (x[64:], y[64:]))


class Bytes(Classification):
    def __init__(self, run, device, **folders):
        super().__init__(run, device, data=byte_data(), **folders)


RUN = {"model": "resnet8", "augment": EXAMPLE, "batch": 16, "epochs": 2, "lr": 0.02}


@pytest.mark.parametrize("digest", [None, "mapped"])
def test_batches_are_those_of_the_augmentation_alone(digest):
    """Also if images are read ahead; generators that others use in between change nothing."""
    run = Run.of("sgd", **{**RUN, "augment": "timm:aa=rand-m9-mstd0.5-inc1"})
    task = Classification(run, torch.device("cpu"), data=replace(byte_data(), digest=digest))
    task.begin_epoch(1)
    indices = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(8, 8)
    augment = replace(TimmAugment(aa="rand-m9-mstd0.5-inc1"), mean=task.inputs.mean, std=task.inputs.std)
    draws, stored = augment.draws(64, seed=0, epoch=1, side=8), task._train.x.clone()
    for index, (x, labels, of_batch) in zip(indices, task.batches(indices), strict=True):
        random.seed(1)
        np.random.seed(1)
        assert torch.equal(x, augment(stored[index], draws[index]))
        assert torch.equal(labels, task._labels[index])
        assert torch.equal(of_batch, index)
        assert all(torch.equal(a, b) for a, b in zip(task.batch(index), (x, labels, index), strict=True))
    assert torch.equal(task._train.x, stored)


def test_a_run_trains_on_mixed_images_and_resumes(tmp_path):
    """A batch has the shares of all classes; losses are those of soft labels; a resumed run draws the same numbers."""
    run = Run.of("sam", **RUN)
    task = Bytes(run, torch.device("cpu"))
    index = torch.arange(16)
    _, shares, _ = task.batch(index)
    assert shares.shape == (16, 3)
    assert torch.allclose(shares.sum(1), torch.ones(16))
    assert len(shares.unique()) > 2
    drawn = set()
    for epoch in range(3):  # each batch of each epoch is mixed in another way
        task.begin_epoch(epoch)
        mixed = [task.batch(part)[1] for part in (index, index + 16, index + 32)]
        drawn |= {round(float(part[part > 0].min()), 4) for part in mixed}
    assert len(drawn) > 4
    task.begin_epoch(0)
    outputs = torch.randn(16, 3)
    smoothed = 0.1 * 3 / 2  # the option of torch spreads it over all classes
    target = (1 - smoothed) * shares + smoothed / 3
    expected = -(target * outputs.log_softmax(1)).sum(1)
    assert torch.allclose(task.losses(outputs, shares), expected, atol=1e-6)
    with trained_as(Bytes):
        whole = fit(run, machine=Machine("cpu"))
        fit(run, tmp_path / "run", Machine("cpu"), until=1)
        resumed = fit(run, tmp_path / "run", Machine("cpu"))
        plain = fit(run.changed(augment="crop-flip"), machine=Machine("cpu"))
    assert [e.metrics["train_loss"] for e in whole.epochs] == [e.metrics["train_loss"] for e in resumed.epochs]
    assert plain.last.metrics["train_loss"] != whole.last.metrics["train_loss"]
