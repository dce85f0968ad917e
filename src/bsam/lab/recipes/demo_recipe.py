"""The demo: with 40 % wrong training labels, which methods memorise the wrong labels?

All methods share learning rate, schedule, weight decay, batch size and epochs. Only radii (for SAF and MESA the weight
of their loss) are chosen, from three candidates per method, and for one more row the weight decay of SGD: by the
accuracy after the last epoch on the validation set, which has clean labels, with a separate seed. Only the final runs
see the test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...common.errors import BsamValueError
from ..common.names import find_name
from ..common.printing import count_text
from ..config import BASE, Run, arguments_of
from ..data.downloads import DIGITS_TEST, DIGITS_TRAIN, DIGITS_VALIDATION
from ..tasks import task_of
from .choice import Tuning
from .cifar_recipes import grid
from .experiments import RECIPES, Recipe, recipe
from .planning import Plan, titles_of
from .scales import SCALES, Scale
from .variants import CANDIDATES, DEFAULT_CANDIDATES, variant_of, variants

LANDSCAPE_POINTS = 13  # along each axis
DEFAULT = ("sgd", "sam", "bsam")
TUNED_SGD = "SGD, tuned weight decay"
WEIGHT_DECAYS = (0.03, 0.1, 0.3)  # the candidates for that row
_SHARED = SCALES["demo"].settings
NOTES = (
    f"All rows share learning rate {_SHARED['lr']:g} (cosine, {_SHARED['warmup']} epochs of warm-up), weight decay "
    f"{_SHARED['weight_decay']:g} (unless tuned), batch size {_SHARED['batch']} and the number of epochs.",
    f"The data set is small: {DIGITS_TRAIN} training images of 8 x 8 pixels, "
    f"{round(_SHARED['label_noise'] * DIGITS_TRAIN)} of them with a wrong label, and {DIGITS_TEST} test images. On "
    "other data the methods may compare differently.",
    f'Nothing is chosen on the test set: the column "chosen" shows the best of {len(WEIGHT_DECAYS)} candidates, '
    f"by accuracy after the last epoch on {DIGITS_VALIDATION} validation images with clean labels, with a seed that no "
    "other run uses.",
    "To first order in the radii, SAM and BSAM correct the gradient in proportion to the total radius, so compare them "
    'at equal totals: see "What BSAM does" in the documentation.',
    "A small λmax does not imply high accuracy: compare the two columns.",
    "Results on CIFAR: see the folder results/ in the repository and the documentation.",
)


def candidates(run: Run) -> tuple[Mapping[str, Any], ...]:
    """Return the three candidates of a method; none for the base optimizer.

    Example:
        >>> candidates(Run("sam"))
        ({'arguments': {'rho': 0.1}}, {'arguments': {'rho': 0.2}}, {'arguments': {'rho': 0.4}})
    """
    if run.method == BASE:
        return ()
    variant = variant_of(run)
    settings = CANDIDATES.get(run.method, DEFAULT_CANDIDATES if "rho" in arguments_of(run.method) else ({},))
    if variant.radii:  # SAM at BSAM's total radius
        share = variant.radii["rho_floor"] / variant.radii["rho"]
        return tuple({"arguments": {**candidate, "rho_floor": share * candidate["rho"]}} for candidate in settings)
    return tuple({"arguments": {**candidate, **variant.arguments}} for candidate in settings)


def demo_recipe(methods: Iterable[str] = DEFAULT, epochs: int | None = None) -> Recipe:
    """Return the demo with these methods; if SGD is one of them, also with SGD whose weight decay is tuned."""
    names = list(dict.fromkeys(find_name("method", name, variants()) for name in methods))
    if not names:
        raise BsamValueError("methods must name at least one method, got none")

    size = SCALES["demo"]
    if epochs is not None:
        warmup = max(0, min(_SHARED["warmup"], epochs))
        size = replace(size, settings={**_SHARED, "epochs": epochs, "warmup": warmup})

    @recipe(
        "Digits with 40 % wrong training labels: which methods memorise them",
        scales=[size],
        tuning=Tuning(),
        seeds=5,
        baseline=variants()["sgd" if "sgd" in names else names[0]].title,
        notes=NOTES,
    )
    def demo(scale: Scale) -> list[Plan]:
        runs = grid(scale, names, scale.networks, axis=[{"curvature": True, "surface": LANDSCAPE_POINTS}])
        rows = [(run, variant_of(run).title, candidates(run)) for run in runs]
        if "sgd" in names:
            sgd = replace(runs[names.index("sgd")], weight_decay=WEIGHT_DECAYS[0])
            rows.append((sgd, TUNED_SGD, tuple({"weight_decay": decay} for decay in WEIGHT_DECAYS)))
        noise = task_of(runs[0]).data_words(runs[0])
        title = f"Demo: {', '.join([*titles_of(runs[0]), noise, count_text(runs[0].epochs, 'epoch')])}"
        known: dict[str, Any] = {"experiment": title, "section": noise, "column": "test accuracy, %"}
        return [Plan(run, row=row, candidates=tried, **known) for run, row, tried in rows]

    return demo


RECIPES["demo"] = demo_recipe()
