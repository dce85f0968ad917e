"""Train the rows of digits.json: python results/shift/digits.py (about 40 minutes on two cores)

The settings are those of CIFAR-10 (the defaults of `Run`), except batch 64 and 40 epochs. docs/runs.md says how they
and the radii were chosen, and which rows were added later.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bsam
from bsam.lab.models import MODELS, ModelEntry
from bsam.lab.training import Machine, Run, fit
from bsam.lab.training.machine import environment_info

ROOT = Path(__file__).parents[2]
ShiftedSAM: Any = runpy.run_path(str(ROOT / "examples/shifted_start.py"))["ShiftedSAM"]
SETTINGS = {"label_noise": 0.8, "batch": 64, "epochs": 40}  # 72 % are wrong: one in ten draws is the true class
RADII = (0.1, 0.2, 0.25, 0.3, 0.4, 0.6)


class Control(ShiftedSAM):
    """SAM with another step of about the same length in place of the shift.

    Args:
        kind: ``plain``: along g, not normalised, and of length ``rho_min`` in the first step only; ``perturbed``: along
            the direction d = grad(w + rho u), normalised; ``random``: in a random direction; ``momentum``: u is added
            to d, so that it passes through the momentum, with the same length in total; ``early``: the shift itself,
            but only in the first 100 of 400 steps.
    """

    title = "control"

    def __init__(self, base, model, *, rho=0.05, rho_min=0.05, kind="plain"):
        super().__init__(base, model, rho=rho, rho_min=rho_min)
        self.kind, self.norm_at_start = kind, None
        self.generator = torch.Generator().manual_seed(0)  # a step resets the default generator

    def direction(self, L):
        """Return SAM's direction; with ``momentum``, plus the normalised gradient."""
        g = L.grad()
        d = L.grad(at=self.epsilon(g, "rho_max"))
        if self.kind == "plain":
            if self.norm_at_start is None:
                self.norm_at_start = g.norm()
            self.start_from(-self.epsilon(g, "rho_min", self.norm_at_start))
        elif self.kind == "perturbed":
            self.start_from(-self.epsilon(d, "rho_min"))
        elif self.kind == "random":
            noise = [torch.randn(p.shape, generator=self.generator) for p in self.params]
            self.start_from(self.epsilon(self.vector(noise), "rho_min"))
        elif self.kind == "momentum":
            group = self.param_groups[0]
            d = d + self.epsilon(g, "rho_min") * ((1 - group["momentum"]) / group["lr"])
        elif self.t < 100:
            self.start_from(-self.epsilon(g, "rho_min"))
        return d


class Traced:
    """Record |g|, |d| and their cosine in each step."""

    steps: list[list[float]]  # set for each run

    def direction(self, L):
        """Return the direction of the method, and record it."""
        passes, evaluate = [], L.grad
        L.grad = lambda *args, **named: passes.append(evaluate(*args, **named)) or passes[-1]
        d = super().direction(L)  # type: ignore[misc]
        g, norm = passes[0], d.norm()
        Traced.steps.append([float(g.norm()), float(norm), float(g.dot(d) / (g.norm() * norm))])
        return d


def mlp(classes: int, channels: int) -> nn.Module:
    """Return a network without batch norm, with 64 hidden units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 64), nn.ReLU(), nn.Linear(64, classes))


def register() -> None:
    """Add the methods and the network of this study."""
    MODELS["mlp"] = ModelEntry("mlp", mlp, "MLP", 4810, 8, channels=1, memory_format=torch.contiguous_format)
    for name, cls in {"sam": bsam.SAM, "bsam": bsam.BSAM, "shifted_sam": ShiftedSAM, "control": Control}.items():
        bsam.METHODS[name] = type(cls.__name__, (Traced, cls), {})


def rows() -> dict[str, dict[str, Any]]:
    """The settings of each row, by its name."""
    listed: dict[str, dict[str, Any]] = {"sgd": {"method": "sgd"}}

    def sam(rho: float, **settings: Any) -> dict[str, Any]:
        return {"method": "sam", "arguments": {"rho": rho}, **settings}

    def shifted(rho: float, shift: float) -> dict[str, Any]:
        return {"method": "shifted_sam", "arguments": {"rho": rho, "rho_min": shift}}

    def both(half: float, **settings: Any) -> dict[str, Any]:
        return {"method": "bsam", "arguments": {"rho_max": half, "rho_min": half}, **settings}

    for r in RADII:
        half = r / 2
        listed |= {f"sam {r}": sam(r), f"sam {r}, shift {half}": shifted(r, half)}
        listed |= {f"bsam {half} + {half}": both(half), f"released {half} + {half}": both(half)}
        listed[f"released {half} + {half}"]["arguments"]["start_from_min"] = True
    listed |= {"sam 0.1, shift 0.1": shifted(0.1, 0.1), "sam 0.2, shift 0.2": shifted(0.2, 0.2)}
    listed |= {f"sam {r}, shift 0.05": shifted(r, 0.05) for r in (0.3, 0.4, 0.6)}
    listed["sgd, shift 0.2"] = shifted(0.0, 0.2)
    for kind in ("plain", "perturbed", "random", "momentum", "early"):
        listed[f"sam 0.4, {kind}"] = {"method": "control", "arguments": {"rho": 0.4, "rho_min": 0.2, "kind": kind}}
    for name, setting in {"lr x 2": {"lr": 0.1}, "warm-up": {"warmup": 5}}.items():
        listed |= {f"sam 0.4, {name}": sam(0.4, **setting), f"bsam 0.2 + 0.2, {name}": both(0.2, **setting)}
    with_mlp = {
        "sgd": {"method": "sgd"},
        "sgd, shift 0.1": shifted(0.0, 0.1),
        "sam 0.1": sam(0.1),
        "sam 0.1, shift 0.1": shifted(0.1, 0.1),
        "sam 0.2": sam(0.2),
        "sam 0.2, shift 0.1": shifted(0.2, 0.1),
        "bsam 0.1 + 0.1": both(0.1),
        "released 0.1 + 0.1": listed["released 0.1 + 0.1"],
    }
    return listed | {f"mlp, {name}": {**settings, "model": "mlp"} for name, settings in with_mlp.items()}


def train(row: str, seed: int) -> dict[str, Any]:
    """Train one network, and return its numbers."""
    torch.set_num_threads(1)
    register()
    Traced.steps = []
    result = fit(Run(seed=seed, **SETTINGS, **rows()[row]), machine=Machine("cpu"))
    last = result.last.metrics
    steps = torch.tensor(Traced.steps or [[0.0, 0.0, 0.0]])
    return {
        "accuracy": last["test_accuracy"],
        "memorised": last["memorised"],
        "train_loss": [round(epoch.metrics["train_loss"], 4) for epoch in result.epochs],
        "trace": [[round(x, 4) for x in part.mean(0).tolist()] for part in steps.split(10)],  # per epoch
    }


def summary(results: dict[str, list[dict[str, Any]]], seeds: list[int]) -> dict[str, Any]:
    """The contents of the file: numbers by seed after the last epoch, and means over seeds by epoch."""
    of_rows, epochs = {}, {}
    for row, numbers in results.items():
        of_rows[row] = {
            **rows()[row],
            "accuracy": [round(n["accuracy"], 6) for n in numbers],
            "memorised": [round(n["memorised"], 4) for n in numbers],
            "train_loss": [n["train_loss"][-1] for n in numbers],
        }
        values = torch.tensor(
            [[n["train_loss"], *zip(*n["trace"], strict=True)] for n in numbers if len(n["trace"]) > 1]
        )
        if len(values):
            names = ("train_loss", "norm_g", "norm_d", "cosine_g_d")
            epochs[row] = dict(zip(names, values.mean(0).mul(1e4).round().div(1e4).double().tolist(), strict=True))
    return {
        "what": "test accuracy after the last epoch, share of wrong labels predicted, training loss; by epoch: "
        "means over seeds and the steps of an epoch",
        "made": "python results/shift/digits.py, one thread per run",
        "machine": environment_info(),
        "settings": SETTINGS,
        "seeds": seeds,
        "rows": of_rows,
        "epochs": epochs,
    }


def main() -> None:
    """Train all rows with all seeds in two processes, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    flags = parser.parse_args()
    seeds = list(range(10))
    jobs = [(row, seed) for seed in seeds for row in rows()]
    results: dict[str, list[dict[str, Any]]] = {row: [] for row in rows()}
    with ProcessPoolExecutor(2) as pool:
        for (row, seed), numbers in zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True):
            results[row].append(numbers)
            print(f"{row}, seed {seed}: {numbers['accuracy']:.4f}, train loss {numbers['train_loss'][-1]}", flush=True)
    text = json.dumps(summary(results, seeds), indent=1)
    flags.out.write_text(re.sub(r"(?<=[\[\d.,])\s+(?=[-\d\]])", " ", text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
