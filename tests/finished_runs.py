"""Directories of finished runs, without training."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save

from bsam.flatness.probe import Reading
from bsam.lab.recipes.plan import state_of
from bsam.lab.recipes.variants import variant_of, variants
from bsam.lab.training.run_dir import RunState, run_dir_name
from pose_runs import write_predictions

SCORES = {
    "classification": ["accuracy"],
    "pose": ["pck_head", "pck_shoulder", "pck_elbow", "pck_wrist", "pck_hip", "pck_knee", "pck_ankle", "pck"],
}
BASELINE = {"title": "mean pose, no network", "scores": {name: 0.1 * i for i, name in enumerate(SCORES["pose"], 1)}}


def accuracy_of(run):
    """Another one for each seed, known beforehand."""
    return 0.9 + 0.01 * run.seed - 0.1 * run.settings().get("label_noise", 0.0)


def place_of(run):
    """Of the method, in the list of all."""
    return [*variants(), "adam", "adamw"].index(variant_of(run).name)


def finished_run(run, out=Path("out")):
    """The state of a finished run. Epochs before the last one are better: the last one is reported.

    The share of memorised labels tells the method and the seed. Of several scores each is 0.01 below the one before.
    """
    place, scores = place_of(run), [f"{run.eval_split}_{name}" for name in SCORES[run.task.name]]
    has_noise = bool(run.settings().get("label_noise"))
    epochs = [
        {
            "epoch": e + 1,
            "train_loss": 2.0 / (e + 1),
            "test_loss": 1.0 / (e + 1),
            "seconds": 2.0,
            **dict.fromkeys(scores, 0.99),
            **({"memorised": (e + 1) / run.epochs * (place / 100 + run.seed / 1000)} if has_noise else {}),
        }
        for e in range(run.epochs)
    ]
    epochs[-1].update({name: accuracy_of(run) - 0.01 * i for i, name in enumerate(scores)})
    return RunState(run, out / run_dir_name(run), tuple(epochs), finished=True)


def write_run(run, out):
    """Write the directory of a finished run; returns its state."""
    state = finished_run(run, out)
    state.path.mkdir()
    content = save({"weight": torch.ones(2)})
    machine = {"device": "cpu", "torch": "2", "bsam": "1", "date": f"2026-11-1{run.seed}T00:00:00+00:00"}
    reading = {**dict.fromkeys(Reading.__dataclass_fields__, 1.0), "cosine": float(run.seed), "extra_passes": 0}
    base = place_of(run) / 10 + run.seed / 1000
    flatness = {"run_dir": state.path.name, "sha256": hashlib.sha256(content).hexdigest(), "samples": 256}
    flatness["eigenvalues"] = {"maximum": 10 + base, "converged": True}
    if run.surface:
        loss = [[3.0] * 3, [base + 1, base, base + 1], [3.0] * 3]
        flatness["landscape"] = {"axis": [-1.0, 0.0, 1.0], "loss": loss}
    files = {
        "config.json": run.settings(),
        "environment.json": [machine],
        **({"baseline.json": BASELINE} if run.task.name == "pose" else {}),
        **({"flatness.json": {"models": [flatness]}} if run.curvature else {}),
    }
    lines = {
        "metrics.jsonl": state.epochs,
        **({"probe.jsonl": [{**reading, "step": s} for s in range(4)]} if run.probe else {}),
    }
    for name, value in files.items():
        (state.path / name).write_text(json.dumps(value))
    for name, rows in lines.items():
        (state.path / name).write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    (state.path / "model.safetensors").write_bytes(content)
    if run.task.name == "pose":
        write_predictions(state.path)
    return state_of(run, out)
