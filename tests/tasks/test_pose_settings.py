"""Settings that pose or classification cannot work with are named, with what to do instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bsam.common.errors import BsamError
from bsam.data.pose.stick_figures import stick_figures
from bsam.tasks import TASKS
from bsam.tasks.pose import Pose
from bsam.training.config import Run
from bsam.training.loop import fit

CPU = torch.device("cpu")
POSE = Run("sgd", task="pose", model="simcc_resnet8", data="stick_figures", label_smoothing=0.0, image_size=32)
FINDERS = r"simcc_resnet8 \(on resnet8\), simcc_resnet50 \(on resnet50\)$"

REFUSED = [
    ({"model": "resnet8"}, rf"resnet8 does not find joints: use --model with one of {FINDERS}"),
    ({"model": "timm:test_resnet"}, rf"timm:test_resnet does not find joints: use --model with one of {FINDERS}"),
    ({"model": "resnet9"}, r"model must be one of .*simcc_resnet50.* got 'resnet9'"),
    (
        {"data": "digits"},
        r"digits has no joints: use --task classification, or --data with one of lspet, mpii, stick_figures$",
    ),
    ({"data": "folder:photos"}, r"folder:photos has no joints: use --task classification"),
    ({"data": "coco"}, r"data must be one of .*got 'coco'"),
    ({"label_smoothing": 0.1}, r"label_smoothing has no meaning for pose: leave it out \(its value must be 0.0; got"),
    ({"label_noise": 0.2}, r"label_noise has no meaning for pose: leave it out \(its value must be 0.0; got"),
    ({"eval_split": "validation"}, r"stick_figures has no validation set: set eval_split to test or holdout$"),
    ({"augment": "crop-flip"}, r"augment must be one of none, scale-rotate, scale-rotate-flip for pose; got 'crop-f"),
    ({"image_size": 30}, r"side must be a multiple of 4, .*; got 30$"),
    ({"image_size": 100, "model": "simcc_resnet50"}, r"side must be a multiple of 32, .*; got 100$"),
    ({"simcc_k": 1.01}, r"k must make side \* k, .*, a whole number; got 32 \* 1.01$"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_pose_cannot_work_with_is_refused_before_data_is_read(settings, words, monkeypatch):
    monkeypatch.setattr("bsam.tasks.pose._load", lambda *_: pytest.fail("it reads the data"))
    with pytest.raises(BsamError, match=words):
        Pose(replace(POSE, **settings), CPU)


def test_the_side_of_given_data_is_checked_too():
    with pytest.raises(BsamError, match=r"side must be a multiple of 4"):
        Pose(replace(POSE, image_size=None), CPU, data=stick_figures(4, side=30))
    with pytest.raises(BsamError, match=r"stick_figures is stored for inputs of 32 pixels: leave image_size 64 out"):
        Pose(replace(POSE, image_size=64), CPU, data=stick_figures(4, side=32))


CLASSES = Run("sgd")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"simcc_k": 3.0}, r"simcc_k has no meaning for classification: leave it out \(its value must be 2.0; got"),
        (
            {"simcc_sigma": 3.0},
            r"simcc_sigma has no meaning for classification: leave it out \(its value must be 6.0; got",
        ),
        (
            {"flip_test": True},
            r"flip_test has no meaning for classification: leave it out \(its value must be False; got",
        ),
        ({"model": "simcc_resnet8"}, r"simcc_resnet8 finds joints and has no classes: use --model resnet8$"),
        ({"data": "lspet"}, r"lspet has joints and no classes: use --task pose, or other data$"),
        ({"data": "stick_figures", "model": "simcc_resnet8"}, r"stick_figures has joints .*: use --task pose"),
        ({"augment": "scale-rotate"}, r"augment\w* must be one of none, .*got 'scale-rotate'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_classification_cannot_work_with_is_refused(settings, words):
    with pytest.raises(BsamError, match=words):
        TASKS["classification"](replace(CLASSES, **settings), CPU)


@pytest.mark.parametrize("name", ["simcc_k", "simcc_sigma"])
def test_bins_and_deviations_are_above_0(name):
    assert getattr(replace(POSE, **{name: 0.5}), name) == 0.5
    most = " and at most 16" if name == "simcc_k" else ""
    for value in (0, -1.0, float("nan"), float("inf"), "2", *([16.5] if most else [])):
        with pytest.raises(BsamError, match=f"{name} must be a finite number above 0{most}, got {value!r}"):
            replace(POSE, **{name: value})


@pytest.mark.parametrize("method", ["saf", "mesa"])
def test_methods_that_need_logits_are_refused(method, monkeypatch):
    monkeypatch.setattr("bsam.data.NUM_FIGURES", 8)
    run = replace(POSE, method=method, batch=8, epochs=1)
    with pytest.raises(BsamError, match=f"{method} .* logits"):
        fit(run, device="cpu")
