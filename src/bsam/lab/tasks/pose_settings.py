"""The settings of pose estimation, and checks of the other settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...common.errors import BsamValueError
from ..data.pose.pose_augment import POSE_AUGMENTATIONS
from ..models import MODELS, model_entry
from .settings import TaskSettings, check_positive, refuse_settings, setting

POSE = {  # as SimCC's authors use for MPII, except for the schedule and the epochs: they train for 210
    "base": "adam",
    "lr": 1e-3,
    "weight_decay": 0.0,
    "batch": 64,
    "epochs": 140,
    "label_smoothing": 0.0,
}
MAX_BINS = 16  # per pixel; the last layers grow with this number


@dataclass(frozen=True, kw_only=True)
class PoseSettings(TaskSettings):
    """The settings of pose estimation."""

    simcc_k: float = setting(
        2.0, f"number of SimCC bins per pixel, at most {MAX_BINS}", "Pose", partial(check_positive, high=MAX_BINS)
    )
    simcc_sigma: float = setting(6.0, "standard deviation of SimCC's labels, in bins", "Pose", check_positive)
    flip_test: bool = setting(
        False, "average the probabilities of each image and its mirror image in evaluation", "Pose"
    )


def check_pose_settings(run: PoseSettings) -> None:
    """Raise if the network is not a pose network, or a setting has no meaning for pose."""
    if model_entry(run.model).backbone is None:
        names = ", ".join(f"{entry.name} (on {entry.backbone})" for entry in MODELS.values() if entry.backbone)
        raise BsamValueError(f"{run.model} is not a pose network: set --model to one of {names}")
    if run.eval_split == "validation":
        raise BsamValueError(f"{run.data} has no {run.eval_split} set: set eval_split to test or holdout")
    if run.augment is not None and run.augment not in POSE_AUGMENTATIONS:
        raise BsamValueError(f"augment must be one of {', '.join(POSE_AUGMENTATIONS)} for pose; got {run.augment!r}")
    refuse_settings("pose", run, {"label_smoothing": 0.0, "label_noise": 0.0, "weight_bits": None})
