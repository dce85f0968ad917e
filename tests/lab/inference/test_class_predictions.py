"""Predictions of image files: preprocessing, classes and probabilities from the outside."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import bsam
from bsam.lab.config import Run
from bsam.lab.data.images import DecodeError
from bsam.lab.inference import predict
from bsam.lab.inference.predictions import file_paths
from bsam.lab.models import build
from bsam.lab.tasks.found import read_batches
from bsam.lab.training import Machine, RunCallbacks, fit
from helpers import draw_images

CLASSES = ("cat", "dog", "owl")
BILINEAR, BICUBIC = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# side of the network's images, of the shorter side before the crop, filter, mean and std, as timm has them
NETWORKS = {
    "timm:test_efficientnet": (24, 25, BICUBIC, *IMAGENET),  # 24 / 0.95
    "resnet8": (28, 32, BILINEAR, *IMAGENET),  # 28 / 0.875
}


def pixels_of(path, side, shorter, resample):
    """The middle of the resized image; files are 26 x 20 pixels, or 20 x 26."""
    image = Image.open(path).convert("RGB")
    scale = shorter / 20
    width, height = (int(scale * n) for n in image.size)
    found = np.asarray(image.resize((width, height), resample))
    top, left = round((height - side) / 2), round((width - side) / 2)
    return found[top : top + side, left : left + side]


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request, tmp_path_factory):
    """A run whose images and weights are gone, the images kept elsewhere, and the probabilities of the test images."""
    folder = tmp_path_factory.mktemp("prediction")
    images = draw_images(folder / "images", {"train": 4, "test": 2}, CLASSES)
    for path in images.glob("*/*/1.png"):  # upright ones, too
        Image.open(path).transpose(Image.Transpose.ROTATE_90).save(path)
    model, (side, shorter, resample, mean, std) = request.param, NETWORKS[request.param]
    torch.save(build(model, classes=5, seed=9).state_dict(), folder / "weights.pt")
    run = Run.of(
        "sgd", model=model, data=f"folder:{images}", image_size=side, batch=6, epochs=2, lr=0.005, label_smoothing=0
    )
    fit(
        replace(run, weights=str(folder / "weights.pt")),
        folder / "run",
        Machine("cpu"),
        callbacks=RunCallbacks(on_message=lambda _: None),
    )
    shutil.copytree(images / "test", folder / "test")
    shutil.rmtree(images)
    (folder / "weights.pt").unlink()
    paths = sorted((folder / "test").glob("*/*.png"))
    network = build(model, classes=3).eval()
    network.load_state_dict(load_file(folder / "run/model.safetensors"))
    pixels = np.stack([pixels_of(path, side, shorter, resample) for path in paths])
    x = (torch.from_numpy(pixels) / 255 - torch.tensor(mean)) / torch.tensor(std)
    with torch.no_grad():
        return folder / "run", paths, pixels, network(x.permute(0, 3, 1, 2)).double().softmax(1)


def test_probabilities_are_those_of_the_network_on_images_as_in_training(trained):
    run, paths, pixels, expected = trained
    found = predict(run, paths, top=3, device="cpu")
    assert [each.path for each in found] == paths
    for each, image, wanted in zip(found, pixels, expected, strict=True):
        assert np.array_equal(each.pixels, image)
        assert list(each.probabilities) == sorted(each.probabilities, reverse=True)
        probabilities = dict(zip(each.classes, each.probabilities, strict=True))
        assert [probabilities[name] for name in CLASSES] == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-6)


def test_the_test_images_were_evaluated_in_the_same_way(trained):
    run, paths, _, expected = trained
    truth = [CLASSES.index(path.parent.name) for path in paths]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] == pytest.approx(float(-expected[range(6), truth].log().mean()), rel=1e-3)
    right = sum(
        each.classes[0] == CLASSES[i] for each, i in zip(predict(run, paths, top=1, device="cpu"), truth, strict=True)
    )
    assert last["test_accuracy"] == right / 6


def test_a_run_trained_in_bf16_predicts_in_bf16(trained, tmp_path):
    run, paths, pixels, in_float = trained
    shutil.copytree(run, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps({**settings, "precision": "bf16"}))
    mean, std = NETWORKS[settings["model"]][3:]
    x = (torch.from_numpy(pixels) / 255 - torch.tensor(mean)) / torch.tensor(std)
    network = build(settings["model"], classes=3).eval()
    network.load_state_dict(load_file(run / "model.safetensors"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = network(x.permute(0, 3, 1, 2)).double().softmax(1)
    found = predict(tmp_path / "run", paths, device="cpu")
    for each, wanted in zip(found, expected, strict=True):
        probabilities = dict(zip(each.classes, each.probabilities, strict=True))
        assert [probabilities[name] for name in CLASSES] == pytest.approx(wanted.tolist(), rel=1e-5)
    assert (expected - in_float).abs().max() > 1e-4


def test_top_is_at_most_the_number_of_classes(trained):
    run, paths, *_ = trained
    assert [len(predict(run, paths[:1], top=top, device="cpu")[0].classes) for top in (1, 2, 3, 9)] == [1, 2, 3, 3]


def test_a_folder_stands_for_the_files_that_training_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in/b/2.png", "in/b/1.JFIF", "in/a", ".in/1.png", "elsewhere/3.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for name in ("in/.hidden.png", "in/.cache/1.png", "in/b/Thumbs.db", "in/desktop.ini"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("in/c").symlink_to(tmp_path / "elsewhere")
    Path("in/b/up").symlink_to(tmp_path / "in")  # a loop
    Path("in/d.png").symlink_to(tmp_path / "elsewhere/3.png")
    files = [Path(name) for name in ("in/a", "in/b/1.JFIF", "in/b/2.png", "in/c/3.png", "in/d.png")]
    assert list(file_paths("in")) == files
    assert list(file_paths(".in")) == [Path(".in/1.png")]
    paths = file_paths(["in/b/2.png", "in", "./in/a", "in/b/2.png", "in"])
    assert list(paths) == [files[2], *files[:2], *files[3:]]
    assert [path for path, is_named in paths.items() if is_named] == [files[2], files[0]]


def test_files_of_a_folder_that_are_no_images_are_left_out(trained, tmp_path):
    run, paths, *_ = trained
    shutil.copytree(paths[0].parents[1], tmp_path / "test")
    (tmp_path / "test/cat/0.png").rename(tmp_path / "test/cat/0")  # a name without a suffix
    (tmp_path / "test/cat/2.png").write_bytes(paths[0].read_bytes()[:200])  # a damaged image
    for name in ("0.txt", "1.txt", "2.txt"):
        (tmp_path / "test" / name).write_text("no image")
    told = []
    found = predict(run, tmp_path / "test", device="cpu", on_message=told.append)
    for each, wanted in zip(found, predict(run, paths, device="cpu"), strict=True):
        assert each.classes == wanted.classes
        assert each.probabilities == pytest.approx(wanted.probabilities, rel=1e-3, abs=1e-6)
    names = ", ".join(str(tmp_path / "test" / name) for name in ("0.txt", "1.txt", "2.txt"))
    assert told == [f"left out 4 of 10 files (cannot be decoded as images): {names}, ..."]
    with pytest.raises(bsam.BsamError, match=r"1\.txt"):
        predict(run, [tmp_path / "test", tmp_path / "test/1.txt"])
    (tmp_path / "texts").mkdir()
    (tmp_path / "test/0.txt").rename(tmp_path / "texts/0.txt")
    with pytest.raises(bsam.BsamError, match=r"folders.*0\.txt"):
        predict(run, tmp_path / "texts")


def test_batches_are_full_and_in_order_without_the_files_that_are_left_out():
    def read(path):
        if path.name in ("1", "4"):
            raise DecodeError("no image")
        return int(path.name)

    paths, told = {Path(str(n)): False for n in range(6)}, []
    batches = list(read_batches(paths, read, 3, told.append))
    assert batches == [[(Path(str(n)), n) for n in part] for part in ((0, 2, 3), (5,))]
    assert told == ["left out 2 of 6 files (cannot be decoded as images): 1, 4"]
    with pytest.raises(DecodeError):
        list(read_batches(paths | {Path("4"): True}, read, 3, told.append))
