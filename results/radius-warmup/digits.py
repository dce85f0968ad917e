"""Train the rows of digits.json: python results/radius-warmup/digits.py --workers 12

Accuracy against the radius, with constant radii, with radii that rise from 0 over the first quarter of the training
(warmup), and with plain steps in the first quarter (start). The settings are those of CIFAR-10 (the defaults of `Run`),
except batch 64 and 40 epochs. Finished runs are in --log, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bsam.lab.models import MODELS, ModelEntry
from bsam.lab.training import Machine, Run, fit
from bsam.lab.training.machine import environment_info

SETTINGS: dict[str, Any] = {"batch": 64, "epochs": 40}
SCHEDULES: dict[str, dict[str, float]] = {"constant": {}, "warmup": {"rho_warmup": 10.0}, "start": {"rho_start": 10.0}}
RADII = (0.05, 0.1, 0.2, 0.4, 0.8)
NETWORKS = ("mlp", "digits_net", "transformer")
WRONG = (0.0, 0.4, 0.7)
NEW = ("functional_sam", "saner", "vasso", "crsam", "sam-ascent")
SEEDS = range(10)
COLUMNS = ("network", "wrong", "method", "radius", "schedule")


class Transformer(nn.Sequential):
    """One pre-norm block of attention over the eight rows of an image, without dropout."""

    def __init__(self, classes: int, channels: int, width: int = 32) -> None:
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        super().__init__(nn.Linear(8 * channels, width), block, nn.Flatten(), nn.Linear(8 * width, classes))
        self.position = nn.Parameter(0.02 * torch.randn(8, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        rows = self[0](x.permute(0, 2, 1, 3).flatten(2))
        return self[3](self[2](self[1](rows + self.position)))


def mlp(classes: int, channels: int) -> nn.Module:
    """Return a network with 64 hidden units, without normalization."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 64), nn.ReLU(), nn.Linear(64, classes))


def register() -> None:
    """Add the networks of this study."""
    entry = partial(ModelEntry, images=8, channels=1, memory_format=torch.contiguous_format)
    MODELS["mlp"] = entry("mlp", mlp, "MLP", 4_810)
    MODELS["transformer"] = entry("transformer", Transformer, "Transformer", 11_658)


def arguments(method: str, radius: float | None) -> tuple[str, dict[str, Any]]:
    """The method and its arguments. BSAM's radius is the sum of its two; SANER's ramp is a quarter of the steps."""
    if radius is None:
        return method, {}
    if method == "bsam":
        return method, {"rho_max": radius / 2, "rho_min": radius / 2}
    further = {"saner": {"ramp": 100}, "sam-ascent": {"ascent": 0.25}}.get(method, {})
    return method.removesuffix("-ascent"), {"rho": radius, **further}


def rows() -> list[tuple[Any, ...]]:
    """The values of COLUMNS in each row."""
    methods = [("sgd", None, None)]
    methods += [(method, radius, name) for method in ("sam", "bsam") for radius in RADII for name in SCHEDULES]
    listed = [(network, wrong, *method) for network in NETWORKS for wrong in WRONG for method in methods]
    new = [(method, radius, "constant") for method in NEW for radius in (0.1, 0.2, 0.4)]
    return listed + [(network, 0.4, *method) for network in NETWORKS for method in new]


def train(row: tuple[Any, ...], seed: int) -> float:
    """Train one network, and return its test accuracy after the last epoch."""
    network, wrong, method, radius, schedule = row
    torch.set_num_threads(1)
    register()
    settings = {**SETTINGS, **SCHEDULES.get(schedule, {}), "seed": seed, "model": network}
    settings |= {"label_noise": wrong, "noise_labels": "other"} if wrong else {}
    run = Run.of(*arguments(method, radius), **settings)
    return float(fit(run, machine=Machine("cpu")).last.metrics["test_accuracy"])


def main() -> None:
    """Train what is missing, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--log", type=Path, default=Path("digits-warmup.jsonl"), help="finished runs")
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    lines = flags.log.read_text(encoding="utf-8").splitlines() if flags.log.exists() else []
    done = {(*row, seed): accuracy for *row, seed, accuracy in map(json.loads, lines)}
    missing = [(row, seed) for seed in SEEDS for row in rows() if (*row, seed) not in done]
    with ProcessPoolExecutor(flags.workers) as pool, flags.log.open("a", encoding="utf-8") as log:
        jobs = {pool.submit(train, row, seed): (*row, seed) for row, seed in missing}
        for number, job in enumerate(as_completed(jobs), 1):
            done[jobs[job]] = round(job.result(), 6)
            log.write(json.dumps([*jobs[job], done[jobs[job]]]) + "\n")
            log.flush()
            print(f"{number} of {len(jobs)}: {jobs[job]} {done[jobs[job]]:.4f}", flush=True)
    content = {
        "what": "test accuracy after the last epoch, by seed; the radius of BSAM is the sum of its two",
        "made": "python results/radius-warmup/digits.py, one thread per run",
        "machine": environment_info(),
        "settings": {**SETTINGS, "noise_labels": "other", "schedules": SCHEDULES},
        "seeds": list(SEEDS),
    }
    table = [
        {**dict(zip(COLUMNS, row, strict=True)), "accuracy": [done[*row, seed] for seed in SEEDS]} for row in rows()
    ]
    head = json.dumps(content, indent=1).removesuffix("\n}")
    text = ",\n  ".join(json.dumps(row) for row in table)
    flags.out.write_text(f'{head},\n "rows": [\n  {text}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
