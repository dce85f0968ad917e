import argparse
import copy
import pickle
from dataclasses import dataclass, replace

import pytest

from bsam import BsamError
from bsam.lab.cli.run_flags import add_run_flags, run_of
from bsam.lab.config import ClassificationSettings, PoseSettings, Preset, Run, TaskSettings, setting
from bsam.lab.data.augment import AUGMENTATIONS, EXAMPLE
from bsam.lab.data.pose_augment import POSE_AUGMENTATIONS
from bsam.lab.recipes.compare import compared_runs

PLAIN = {"base": "sgd", "lr": 0.05, "weight_decay": 1e-3, "decay": "all", "batch": 128, "epochs": 200}
FINE_TUNED = {**PLAIN, "epochs": 30, "lr": 0.01, "weight_decay": 1e-4, "label_smoothing": 0.0}
QUANTIZED = {**PLAIN, "epochs": 60, "lr": 0.01, "weight_decay": 1e-4, "label_smoothing": 0.1}
ADAMW = {**PLAIN, "base": "adamw", "lr": 1e-3, "weight_decay": 0.05, "decay": "weights"}
POSE = {**PLAIN, "base": "adam", "lr": 1e-3, "weight_decay": 0.0, "batch": 64, "epochs": 140}
POSE_WITH_SGD = {**PLAIN, "batch": 64, "epochs": 140}
CASES = [  # the given settings, and what follows
    ({}, PLAIN),
    ({"base": "adamw"}, ADAMW),
    ({"base": "AdamW"}, ADAMW),
    ({"base": "adam"}, {**PLAIN, "base": "adam"}),
    ({"weights": "a.pt"}, FINE_TUNED),
    ({"weights": None}, PLAIN),
    ({"weights": "a.pt", "base": "adamw"}, {**ADAMW, "epochs": 30, "label_smoothing": 0.0}),
    ({"weight_bits": 4}, QUANTIZED),
    ({"weight_bits": 4, "weights": "a.pt"}, QUANTIZED),
    ({"task": "pose"}, POSE),
    ({"task": "pose", "weights": "a.pt"}, POSE),
    ({"task": "pose", "base": "sgd"}, POSE_WITH_SGD),
    ({"task": "pose", "base": "adamw"}, {**ADAMW, "batch": 64, "epochs": 140}),
    # given values win, even those that are defaults
    ({"weights": "a.pt", "label_smoothing": 0.1, "lr": 0.05}, {**FINE_TUNED, "label_smoothing": 0.1, "lr": 0.05}),
    ({"base": "adamw", "decay": "all"}, {**ADAMW, "decay": "all"}),
    ({"task": "pose", "lr": 0.05, "epochs": 200}, {**POSE, "lr": 0.05, "epochs": 200}),
]


def chosen(run, expected):
    return {name: value for name, value in run.settings().items() if name in expected}


@pytest.mark.parametrize(("given", "expected"), CASES, ids=str)
def test_presets_are_the_same_from_python_and_the_command(given, expected):
    run = Run.of("sam", **given)
    assert chosen(run, expected) == expected
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    given = {"task": "classification", "model": "resnet8", **given}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    assert chosen(run_of(parser.parse_args(["--method", "sam", *flags])), expected) == expected


def test_settings_of_a_task_given_as_an_object_count_as_given():
    assert Run("sam", task=ClassificationSettings(), weights="a.pt").task.label_smoothing == 0.0
    assert Run("sam", task=ClassificationSettings(label_smoothing=0.1), weights="a.pt").task.label_smoothing == 0.1
    assert chosen(Run("sam", task=ClassificationSettings(weight_bits=4)), QUANTIZED) == QUANTIZED
    assert chosen(Run("sam", task=PoseSettings()), POSE) == POSE


def test_the_method_sgd_gives_its_base_optimizer():
    for method in ("sgd", "SGD"):
        assert chosen(Run.of(method, task="pose"), POSE_WITH_SGD) == POSE_WITH_SGD
    assert chosen(Run.of("base", task="pose"), POSE) == POSE
    with pytest.raises(BsamError, match='set method to "base"'):
        Run.of("sgd", task="pose", base="adam")


def test_all_methods_of_a_comparison_share_their_base_optimizer_and_its_settings():
    pose = {"task": "pose", "data": "stick_figures", "model": "simcc_resnet8"}
    for methods, expected in ((["base", "sam"], POSE), (["sam", "SGD"], POSE_WITH_SGD)):
        runs = compared_runs(methods, pose).values()
        assert [chosen(run, expected) for run in runs] == [expected, expected]


def test_a_copy_of_a_run_keeps_all_its_settings():
    """Nothing follows from a setting that is changed later."""
    run = Run("sam", lr=0.3)
    assert replace(run, base="adamw").lr == run.changed(base="adamw").lr == 0.3
    assert replace(run, base="adamw").decay == run.changed(base="adamw").decay == "all"
    assert replace(run, weights="a.pt").task.label_smoothing == 0.1
    assert run.changed(weights="a.pt") == replace(run, weights="a.pt")
    assert (
        Run.of(
            **run.settings(),
        )
        .changed(weight_bits=4)
        .epochs
        == 200
    )
    for copied in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run), copy.copy(run)):
        assert copied == run
        assert replace(copied, base="adamw").decay == "all"


def test_a_task_given_to_two_runs_is_not_changed():
    task = ClassificationSettings(label_noise=0.2)
    assert Run("sam", task=task, weights="a.pt").task.label_smoothing == 0.0
    assert Run("sam", task=task).task.label_smoothing == task.label_smoothing == 0.1


@dataclass(frozen=True)
class OwnSettings(TaskSettings):
    name = "own"
    presets = (
        Preset(base="adamw", epochs=30, width=4),
        Preset(when={"base": "adamw"}, lr=3e-3, weight_decay=0.01),
        Preset(when={"width": 4, "depth": 2}, batch=16),
    )
    width: int = setting(8, "channels")
    depth: int = setting(2, "stages")


def test_conditions_hold_for_what_another_preset_sets_and_for_defaults():
    run = Run("sam", task=OwnSettings())
    assert (run.base, run.epochs, run.batch, run.task.width) == ("adamw", 30, 16, 4)
    assert (run.lr, run.weight_decay, run.decay) == (1e-3, 0.05, "weights")  # those for all tasks come last
    assert Run("sam", task=OwnSettings(8)).batch == 128
    assert Run("sam", task=OwnSettings(depth=3)).batch == 128
    assert (Run("sam", task=OwnSettings(), base="sgd").lr, Run("sgd", task=OwnSettings()).lr) == (0.05, 0.05)


@pytest.mark.parametrize(
    ("preset", "word"),
    [
        (Preset(widht=8), "widht"),
        (Preset(when={"optimizer": "sgd"}, lr=0.1), "optimizer"),
        (Preset(lr=-1.0), "lr"),
        (Preset(base="sdg"), "base"),
    ],
)
def test_presets_are_checked(preset, word):
    @dataclass(frozen=True)
    class WrongSettings(TaskSettings):
        name = "wrong"
        presets = (preset,)

    with pytest.raises(BsamError, match=word):
        Run("sam", task=WrongSettings())


def test_the_help_names_all_augmentations():
    text = Run.__dataclass_fields__["augment"].metadata["help"]
    of_images, of_poses = text.split("; for pose ")
    assert of_images == ", ".join(AUGMENTATIONS)
    assert of_poses.startswith(f"{', '.join(POSE_AUGMENTATIONS)}; {EXAMPLE}, or")


def test_a_float_and_a_heading_need_no_arguments():
    field = setting(0.5, "a share")
    assert field.metadata["heading"] == "Task"
    with pytest.raises(BsamError, match="share must be a finite number"):
        field.metadata["check"]("share", "much")
