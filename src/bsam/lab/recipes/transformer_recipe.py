"""Vision transformers from scratch with AdamW: methods, radii, radius warm-up, and training twice as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import Run
from .paper_recipes import FAST, SMOKE_SETTINGS, method_run, paper_recipe
from .plan import Plan, experiment_title, setting_text
from .variants import variants

RADII = (0.05, 0.1, 0.2, 0.4)  # of SAM
UNITS = {"asam": 10, "msam": 15}  # their radii relative to SAM's: docs/guides/methods-and-radii.md
TRANSFORMER_METHODS = ("sam", "bsam-2", "bsam", "asam", "msam", "looksam")
WARM_UP_SHARE = 0.25  # share of the epochs in which the radius rises
OPTIMIZER: Mapping[str, Any] = {"base": "adamw", "clip_norm": 1.0}


@paper_recipe(
    "Vision transformers from scratch, with AdamW",
    scales={
        "smoke": {
            "model": "vit-nano",
            "data": ("digits",),
            **SMOKE_SETTINGS,
            **OPTIMIZER,
            "warmup": 0.5,
            "batch": 32,
        },
        "paper": {
            "model": "vit-tiny",
            "data": ("cifar100", "cifar10"),
            **FAST,
            **OPTIMIZER,
            "epochs": 100,
            "batch": 512,
            "warmup": 5,
            "augment": "crop-flip",
        },
    },
    timed=True,
    notes=[
        "AdamW, twice the epochs: as many gradient passes as SAM.",
        "Radii: rho of SAM and LookSAM; BSAM's two radii add up to that of SAM in the same place, ASAM's is ten times "
        "and MSAM's 15 times as large.",
        "warm-up: the radius rises from 0 over the first quarter of the epochs.",
    ],
)
def transformers(model: str, data: Sequence[str], **settings: Any) -> list[Plan]:
    """Return AdamW, AdamW with twice the epochs, and each method at each radius, without and with a warm-up."""
    plans = []
    for name in data:
        first = method_run("sgd", model, name, **settings)
        twice = replace(first, epochs=2 * first.epochs)
        plans += [Plan(first), Plan(twice, row="AdamW, twice the epochs", experiment=experiment_title(first))]
        for method in TRANSFORMER_METHODS:
            for radius in RADII:
                for warm_up in (0.0, WARM_UP_SHARE * first.epochs):
                    arguments = radii(method, radius)
                    run = method_run(method, model, name, arguments=arguments, rho_warmup=warm_up, **settings)
                    plans.append(Plan(run, row=row(method, run), chosen=""))  # rows name their radii
    return plans


def radii(name: str, radius: float) -> dict[str, float]:
    """Return the radii of a method that correspond to one of SAM.

    Example:
        >>> radii("bsam-2", 0.1), radii("msam", 0.1)
        ({'rho_max': 0.05, 'rho_min': 0.05}, {'rho': 1.5})
    """
    method = variants()[name].method
    if method == "bsam":
        return {"rho_max": radius / 2, "rho_min": radius / 2}
    return {"rho": round(UNITS.get(method, 1) * radius, 6)}


def row(name: str, run: Run) -> str:
    """Return the title of a row."""
    known: dict[str, Any] = {key: value for key, value in run.arguments.items() if key.startswith("rho")}
    return f"{variants()[name].title}, {setting_text(known)}{', warm-up' if run.rho_warmup else ''}"
