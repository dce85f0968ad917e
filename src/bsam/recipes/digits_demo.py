"""The demo: SGD, SAM and two forms of BSAM, or other methods, on digits, with clean and with flipped training labels.

Every method gets the same number of tuning runs for each noise rate. A tuning run trains on the training set, with
labels flipped at that rate, and is judged by its accuracy on the validation set, whose labels are clean. This favours
no method, but it is more than one has when all labels are noisy. Only the final runs see the test set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.errors import BsamValueError
from ..methods import METHODS
from ..training.config import Run
from ..training.loop import CURVATURE_SAMPLES
from .experiments import Recipe, TableCell, Tuning
from .scales import Scale, scale_of
from .variants import variant_of, variants

NOISE_RATES = (0.0, 0.4)
WEIGHT_DECAYS = (5e-4, 5e-2)  # for all methods: against flipped labels a large one helps each of them, and SGD most
LEARNING_RATES = (0.03, 0.1)
BASE_LEARNING_RATES = (0.03, 0.1, 0.3, 0.6)  # the base optimizer has no radius: as many runs go to the learning rate
SHARPNESS_RADIUS = 0.05  # of the measurements, the same for all methods
LANDSCAPE_POINTS = 13  # along each axis
DEFAULT = ("sgd", "sam", "bsam", "bsam-2")
NOTES = (
    "Time of a step: relative to SGD's.",
    f"Loss, MaxS, MinS, BilS (radius {SHARPNESS_RADIUS}): on the training data, with the labels used in training.",
    f"λmax: the largest eigenvalue of the Hessian, on {CURVATURE_SAMPLES} training samples.",
    "Tuning: 8 runs for each method and noise rate with one seed; the best accuracy on the validation set, whose "
    "labels are clean, after the last epoch.",
)


def candidates(run: Run) -> list[dict[str, Any]]:
    """Return the settings that a method may choose from, the same number for each.

    Example:
        >>> len(candidates(Run("sgd"))), len(candidates(Run("bsam"))), candidates(Run("sam"))[1]
        (8, 8, {'weight_decay': 0.0005, 'lr': 0.03, 'arguments': {'rho': 0.1}})
    """
    variant = variant_of(run)
    rates = BASE_LEARNING_RATES if variant.name == "sgd" else LEARNING_RATES
    choices: Iterable[Mapping[str, Any]] = METHODS[run.method].cls.tuning if run.method in METHODS else ({},)
    return [
        {"weight_decay": decay, "lr": lr, "arguments": {**own, **variant.arguments}}
        for decay, lr, own in itertools.product(WEIGHT_DECAYS, rates, choices)
    ]


def grid(methods: Iterable[str] = DEFAULT) -> Callable[[Scale | str], list[Run]]:
    """Return the grid of these methods: each once at each noise rate, before tuning."""
    names = list(dict.fromkeys(methods))
    for name in names:
        if name not in variants():
            raise BsamValueError(f"there is no method {name!r}: choose from {', '.join(variants())}")
    if not names:
        raise BsamValueError("methods must name at least one method, got none")
    measured = {"radius": SHARPNESS_RADIUS, "curvature": True, "relief": LANDSCAPE_POINTS}

    def runs(scale: Scale | str) -> list[Run]:
        settings = {**scale_of(scale).settings, **measured}
        own = [variants()[name] for name in names]
        return [Run(v.method, v.arguments, label_noise=noise, **settings) for noise in NOISE_RATES for v in own]

    return runs


def by_noise_rate(run: Run) -> TableCell:
    """A section for each noise rate, a row for each method, one column.

    Example:
        >>> by_noise_rate(Run("sam", label_noise=0.4)).section
        '40% of the training labels flipped'
    """
    noise = run.label_noise
    section = f"{noise:.0%} of the training labels flipped" if noise else "Clean labels"
    return TableCell(section, variant_of(run).title, "accuracy, %")


def demo_recipe(methods: Iterable[str] = DEFAULT) -> Recipe:
    """Return the demo with these methods."""
    return Recipe(
        "demo",
        "Digits with clean and with flipped training labels",
        grid(methods),
        by_noise_rate,
        figures=("accuracy_and_sharpness", "landscape"),
        scales=("demo",),
        tuning=Tuning(candidates),
        details=("loss", "max_sharpness", "min_sharpness", "bilateral", "top_eigenvalue", "time"),
        notes=NOTES,
    )
