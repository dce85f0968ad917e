"""The digest of a run's settings, which ends the name of its directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .run_config import Run

# A setting with this value is not in the digest, so that a new setting does not rename runs. The values were defaults
# when the settings were added, and never change, even if a default does.
OF_RUN: Mapping[str, Any] = {
    "arguments": {},
    "rho_warmup": 0.0,
    "rho_start": 0.0,
    "task": "classification",
    "model": "digits_net",
    "weights": None,
    "init": None,
    "freeze_backbone": False,
    "data": "digits",
    "image_size": None,
    "skip_corrupt": False,
    "augment": None,
    "limit_train": None,
    "limit_test": None,
    "eval_split": "test",
    "base": "sgd",
    "base_arguments": {},
    "lr": 0.05,
    "schedule": "cosine",
    "warmup": 0.0,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-3,
    "decay": "all",
    "epochs": 200,
    "batch": 128,
    "accumulate": 1,
    "clip_norm": None,
    "ema": None,
    "head_lr": None,
    "layer_decay": 1.0,
    "seed": 0,
    "precision": "fp32",
    "compile": False,
    "capture": True,
    "probe": None,
    "radius": None,  # now sharpness_rho
    "curvature": False,
    "surface": None,
}
OF_TASK: Mapping[str, Mapping[str, Any]] = {
    "classification": {
        "label_smoothing": 0.1,
        "label_noise": 0.0,
        "noise_labels": "other",  # the only kind of noise, once
        "weight_bits": None,
        "activation_bits": None,
        "first_last_bits": 8,
        "quantizer": "lsq",
        "fold_batch_norm": False,
        "perturb_scales": False,
    },
    "pose": {"simcc_k": 2.0, "simcc_sigma": 6.0, "flip_test": False},
}
#: the names of renamed settings in the digest, which are those in older run directories, by their names now
FORMER_NAMES: Mapping[str, str] = {
    item.name: item.metadata["digest"] for item in fields(Run) if item.metadata.get("digest") is not None
}


def digest(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return eight digits of a digest of the settings that are not defaults.

    Args:
        settings: from :meth:`Run.settings`.
        defaults: those of the settings of the task, for a task of your own.

    Example:
        >>> digest({"method": "sam", "arguments": {"rho": 0.1}, "task": "classification"}, {})
        'c8c55539'
    """
    frozen = {**defaults, **OF_RUN, **OF_TASK.get(settings["task"], {})}
    chosen: dict[str, Any] = {}
    for name, value in settings.items():
        key = FORMER_NAMES.get(name, name)
        if name == "method" or value != frozen[key]:
            chosen[key] = value
    if not settings.get("label_noise"):
        chosen.pop("noise_labels", None)  # without noise, it says nothing
    if settings["task"] == "pose":
        chosen["label_smoothing"] = 0.0  # runs of pose used to have it
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
