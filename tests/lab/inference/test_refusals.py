"""Runs and images without predictions: the error says which."""

import shutil

import numpy as np
import pytest
from PIL import Image

import bsam
from bsam.lab.inference import predict
from bsam.lab.training import Machine, Run, RunCallbacks, fit
from helpers import draw_images
from pose_runs import train_pose

BOXES = [  # of an image of 30 x 20 pixels
    ((1, 1, 1, 9), "right"),
    ((1, 9, 5, 1), "bottom"),
    ((1, 1, 5), "box"),
    ((1, 1, float("inf"), 5), "box"),
    ((1, 1, 1.5, 1.9), "pixel"),
    *((box, "outside") for box in ((29.5, 1, 50, 9), (1, 19.5, 9, 30), (-9, 1, -0.5, 9), (1, -9, 9, -0.5))),
    ((0, 0, 1e6, 1), "--box"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of pose, on image files and on digits, a run without its network, an image and a text."""
    folder = tmp_path_factory.mktemp("refusals")
    train_pose(folder / "pose")
    draw_images(folder / "birds", {"train": 2, "test": 1})
    files = Run("sgd", model="resnet8", data=f"folder:{folder / 'birds'}", image_size=8, batch=6, epochs=1)
    fit(files, folder / "classes", Machine("cpu"), callbacks=RunCallbacks(on_message=lambda _: None))
    fit(Run("sgd", epochs=1, limit_train=128, limit_test=10), folder / "digits", Machine("cpu"))
    shutil.copytree(folder / "pose", folder / "half")
    (folder / "half/model.safetensors").unlink()
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(folder / "a.png")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.mark.parametrize(("box", "word"), BOXES)
def test_boxes(box, word, folder):
    with pytest.raises(bsam.BsamError, match=word):
        predict(folder / "pose", folder / "a.png", box=box, device="cpu")


CALLS = [
    ("pose", ["a.png", "nowhere.png"], {}, r"nowhere\.png"),
    ("pose", ["a.png", "notes.txt"], {}, r"notes\.txt"),
    ("pose", [], {}, "no images"),
    ("pose", ["a.png", "notes.txt"], {"box": (1, 1, 9, 9)}, "one image"),
    ("half", ["a.png"], {}, "not finished"),
    ("classes", ["a.png", "nowhere.png"], {}, r"nowhere\.png"),
    ("classes", ["a.png", "notes.txt"], {}, r"notes\.txt"),
    ("classes", ["a.png"], {"top": 0}, "top"),
    ("classes", ["a.png"], {"top": 1.5}, "top"),
    ("pose", ["a.png"], {"top": 2}, r"task pose: leave out top \(--top\)"),
    ("classes", ["a.png"], {"flip_test": True}, r"task classification: leave out flip_test \(--flip-test\)"),
    ("digits", ["a.png"], {}, "classification, .*digits"),
    ("birds", ["a.png"], {}, "not a run directory"),
]


@pytest.mark.parametrize(("run", "images", "options", "word"), CALLS)
def test_calls(run, images, options, word, folder):
    with pytest.raises(bsam.BsamError, match=word):
        predict(folder / run, [folder / image for image in images], device="cpu", **options)
