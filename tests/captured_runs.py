"""Runs with captured steps, for the tests with CUDA graphs and for those with recorded operations.

Two epochs should have sixteen steps or more: the radius warm-ups end, and the late starts are, within these.
"""

from __future__ import annotations

import torch

from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.methods import METHODS

SAME = {"lr": 0.05, "batch": 64, "label_smoothing": 0.1, "epochs": 2, "seed": 4}
ARGUMENTS = {
    "asam": {"rho": 0.5},
    "ksam": {"k": 32},
    "gsam": {"rho_floor": 0.01},
    "saf": {"start_epoch": 0, "epochs_back": 1},
    "mesa": {"start_epoch": 0},
}
ADAMW = {**SAME, "base": "adamw", "lr": 3e-3, "weight_decay": 1e-3, "decay": "all"}
FLOOR = {"rho_max": 0.2, "rho_min": 0.2, "rho_min_floor": 0.0}
RUNS = {
    "sgd": Run.of("sgd", **SAME),
    **{name: Run.of(name, ARGUMENTS.get(name, {}), **SAME) for name, method in METHODS.items() if method.capturable},
    "nesterov": Run.of("sam", nesterov=True, **SAME),
    "sam with a floor": Run.of("sam", {"rho": 0.2, "rho_floor": 0.02}, **SAME),
    "bsam with a floor": Run.of("bsam", FLOOR, **SAME),
    "bsam-2": Run.of("bsam", {**FLOOR, "passes": 2}, **SAME),
    "bsam every second step": Run.of("bsam", {**FLOOR, "passes": 2, "every": 2}, **SAME),
    "bsam as released": Run.of("bsam", {"start_from_min": True}, **SAME),
    "sam on a share": Run.of("sam", {"rho": 0.2, "ascent": 0.25}, **SAME),
    "sam, warm-up": Run.of("sam", {"rho": 0.5}, rho_warmup=1.5, **SAME),
    "sam, late": Run.of("sam", {"rho": 0.5, "rho_floor": 0.1}, rho_start=0.7, rho_warmup=0.8, **SAME),
    "bsam, warm-up": Run.of("bsam", FLOOR, rho_warmup=1.5, **SAME),
    "bsam-2, late": Run.of("bsam", {**FLOOR, "passes": 2}, rho_start=0.7, rho_warmup=0.8, **SAME),
    "looksam, warm-up": Run.of("looksam", {"rho": 0.3}, rho_warmup=1.5, **SAME),
    "looksam, late": Run.of("looksam", {"rho": 0.3, "k": 2}, rho_start=0.7, rho_warmup=0.8, **SAME),
    "saner, ramp": Run.of("saner", {"rho": 0.3, "ramp": 8}, **SAME),
    "rst, late": Run.of("rst", {"rho": 0.3}, rho_start=0.7, rho_warmup=0.8, **SAME),
    "augmented": Run.of("sam", augment="crop-flip", **SAME),
    "adamw": Run.of("base", **ADAMW),
    "bsam on adamw": Run.of("bsam", FLOOR, **ADAMW),
}


def kinds_of_steps(run: Run) -> int:
    """Return how many kinds of steps a run has: some methods take two in turn, and there may be plain ones before."""
    two = run.method in ("looksam", "rst", "saf", "mesa") or "every" in run.arguments
    return 1 + two + bool(run.rho_start)


def patterns(n: int) -> Dataset:
    """Return ``n`` images like the digits, without scikit-learn: a pattern per class, with noise."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(10, 1, 8, 8, generator=generator)

    def examples(n: int) -> Examples:
        y = torch.randint(0, 10, (n,), generator=generator)
        return Examples(means[y] + 1.2 * torch.randn(n, 1, 8, 8, generator=generator), y)

    return Dataset("digits", 10, examples(n), examples(200), examples(500), (0.0,), (1.0,))
