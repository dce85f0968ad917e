"""Images of a run as inputs of its network."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image

import bsam
from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.images import Inputs, find_weights, inputs_of, load_data
from helpers import draw_images

CPU = torch.device("cpu")
OWN = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def arrays(channels=3, side=16, n=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)
    examples = Examples(x, torch.arange(n) % 3)
    return Dataset("noise", 3, examples, None, examples, OWN[0][:channels], OWN[1][:channels])


def hat(t):
    return max(0.0, 1 - abs(t))


def cubic(t, a=-0.75):
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


def interpolation(kernel, old, new):
    """The matrix that takes a row of ``old`` pixels to ``new`` ones; pixels are squares, and the border is repeated."""
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
            matrix[i, min(max(j, 0), old - 1)] += kernel(centre - j)
    return matrix


def resized(x, kernel, size):
    matrix = interpolation(kernel, x.shape[-1], size)
    return matrix @ x.double() @ matrix.T


def normalised(x, mean, std):
    columns = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    return (x.double() / 255 - next(columns)) / next(columns)


NETWORKS = {"timm:test_resnet": (hat, (0.5,) * 3, (0.5,) * 3), "timm:test_efficientnet": (cubic, *IMAGENET)}


@pytest.mark.parametrize("model", NETWORKS)
def test_arrays_are_augmented_then_resized_with_the_scale_of_the_pretraining(model):
    kernel, mean, std = NETWORKS[model]
    data = arrays()
    task = Classification(Run("sgd", model=model, data="cifar10", image_size=40, seed=2), CPU, data=data)
    assert torch.equal(task._draws, task._augment.draws(6, seed=2, epoch=0, side=16))
    index = torch.tensor([4, 1, 5, 0])
    found, labels, _ = task.batch(index)
    assert labels.tolist() == [1, 1, 2, 0]
    corners = 0
    for i, image in zip(index.tolist(), found, strict=True):
        begin, step, corner = task._draws[i].view(3, 2).tolist()
        padded = torch.zeros(3, 24, 24, dtype=torch.uint8)  # black pixels around the image, then the scale
        padded[:, 4:20, 4:20] = data.train.x[i]
        left = begin[1] - 15 if step[1] == -1 else begin[1]
        crop = padded[:, begin[0] : begin[0] + 16, left : left + 16]
        crop = normalised(crop.flip(2) if step[1] == -1 else crop, mean, std)
        corners += corner[0] < 16
        crop[:, max(corner[0], 0) : max(corner[0] + 16, 0), max(corner[1], 0) : max(corner[1] + 16, 0)] = 0
        torch.testing.assert_close(image.double(), resized(crop, kernel, 40), atol=2e-5, rtol=0)
    assert corners  # a hole was there
    ((x, y),) = task.examples()
    torch.testing.assert_close(x.double(), resized(normalised(data.train.x, mean, std), kernel, 40), atol=2e-5, rtol=0)
    assert torch.equal(y, data.train.y)


def test_a_batch_is_the_same_in_a_row_of_batches():
    for digest in (None, "known"):  # images of files go through stream
        task = Classification(Run("sgd", model="resnet8", data="cifar10"), CPU, data=replace(arrays(), digest=digest))
        indices = torch.tensor([[3, 0], [5, 3], [1, 2]])
        for found, index in zip(task.batches(indices), indices, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, task.batch(index), strict=True))


SCALES = {
    # model, image_size, channels: size of the inputs, mean and std
    ("resnet8", None, 3): (16, *OWN),
    ("resnet8", 20, 3): (20, *OWN),
    ("timm:test_resnet", None, 3): (160, (0.5,) * 3, (0.5,) * 3),
    ("timm:test_resnet", 48, 3): (48, (0.5,) * 3, (0.5,) * 3),
    ("timm:test_resnet", None, 1): (16, (0.1,), (0.4,)),
    ("resnet50", None, 3): (224, (123.68 / 255, 116.779 / 255, 103.939 / 255), IMAGENET[1]),
}


@pytest.mark.parametrize(("of", "expected"), SCALES.items(), ids=map(str, SCALES))
def test_sizes_and_scales(of, expected):
    model, size, channels = of
    found = inputs_of(Run("sgd", model=model, image_size=size), arrays(channels))
    assert (found.size, found.mean, found.std) == expected
    assert (found.side, found.channels) == (16, channels)
    assert Inputs.from_json(json.loads(json.dumps(asdict(found)))) == found


FILES = {
    # model, image_size: side, shorter side before the crop, filter, mean and std
    ("timm:test_resnet", 24): (24, 25, "BILINEAR", (0.5,) * 3, (0.5,) * 3),
    ("timm:test_efficientnet", None): (160, 168, "BICUBIC", *IMAGENET),
    ("resnet8", None): (32, 36, "BILINEAR", *IMAGENET),
}


@pytest.mark.parametrize(("of", "expected"), FILES.items(), ids=map(str, FILES))
def test_files_are_decoded_to_the_size_of_the_network(of, expected, tmp_path):
    side, shorter, name, mean, std = expected
    draw_images(tmp_path / "data/birds", {"train": 2, "test": 1})
    run = Run("sgd", model=of[0], image_size=of[1], data="folder:birds")
    data, left_out = load_data(run, tmp_path / "data", tmp_path / "cache")
    assert (data.mean, data.std, data.class_names, left_out) == (mean, std, ("cat", "dog", "owl"), [])
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
    assert not (tmp_path / "data/birds/.bsam-cache").exists()
    for image, path in zip(data.train.x, sorted(tmp_path.glob("data/birds/train/*/*.png")), strict=True):
        width = int(shorter * 26 / 20)
        whole = np.asarray(Image.open(path).resize((width, shorter), Image.Resampling[name]))
        top, left = round((shorter - side) / 2), round((width - side) / 2)
        assert np.array_equal(image.permute(1, 2, 0), whole[top : top + side, left : left + side])
    found = inputs_of(run, data)
    assert (found.side, found.size, found.mean, found.std) == (side, side, mean, std)
    assert (found.decoding.shorter_side, found.decoding.interpolation) == (shorter, name.lower())
    assert found.class_names == data.class_names


def test_weights_are_looked_for_in_the_data_folder_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.pt").touch()
    assert find_weights("pretrained", None) == "pretrained"
    assert find_weights("a.pt", tmp_path / "data") == tmp_path / "data/a.pt"
    with pytest.raises(bsam.BsamError, match=r"^there is no a\.pt: set --weights to a file"):
        find_weights("a.pt", None)
    with pytest.raises(bsam.BsamError, match=r" b\.pt.*data.b\.pt"):
        find_weights("b.pt", tmp_path.joinpath("data").relative_to(tmp_path))
    (tmp_path / "a.pt").touch()
    assert find_weights("a.pt", tmp_path / "data").resolve() == tmp_path / "a.pt"  # the folder of the command first
