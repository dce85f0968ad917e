"""Vision transformers from scratch with AdamW: methods, radii, radius warm-up, and training twice as long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import Run
from .experiments import recipe
from .planning import Plan, experiment_title, setting_text
from .scales import CIFAR, FAST, SCALES, Scale
from .variants import variants

RADII = (0.05, 0.1, 0.2, 0.4)  # of SAM
UNITS = {"asam": 10, "msam": 15}  # their radii relative to SAM's: docs/guides/methods-and-radii.md
COMPARED = ("sam", "bsam-2", "bsam", "asam", "msam", "looksam")
WARM_UP = 0.25  # share of the epochs in which the radius rises
OPTIMIZER = {"base": "adamw", "clip_norm": 1.0}
TRAINING = {**OPTIMIZER, "epochs": 100, "batch": 512, "warmup": 5, "augment": "crop-flip"}


@recipe(
    "Vision transformers from scratch, with AdamW",
    scales=[
        replace(SCALES["smoke"], networks=("vit-tiny",), stand_ins={"vit-tiny": "vit-nano"}),
        replace(
            SCALES["paper"],
            about="ViT-Ti on CIFAR-100 and CIFAR-10, 100 epochs",
            networks=("vit-tiny",),
            data=CIFAR[::-1],
            settings={**FAST, **TRAINING},
        ),
    ],
    timed=True,
    notes=[
        "AdamW, twice the epochs: as many gradient passes as SAM.",
        "Radii: rho of SAM and LookSAM; BSAM's two radii add up to that of SAM in the same place, ASAM's is ten times "
        "and MSAM's 15 times as large.",
        "warm-up: the radius rises from 0 over the first quarter of the epochs.",
    ],
)
def transformers(scale: Scale) -> list[Plan]:
    """Return AdamW, AdamW with twice the epochs, and each method at each radius, without and with a warm-up."""
    plans = []
    smoke: dict[str, Any] = (
        {**OPTIMIZER, "warmup": 0.5, "batch": scale.settings["batch"] // 2} if scale.stand_ins else {}
    )
    for network in scale.networks:
        for data in scale.data:
            first = scale.run(variants()["sgd"], network, data, **smoke)
            experiment = experiment_title(first)
            twice = replace(first, epochs=2 * first.epochs)
            plans += [Plan(first), Plan(twice, row="AdamW, twice the epochs", experiment=experiment)]
            for name in COMPARED:
                for radius in RADII:
                    for warm_up in (0.0, WARM_UP * first.epochs):
                        run = scale.run(
                            variants()[name], network, data, arguments=radii(name, radius), rho_warmup=warm_up, **smoke
                        )
                        plans.append(Plan(run, row=row(name, run), chosen=""))  # rows name their radii
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
