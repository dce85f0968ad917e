"""Finished runs of the task pose, on few drawings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsam.lab.config import Run
from bsam.lab.data.persons import LSP
from bsam.lab.tasks.pose import PoseInputs
from bsam.lab.training import Machine, RunCallbacks, fit

SIDE = 32  # of the network's inputs; crops of 44 pixels, 1.375 times as many, are stored
SETTINGS: dict[str, Any] = {
    "task": "pose",
    "model": "simcc_resnet8",
    "data": "stick_figures",
    "image_size": SIDE,
    "simcc_sigma": 3,
    "batch": 8,
    "epochs": 1,
    "lr": 0.02,
}


def draw_figures(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the data set ``stick_figures`` have this number of training images."""
    monkeypatch.setattr("bsam.lab.data.NUM_FIGURES", count)


def train_pose(folder: Path, **settings: Any) -> Path:
    """Train for an epoch on 16 drawings; returns the run directory."""
    with pytest.MonkeyPatch.context() as patch:
        draw_figures(16, patch)
        fit(
            Run.of("sgd", **{**SETTINGS, **settings}),
            folder,
            Machine("cpu"),
            callbacks=RunCallbacks(on_message=lambda _: None),
        )
    return folder


def write_predictions(folder: Path, persons: int = 3, side: int = SIDE) -> None:
    """Write what a run keeps for the report, at random; a joint of the second person is not labelled."""
    random = np.random.default_rng(len(folder.name))
    inputs = PoseInputs(side, 2.0, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), LSP)
    (folder / "pose.json").write_text(json.dumps(asdict(inputs)))
    truth = np.concatenate([random.uniform(0, side, (persons, 14, 2)), np.ones((persons, 14, 1))], axis=2)
    truth[1:2, 13] = 0
    np.savez_compressed(
        folder / "predictions.npz",
        pixels=random.integers(0, 256, (persons, side, side, 3), np.uint8),
        found=random.uniform(0, side, (persons, 14, 2)).astype(np.float32),
        truth=truth.astype(np.float32),
    )
