"""Human pose estimation: SimCC with the base optimizer Adam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..data import dataset_entry
from ..models import model_entry
from ..models.weight_loading import PRETRAINED
from ..tasks.pose import Pose
from ..tasks.pose_metrics import SCORES, PoseScore
from ..training.config import POSE, Run
from .columns import TableCell
from .experiments import Recipe
from .image_recipes import COMPARED
from .paper import POSE as PUBLISHED
from .scales import Scale
from .variants import arguments, variant_of, variants

# SimCC's authors evaluate with the flip test
_LARGE = {"model": "simcc_resnet50", "weights": PRETRAINED, "precision": "bf16", "compile": True, "flip_test": True}
SETTINGS: Mapping[str, Mapping[str, Any]] = {  # by scale, added to POSE
    "paper": {**_LARGE, "data": "mpii", "epochs": 210},
    "short": {**_LARGE, "data": "lspet", "epochs": 30},
    "smoke": {
        "model": "simcc_resnet8",
        "data": "stick_figures",
        "image_size": 24,
        "simcc_sigma": 2.0,
        "lr": 0.015,
        "batch": 8,
        "epochs": 4,
        "limit_train": 240,
        "limit_test": 100,
    },
}
MEASURES = (*Pose.groups, replace(Pose.measure, title="Mean"))
NOTES: Mapping[str, tuple[str, ...]] = {  # by score
    "PCK@0.2": (
        "PCK@0.2: the share of labelled joints found within 0.2 torsos, where a torso is the distance from left "
        "shoulder to right hip or, if that is not known, from right shoulder to left hip.",
        "A group is the mean over its joints. Mean counts all joints together. Persons whose torso is not known are "
        "left out.",
    ),
    "PCKh@0.5": (
        "PCKh@0.5: the share of labelled joints found within half a head size.",
        "A group is the mean over its joints. Mean counts all joints together, without pelvis and thorax.",
    ),
}


def pose(scale: Scale) -> list[Run]:
    """Return Adam, SAM, SAM at BSAM's total radius, and BSAM.

    The data is MPII; at the scale ``short`` it is LSP Extended, at ``smoke`` stick figures. The runs on photographs
    begin with pretrained weights from a file: see :func:`bsam.lab.recipes.run_settings.with_weights`.
    """
    settings = {**POSE, **SETTINGS[scale.name], "task": "pose"}
    # the paper does not state its radii for poses; we use those of CIFAR-10
    return [Run(variants()[name].method, arguments(variants()[name], "cifar10"), **settings) for name in COMPARED]


def by_method(run: Run) -> TableCell:
    """Place a run: a section per network and data set, a row per method; the columns are measures."""
    network, data = model_entry(run.model).title, dataset_entry(run.data).title
    return TableCell(f"{network} on {data}, {score_of_data(run.data).title} in %", variant_of(run).title, "")


def pose_notes(run: Run) -> Sequence[str]:
    """Return the lines below a table of runs on this data."""
    mean_pose = "Mean pose: each joint at its mean position in the boxes of the training set, without a network."
    return [*NOTES[score_of_data(run.data).title], mean_pose]


def score_of_data(data: str) -> PoseScore:
    """Return the score of a pose data set."""
    joints = dataset_entry(data).classes
    return next(score for skeleton, score in SCORES.items() if len(skeleton.joints) == joints)


POSE_RECIPE = Recipe(
    "pose",
    "Human pose estimation with SimCC",
    pose,
    by_method,
    published_table=PUBLISHED,
    figures=("skeletons", "training_curves"),
    notes=pose_notes,
    measures=MEASURES,
    tunable=True,
)
