"""Photographs are stored larger than the inputs where random crops are cut from them; what is evaluated stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bsam.lab.config import Run
from bsam.lab.data.augment import RESIZED_CROP, ResizedCrop, normalise
from bsam.lab.data.images import Resize, decode
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.classifier_files import Preprocessing, example
from bsam.lab.training import Machine, fit
from helpers import draw_images

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("photos") / "birds", {"train": 6, "test": 2}, size=(150, 117))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def task_of(folder, cache, **settings):
    settings = {"model": "resnet8", "image_size": 28, "data": f"folder:{folder}", "augment": RESIZED_CROP, **settings}
    return Classification(Run.of("sgd", **settings), CPU, cache_dir=cache)


def decoded(folder, part, resize):
    paths = sorted((folder / part).glob("*/*.png"))
    return torch.from_numpy(np.stack([decode(path, resize) for path in paths])).permute(0, 3, 1, 2)


@pytest.mark.parametrize("model", ["resnet8", "timm:test_efficientnet"])  # bilinear and bicubic
def test_batches_are_crops_of_the_larger_images(folder, cache, model):
    task = task_of(folder, cache, model=model, seed=3)
    stored = decoded(folder, "train", Resize(32, 1.0, task.inputs.interpolation))
    assert task.inputs.interpolation == {"resnet8": "bilinear"}.get(model, "bicubic")
    augment = ResizedCrop(28, task.inputs.interpolation != "bilinear", mean=task.inputs.mean, std=task.inputs.std)
    index = torch.tensor([4, 17, 0, 9])
    for epoch in (0, 1):
        task.begin_epoch(epoch)
        draws = augment.draws(18, seed=3, epoch=epoch, side=32)
        found, labels, _ = task.batch(index)
        assert found.shape == (4, 3, 28, 28)
        assert torch.equal(found, augment(stored[index], draws[index]))
        assert labels.tolist() == [0, 2, 0, 1]
        ((streamed, *_),) = task.batches(index[None])
        assert torch.equal(streamed, found)


def test_evaluation_and_measurements_use_the_same_images_as_without_augmentation(folder, cache):
    """The size without crops is the centre of the shorter side, 32 pixels: that of the larger images."""
    found, plain = task_of(folder, cache), task_of(folder, cache, augment="none")
    assert found._train.x.shape[-1] == 32
    assert plain._train.x.shape[-1] == 28
    for ours, expected in (
        (found.eval_examples(), plain.eval_examples()),
        (found.eval_images(), plain.eval_images()),
        (found.examples(), plain.examples()),
        (found.examples(5), plain.examples(5)),
    ):
        for (x, y), (others, labels) in zip(ours, expected, strict=True):
            assert torch.equal(x, others)
            assert torch.equal(y, labels)
    assert found.inputs == plain.inputs
    assert torch.equal(plain._eval_split.x, decoded(folder, "test", Resize(28, 0.875)))
    held_out = task_of(folder, cache, eval_split="holdout")
    assert {x.shape[-1] for x, _ in held_out.eval_images()} == {28}


def test_without_a_margin_the_larger_images_are_reduced_for_measurements(folder, cache):
    """A network that is evaluated on nearly the whole shorter side; reducing twice is not reducing once."""
    found = task_of(folder, cache, model="timm:test_resnet", image_size=40)
    assert (found.inputs.crop, found._train.x.shape[-1]) == (0.95, 46)
    want = normalise(decoded(folder, "train", Resize(40, 0.95)), found.inputs.mean, found.inputs.std)
    ((x, _),) = found.examples()
    assert x.shape == want.shape
    assert (x - want).abs().mean() < 0.35 * want.std()  # of noise


def test_the_exported_preprocessing_is_that_without_augmentation(folder, cache):
    task, plain = task_of(folder, cache), task_of(folder, cache, augment="none")
    stored = torch.cat([x for x, _ in task.eval_images()])
    assert example(task).shape == (1, 3, 28, 28)
    assert torch.equal(Preprocessing(task)(stored), Preprocessing(plain)(stored))


def test_a_run_resumes_bit_for_bit(folder, cache, tmp_path):
    run = Run.of(
        "sgd", model="resnet8", data=f"folder:{folder}", image_size=28, augment=RESIZED_CROP, batch=6, epochs=3
    )
    whole = fit(run, tmp_path / "whole", Machine("cpu", cache_dir=cache))
    fit(run, tmp_path / "run", Machine("cpu", cache_dir=cache), until=1)
    resumed = fit(run, tmp_path / "run", Machine("cpu", cache_dir=cache))
    losses = [[epoch.metrics["train_loss"] for epoch in result.epochs] for result in (whole, resumed)]
    assert losses[0] == losses[1]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert files[0] == files[1]
    plain = fit(run.changed(augment="none"), machine=Machine("cpu", cache_dir=cache))
    assert plain.last.metrics["train_loss"] != whole.last.metrics["train_loss"]


def test_arrays_are_cropped_and_resized_to_the_inputs_at_once():
    task = Classification(Run.of("sgd", augment=RESIZED_CROP, model="resnet8", image_size=20), CPU)
    x, *_ = task.batch(torch.arange(4))
    augment = ResizedCrop(20, mean=task.inputs.mean, std=task.inputs.std)
    draws = augment.draws(task.samples, seed=0, epoch=0, side=8)[:4]
    assert torch.equal(x, augment(task._train.x[:4], draws))
