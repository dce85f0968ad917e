"""When a run counts as one that learned nothing."""

import json
import math

import pytest

from bsam.report.outcome import failure, radius_warning
from bsam.training.config import Run
from bsam.training.run_dir import RunDir

POSE = {"task": "pose", "data": "stick_figures", "model": "simcc_resnet8"}


def sentence(folder, run, losses, **last):
    rows = [{"epoch": i + 1, "seconds": 1.0, "train_loss": loss, **last} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return failure(run, RunDir(folder))


@pytest.mark.parametrize(
    ("losses", "accuracy", "test_loss", "words"),
    [
        ((2.2, 0.5), 0.9, 0.4, None),
        ((2.2, 0.5), 0.9, 3.0, None),  # flipped labels: the test loss of a good network may be high
        ((2.4, 2.31), 0.3, 2.1, None),  # the mean over the epoch is high, the network at its end is not
        ((2.2, 0.5), 0.1, 0.4, "accuracy 0.1000, 10 classes"),
        ((9.0, 2.31), 0.12, 2.30, f"loss 2.3, and {math.log(10):.4g} by guessing"),
        ((0.5, 0.5), 0.9, 0.4, "The training loss, 0.5, is not below that of the first epoch, 0.5."),
        ((2.31,), 0.3, 1.9, None),  # one epoch has none to compare with
    ],
)
def test_classification(losses, accuracy, test_loss, words, tmp_path):
    found = sentence(tmp_path, Run("sgd"), losses, test_accuracy=accuracy, test_loss=test_loss)
    assert found is None if words is None else words in found


def test_pose_is_judged_by_its_loss_alone(tmp_path):
    run = Run("bsam", base="adam", lr=0.1, **POSE)
    assert sentence(tmp_path, run, (3.0, 2.9), test_pck=0.0, test_loss=9.0) is None
    found = sentence(tmp_path, run, (3.0, 3.5), test_pck=0.0, test_loss=9.0)
    assert found == (
        "The training loss, 3.5, is not below that of the first epoch, 3. Try a smaller --lr (now 0.1) or a smaller "
        "radius (now --set rho_max=0.05 rho_min=0.05)."
    )


def test_classes_of_image_files_are_counted_in_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(RunDir, "note", lambda self, name: {"inputs": {"class_names": ["cat", "dog", "owl"]}}[name])
    run = Run("saf", data="folder:pets", model="resnet8")
    found = sentence(tmp_path, run, (1.2, 0.9), test_accuracy=0.3, test_loss=0.9)
    assert found == (
        "The network is not better than chance: accuracy 0.3000, 3 classes. Try a smaller --lr (now 0.05)."
    )


def test_gradients_that_are_not_finite_say_nothing_of_the_radius():
    reading = {"step": 0, "g_norm": 1.0, "g_max_norm": 9.0, "rho_max": 1.0, "extra_passes": 1}
    assert radius_warning([reading]) is not None
    for name in ("g_norm", "g_max_norm"):
        assert radius_warning([{**reading, name: None}]) is None
    assert radius_warning([{**reading, "extra_passes": 2}]) is None
