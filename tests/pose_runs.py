"""Finished runs of the task pose, on few drawings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bsam.training.config import Run
from bsam.training.loop import fit

SIDE = 32  # of the network's inputs; crops of 44 pixels, 1.375 times as many, are stored
SETTINGS: dict[str, Any] = {
    "task": "pose",
    "model": "simcc_resnet8",
    "data": "stick_figures",
    "image_size": SIDE,
    "simcc_sigma": 3,
    "label_smoothing": 0,
    "batch": 8,
    "epochs": 1,
    "lr": 0.02,
}


def train_pose(folder: Path, **settings: Any) -> Path:
    """Train for an epoch on 16 drawings; returns the run directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bsam.data.NUM_FIGURES", 16)
        fit(Run("sgd", **{**SETTINGS, **settings}), folder, device="cpu", tell=lambda _: None)
    return folder
