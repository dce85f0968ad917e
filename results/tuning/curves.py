"""Train every candidate radius to the end, and write the score after each epoch: python results/tuning/curves.py NAME

NAME.json has them. Successive halving stops these same runs early, so the files tell what it would choose.
"""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bsam.lab.models import MODELS, ModelEntry
from bsam.lab.recipes.planning import TUNING_SEED
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Run, fit
from bsam.lab.training.environment import environment_info

FACTORS = (0.25, 0.5, 1, 2, 4, 8)
DIGITS = {"batch": 64, "epochs": 40, "eval_split": "validation"}
STUDIES: dict[str, dict[str, Any]] = {
    "digits-mlp": {**DIGITS, "model": "mlp"},
    "digits-conv": {**DIGITS, "model": "digits_net"},
    "fashion-mnist": {
        "data": "fashion_mnist",
        "model": "conv",
        "limit_train": 2000,
        "epochs": 20,
        "eval_split": "holdout",
    },
}
NOISE = (0.0, 0.4, 0.7)
RADII = {"sam": ["rho"], "bsam": ["rho_max", "rho_min"]}


def mlp(classes: int, channels: int) -> nn.Module:
    """Return a network without batch norm, with 64 hidden units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 64), nn.ReLU(), nn.Linear(64, classes))


def conv(classes: int, channels: int) -> nn.Module:
    """Return a small convolutional network with batch norm for images of 28 x 28 pixels."""
    layers: list[nn.Module] = []
    for before, after in ((channels, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 7 * 7, classes))


def train(study: str, noise: float, method: str, factor: float, seed: int, data_dir: Path | None) -> dict[str, Any]:
    """Train one candidate; return its scores after each epoch and its test accuracy after the last one, in %."""
    torch.set_num_threads(1)
    MODELS["mlp"] = ModelEntry("mlp", mlp, "MLP", 4810, 8, channels=1, memory_format=torch.contiguous_format)
    MODELS["conv"] = ModelEntry("conv", conv, "conv", 9_146, 28, channels=1, memory_format=torch.contiguous_format)
    settings = {**STUDIES[study], "seed": TUNING_SEED + seed}
    settings |= {"label_noise": noise, "noise_labels": "other"} if noise else {}
    run = Run.of(method, dict.fromkeys(RADII[method], 0.05 * factor), **settings)
    trainers: list[Any] = []
    result = fit(
        run,
        data_dir=data_dir,
        device="cpu",
        at_start=lambda trainer, _: trainers.append(trainer),
        on_message=lambda _: None,
    )
    task = Classification(run.changed(eval_split="test"), torch.device("cpu"), data_dir)
    test = task.evaluate(trainers[0].result_network.eval())["test_accuracy"]
    scores = [epoch.metrics[f"{run.eval_split}_accuracy"] for epoch in result.epochs]
    return {"scores": [round(100 * score, 3) for score in scores], "test": round(100 * test, 3)}


def main() -> None:
    """Train all candidates of a study, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISE)
    flags = parser.parse_args()
    cells = [(n, m, f, s) for s in range(flags.seeds) for n in flags.noise for m in RADII for f in FACTORS]
    rows = []
    out = flags.out or Path(__file__).with_name(f"{flags.study}.json")
    with ProcessPoolExecutor(1) as pool:
        for cell, numbers in zip(
            cells, pool.map(partial(train, flags.study, data_dir=flags.data_dir), *zip(*cells)), strict=True
        ):
            rows.append(dict(zip(("label_noise", "method", "factor", "seed"), cell, strict=True)) | numbers)
            print(cell, numbers["scores"][-1], numbers["test"], flush=True)
            if len(rows) % 12 == 0:
                out.write_text(json.dumps({"settings": STUDIES[flags.study], "runs": rows}))
    content = {
        "what": "score after each epoch on validation or held-out samples, and test accuracy after the last one, in %",
        "made": f"python results/tuning/curves.py {flags.study}, one thread",
        "machine": environment_info(),
        "settings": STUDIES[flags.study],
        "runs": rows,
    }
    text = json.dumps(content, indent=1)
    out.write_text(re.sub(r"(?<=[\[\d.,])\s+(?=[-\d\]])", " ", text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
