"""The file ``flatness.json``: measure the networks whose numbers are not in it yet."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.errors import BsamError, BsamRuntimeError
from ..common.progress import ProgressLine
from ..training.config import check_settings
from ..training.environment import environment_info
from ..training.files import reading, write_json
from .flatness_numbers import density_info, landscape_info, read_probe, spectrum_info
from .measure import FlatnessSettings, Measured, loss_of, measure
from .subjects import MeasuredModels

HINT = "remove flatness.json to measure again, or choose another folder"
LABELS = ("title", "group", "measured_on")  # of a figure, not measured
LOSS_RTOL = 1e-6  # relative difference within which two losses count as equal


def measured_entries(
    file: Path,
    settings: Mapping[str, Any],
    models: MeasuredModels,
    device: torch.device,
    options: FlatnessSettings,
) -> list[dict[str, Any]]:
    """Return the entry of each model, from the file if the model has not changed, otherwise measured now.

    The file is written after each model, so that an interrupted report can continue.
    """
    known = _known(file, settings)
    entries: list[dict[str, Any]] = []
    with ProgressLine() as line:
        line.reach("models", 0, len(models.paths))
        for path in models.paths:
            sha256 = hashlib.sha256(models.weights(path).read_bytes()).hexdigest()
            loaded = models.load(path, device)
            entry = next((old for old in known if (old["file"], old["sha256"]) == (str(path), sha256)), None)
            try:
                if entry is not None:
                    before, loss = entry["landscape"]["centre"], loss_of(*loaded, options)
                    if not math.isclose(loss, before, rel_tol=LOSS_RTOL):
                        changed = f"its loss was {before:.6g} and is {loss:.6g} now"
                        line.say(f"Measuring {path} again: {changed}. The loader or its data may have changed.")
                        entry = None
                if entry is None:
                    probe = {"probe": read_probe(path)} if (path / "probe.jsonl").exists() else {}
                    about = {**models.about(path), **probe, "architecture": _architecture(loaded[0])}
                    numbers = _numbers(measure(*loaded, options, line.reach), options.which)
                    entry = {"file": str(path), "sha256": sha256, **about, **numbers}
                    known = [*(old for old in known if old["file"] != str(path)), entry]
                    write_json(file, {"settings": settings, "environment": environment_info(), "models": known})
            except BsamError as error:
                raise BsamRuntimeError(f"{path}: {error}") from error
            entries.append(entry)
            line.reach("models", len(entries), len(models.paths))
    return entries


def _known(file: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the file; raise if they were measured with other settings."""
    if not file.exists():
        return []
    with reading(file, HINT):
        content = json.loads(file.read_bytes())
        theirs = dict(content["settings"])
        entries = [_with_nan(entry) for entry in content["models"]]
    check_settings(file.parent, theirs, settings)
    return entries


def _with_nan(value: Any) -> Any:
    """Return values read from JSON with NaN for null, which stands for non-finite numbers."""
    if isinstance(value, dict):
        return {k: _with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value


def _architecture(model: nn.Module) -> str:
    """Return a text that is equal for models whose class and whose parameters' names and shapes are equal."""
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return f"{type(model).__name__} {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"


def _numbers(measured: Measured, which: str) -> dict[str, Any]:
    """Return all numbers as plain values, from which the figures are drawn."""
    parts: dict[str, Any] = {
        "eigenvalues": spectrum_info({"": measured.eigenvalues}, which=which),
        "density": density_info({"": measured.density}),
        "landscape": landscape_info({"": measured.landscape}),
    }
    return {
        "parameters": measured.parameters,
        "samples": measured.samples,
        "seconds": dict(measured.seconds),
        "sharpness": asdict(measured.sharpness),
        "trace": asdict(measured.trace),
        **{name: {k: v for k, v in asdict(info).items() if k not in LABELS} for name, (info,) in parts.items()},
    }
