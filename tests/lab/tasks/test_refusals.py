"""Settings and data that a task cannot work with: the error names them, before data is read."""

from dataclasses import replace

import pytest
import torch

from bsam.common.errors import BsamError
from bsam.lab.config import Run
from bsam.lab.data.persons import LSP, MPII
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.tasks.classification import Classification
from bsam.lab.tasks.pose import Pose
from bsam.lab.training import Machine, fit
from pose_runs import draw_figures

CPU = torch.device("cpu")
CLASSES = Run("sgd")
POSE = Run.of("sgd", task="pose", model="simcc_resnet8", data="stick_figures", image_size=32)

SETTINGS = [
    (POSE, {"model": "resnet8"}, "pose network"),
    (POSE, {"model": "timm:test_resnet"}, "pose network"),
    (POSE, {"model": "resnet9"}, "resnet9"),
    (POSE, {"data": "digits"}, "--task classification"),
    (POSE, {"data": "folder:photos"}, "--task classification"),
    (POSE, {"data": "coco"}, "coco"),
    (POSE, {"label_smoothing": 0.1}, "label_smoothing"),
    (POSE, {"label_noise": 0.2}, "label_noise"),
    (POSE, {"eval_split": "validation"}, "validation"),
    (POSE, {"augment": "crop-flip"}, "augment"),
    (POSE, {"image_size": 30}, "side"),
    (POSE, {"image_size": 100, "model": "simcc_resnet50"}, "side"),
    (POSE, {"simcc_k": 1.01}, "k must"),
    (POSE, {"data": "lspet"}, "--data-dir"),
    *((POSE, {"simcc_k": value}, "simcc_k") for value in (0, -1.0, float("nan"), "2", 16.5)),
    *((POSE, {"simcc_sigma": value}, "simcc_sigma") for value in (0, float("inf"))),
    (CLASSES, {"simcc_k": 3.0}, "simcc_k"),
    (CLASSES, {"simcc_sigma": 3.0}, "simcc_sigma"),
    (CLASSES, {"flip_test": True}, "flip_test"),
    (CLASSES, {"model": "simcc_resnet8"}, "--model resnet8"),
    (CLASSES, {"data": "lspet"}, "--task pose"),
    (CLASSES, {"data": "mnist"}, "mnist"),
    (CLASSES, {"data": "cifar10", "model": "resnet8"}, "--data-dir"),
    (CLASSES, {"augment": "scale-rotate"}, "augment"),
    (POSE, {"augment": "timm:mixup=1"}, "augment"),
    (Run("sgd", batch=63), {"augment": "timm:mixup=1"}, "even batch"),
    (CLASSES, {"augment": "timm:aa=rand-m9"}, "bytes"),
    *((CLASSES, {"augment": f"timm:{names}"}, "augment") for names in ("", "cutmix", "mixup=0", "reprob=0.1")),
    *(
        (CLASSES, {"augment": f"timm:aa={name}"}, "RandAugment")
        for name in ("m9", "rand-x9", "rand-m", "augmix-m3", "rand-m9.5", "rand-n0", "rand-tfoo")
    ),
    *((CLASSES, {"augment": f"timm:mixup={alpha}"}, "mixup") for alpha in ("-1", "nan", "inf", "a", "1,mixup=1")),
    (CLASSES, {"limit_train": 641}, "limit_train.*640"),
    (CLASSES, {"limit_test": 758}, "limit_test.*757"),
    (CLASSES, {"limit_test": 401, "eval_split": "validation"}, "limit_test.*400"),
]


@pytest.mark.parametrize(("run", "changes", "word"), SETTINGS, ids=lambda value: str(value)[:30])
def test_settings(run, changes, word):
    with pytest.raises(BsamError, match=word):
        (Pose if run is POSE else Classification)(run.changed(**changes), CPU)


def hidden(data):
    """The same persons without labelled shoulders."""
    y = data.test.y.clone()
    y[:, 8:10] = 0
    return replace(data, test=replace(data.test, y=y))


FIGURES = stick_figures(4, side=32)
DATA = {
    "head_sizes": replace(FIGURES, skeleton=MPII),
    "score": replace(FIGURES, skeleton=replace(LSP, edges=())),
    "visible": hidden(FIGURES),
    "side must be": stick_figures(4, side=30),
    "leave image_size": FIGURES,
}


@pytest.mark.parametrize("words", DATA)
def test_persons(words):
    size = 64 if words == "leave image_size" else None
    with pytest.raises(BsamError, match=words):
        Pose(replace(POSE, image_size=size), CPU, data=DATA[words])


@pytest.mark.parametrize("limit", ["limit_train", "limit_test"])
def test_more_persons_than_there_are(limit):
    with pytest.raises(BsamError, match=limit):
        Pose(replace(POSE, **{limit: 5}), CPU, data=FIGURES)


RUNS = [
    (replace(POSE, method="saf", batch=4), "saf"),  # it compares logits of classes
    (replace(POSE, method="mesa", batch=4), "mesa"),
    (replace(CLASSES, limit_train=50, batch=64), "batch"),
    (replace(CLASSES, model="resnet9"), "resnet9"),
    (replace(CLASSES, model="timm:vit_tiny_patch16_224"), "1x8x8.*--image-size"),  # smaller than a patch
    (replace(CLASSES, model="timm:vit_tiny_patch16_224", image_size=24), "1x24x24.*--image-size"),  # would be cut
    (replace(CLASSES, model="vit-nano", image_size=9), "1x9x9.*--image-size"),
]


@pytest.mark.parametrize(("run", "word"), RUNS, ids=lambda value: str(value)[:30])
def test_runs(run, word, monkeypatch):
    draw_figures(8, monkeypatch)
    with pytest.raises(BsamError, match=word):
        fit(replace(run, epochs=1), machine=Machine("cpu"))


def test_a_set_that_the_data_does_not_have(small_cifar):
    run = Run("sgd", model="resnet8", data="cifar10", eval_split="validation")
    with pytest.raises(BsamError, match="validation"):
        Classification(run, CPU, small_cifar)
