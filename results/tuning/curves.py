"""Train all candidates of --tune to the end: python results/tuning/curves.py STUDY [--data-dir FOLDER]

STUDY.json gets the score of each tuning run after each epoch, and its test accuracy after the last one. Halving stops
these same runs early, so that results/tuning/replay.py can tell what it chooses.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bsam.lab.models import MODELS, ModelEntry
from bsam.lab.recipes.tuning import base_candidates
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, Run, RunCallbacks, fit
from bsam.lab.training.machine import environment_info

FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # a wider grid than that of --tune, which is 0.5 to 4
RADII = {"sam": ("rho",), "bsam": ("rho_max", "rho_min")}
DIGITS = {"batch": 64, "epochs": 40, "eval_split": "validation"}
FASHION = {"data": "fashion_mnist", "limit_train": 2000, "epochs": 20, "eval_split": "holdout"}
STUDIES: dict[str, dict[str, Any]] = {
    "digits-mlp": {**DIGITS, "model": "mlp"},
    "digits-conv": {**DIGITS, "model": "digits_net"},
    "fashion-mnist": {**FASHION, "model": "conv"},
    "digits-base": {**DIGITS, "model": "mlp"},  # learning rate and weight decay of SGD, as for --tune-base
}
SEEDS = {"digits-mlp": 10, "digits-conv": 5, "fashion-mnist": 3, "digits-base": 3}


def mlp(classes: int, channels: int) -> nn.Module:
    """Return a network without batch norm for images of 8 x 8 pixels, with 64 hidden units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 64), nn.ReLU(), nn.Linear(64, classes))


def conv(classes: int, channels: int) -> nn.Module:
    """Return a small convolutional network with batch norm for images of 28 x 28 pixels."""
    layers: list[nn.Module] = []
    for before, after in ((channels, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 7 * 7, classes))


def candidates(study: str, noise: float, seed: int) -> list[tuple[dict[str, Any], Run]]:
    """Return the tuning runs of a seed, each with what tells it apart."""
    wrong = {"label_noise": noise, "noise_labels": "other"} if noise else {}
    settings = {**STUDIES[study], **wrong, "seed": 10_000 + seed}
    if study == "digits-base":
        sgd = Run.of("sgd", **settings)
        return [({"method": "sgd", **pair}, sgd.changed(**pair)) for pair in base_candidates(sgd)]
    return [
        ({"method": method, "factor": factor}, Run.of(method, dict.fromkeys(names, 0.05 * factor), **settings))
        for method, names in RADII.items()
        for factor in FACTORS
    ]


def train(run: Run, data_dir: Path | None) -> Mapping[str, Any]:
    """Train a run; return its scores after each epoch and its test accuracy after the last one, in %."""
    trainers: list[Any] = []
    callbacks = RunCallbacks(at_start=lambda trainer, _: trainers.append(trainer), on_message=lambda _: None)
    result = fit(run, machine=Machine("cpu", data_dir=data_dir), callbacks=callbacks)
    task = Classification(run.changed(eval_split="test"), torch.device("cpu"), data_dir)
    test = task.evaluate(trainers[0].result_network.eval())["test_accuracy"]
    scores = [epoch.metrics[f"{run.eval_split}_accuracy"] for epoch in result.epochs]
    return {"scores": [round(100 * score, 3) for score in scores], "test": round(100 * test, 3)}


def main() -> None:
    """Train all candidates of a study, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data-dir", type=Path)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    MODELS["mlp"] = ModelEntry("mlp", mlp, "MLP", 4810, 8, channels=1, memory_format=torch.contiguous_format)
    MODELS["conv"] = ModelEntry("conv", conv, "conv", 9146, 28, channels=1, memory_format=torch.contiguous_format)
    rows = []
    for seed in range(SEEDS[flags.study]):
        for noise in (0.0, 0.4) if flags.study == "fashion-mnist" else (0.0, 0.4, 0.7):
            for label, run in candidates(flags.study, noise, seed):
                rows.append({"label_noise": noise, "seed": seed, **label, **train(run, flags.data_dir)})
                print({name: value for name, value in rows[-1].items() if name != "scores"}, flush=True)
    write(Path(__file__).with_name(f"{flags.study}.json"), flags.study, rows)


def write(file: Path, study: str, rows: list[dict[str, Any]]) -> None:
    """Write the runs of a study."""
    content = {
        "what": "score after each epoch on validation or held-out samples, test accuracy after the last one, in %",
        "made": f"python results/tuning/curves.py {study}, one thread",
        "machine": environment_info(),
        "settings": STUDIES[study],
        "runs": rows,
    }
    text = json.dumps(content, indent=1)
    file.write_text(re.sub(r"(?<=[\[\d.,])\s+(?=[-\d\]])", " ", text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
