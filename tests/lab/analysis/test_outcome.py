"""When a run counts as one that learned nothing."""

import json

import pytest

from bsam.lab.analysis.outcome import failure, radius_warning
from bsam.lab.config import Run
from bsam.lab.training.run_dir import RunDir

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
        ((2.3, 2.29), 0.5, 2.29, None),  # 80 % of the labels are flipped
        ((0.5, 0.6), 0.9, 0.4, None),  # a network that was trained before: its loss may rise
        ((2.2, 0.5), 0.1, 0.4, None),  # few test samples
        ((9.0, 2.31), 0.12, 2.30, "accuracy 0.1200, 10 classes, loss 2.3 (2.303 by guessing). Try another --lr (now"),
        ((9.0, 8.0), 0.1, 7.0, "loss 7 (2.303 by guessing). Try a smaller --lr (now 0.05)."),
        ((2.31,), 0.3, 1.9, None),
    ],
)
def test_classification(losses, accuracy, test_loss, words, tmp_path):
    found = sentence(tmp_path, Run("sgd"), losses, test_accuracy=accuracy, test_loss=test_loss)
    assert found is None if words is None else words in found


def test_held_out_labels_that_are_flipped_do_not_count(tmp_path):
    run = Run.of("sgd", label_noise=0.8, eval_split="holdout")
    numbers = {"holdout_accuracy": 0.08, "holdout_clean_accuracy": 0.5, "holdout_loss": 2.4}
    assert sentence(tmp_path, run, (2.4, 2.3), **numbers) is None
    assert sentence(tmp_path, run, (2.4, 2.3), **{**numbers, "holdout_clean_accuracy": 0.08}) is not None


def test_pose_is_judged_by_its_loss_alone(tmp_path):
    run = Run.of("bsam", base="adam", lr=0.1, epochs=200, **POSE)
    assert sentence(tmp_path, run, (3.0, 2.9), test_pck=0.0, test_loss=9.0) is None
    again = Run.of("bsam", base="adam", lr=0.1, init="runs/first", **POSE)
    assert sentence(tmp_path, again, (3.0, 3.5), test_pck=0.0, test_loss=9.0) is None
    found = sentence(tmp_path, run, (3.0, 3.5), test_pck=0.0, test_loss=9.0)
    assert found == (
        "The training loss, 3.5, is not below that of the first epoch, 3. Try a smaller --lr (now 0.1), a smaller "
        "radius (now --set rho_max=0.05 rho_min=0.05) or --rho-warmup 50."
    )
    assert run.changed(rho_warmup=50).rho_warmup == 50
    for schedule in ({"rho_warmup": 20}, {"rho_start": 190}):  # with the late start, this warm-up would be refused
        found = sentence(tmp_path, run.changed(**schedule), (3.0, 3.5), test_pck=0.0, test_loss=9.0)
        assert found.endswith("or a smaller radius (now --set rho_max=0.05 rho_min=0.05).")


def test_pose_that_is_not_better_than_the_mean_pose(tmp_path):
    note = {"title": "mean pose, no network", "scores": {"pck": 0.39, "pck_head": 0.5}}
    (tmp_path / "baseline.json").write_text(json.dumps(note))
    run = Run.of("sam", base="adam", **POSE)
    found = sentence(tmp_path, run, (3.0,), test_pck=0.01, test_pck_head=0.0, test_loss=3.0)
    assert "no better than the baseline (mean pose, no network): pck 0.01 and 0.39" in found
    assert sentence(tmp_path, run, (3.0,), test_pck=0.4, test_pck_head=0.4, test_loss=3.0) is None


def test_classes_of_image_files_are_counted_in_the_directory(tmp_path):
    (tmp_path / "inputs.json").write_text(json.dumps({"class_names": ["cat", "dog", "owl"]}))
    run = Run("saf", data="folder:pets", model="resnet8")
    found = sentence(tmp_path, run, (1.2, 1.1), test_accuracy=0.3, test_loss=1.1)
    assert found == (
        "The network is no better than chance: accuracy 0.3000, 3 classes, loss 1.1 (1.099 by guessing). Try another "
        "--lr (now 0.05) or more epochs."
    )


def test_gradients_that_are_not_finite_say_nothing_of_the_radius():
    reading = {"step": 0, "g_norm": 1.0, "g_max_norm": 9.0, "rho_max": 1.0, "extra_passes": 1}
    run = Run("sam")
    assert radius_warning(run, [reading]) is not None
    for name in ("g_norm", "g_max_norm"):
        assert radius_warning(run, [{**reading, name: None}]) is None
    assert radius_warning(run, [{**reading, "extra_passes": 2}]) is None
    assert radius_warning(Run("sam", init="runs/first"), [reading]) is None  # small gradients, as it fits already
