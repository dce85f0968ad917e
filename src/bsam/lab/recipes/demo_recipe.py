"""The demo: with 40 % wrong training labels, which methods memorise the wrong labels?

All methods share learning rate, schedule, weight decay, batch size and epochs. Only radii (for SAF and MESA the weight
of their loss) are chosen, from three candidates per method, and for one more row the weight decay of SGD: by the
accuracy after the last epoch on the validation set, which has clean labels, with a separate seed. Only the final runs
see the test set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...common.errors import BsamValueError
from ..common.names import find_name
from ..common.printing import count_text
from ..config import BASE, Run, arguments_of
from ..data.arrays import DIGITS_TEST, DIGITS_TRAIN, DIGITS_VALIDATION
from ..tasks import task_of
from .paper_recipes import DEMO, method_run
from .plan import Plan
from .recipe import recipe
from .variants import CANDIDATES, DEFAULT_CANDIDATES, variant_of, variants

LANDSCAPE_POINTS = 13  # along each axis
DEFAULT = ("sgd", "sam", "bsam")
TUNED_SGD = "SGD, tuned weight decay"
WEIGHT_DECAYS = (0.03, 0.1, 0.3)  # the candidates for that row
DEMO_NOTES = (
    f"All rows share learning rate {DEMO['lr']:g} (cosine, {DEMO['warmup']} epochs of warm-up), weight decay "
    f"{DEMO['weight_decay']:g} (unless tuned), batch size {DEMO['batch']} and the number of epochs.",
    f"The data set is small: {DIGITS_TRAIN} training images of 8 x 8 pixels, "
    f"{round(DEMO['label_noise'] * DIGITS_TRAIN)} of them with a wrong label, and {DIGITS_TEST} test images. On "
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


def _names(methods: Sequence[str]) -> list[str]:
    """Return the names of the chosen methods as :func:`variants` has them, each once."""
    names = list(dict.fromkeys(find_name("method", name, variants()) for name in methods))
    if not names:
        raise BsamValueError("methods must name at least one method, got none")
    return names


def _baseline(methods: Sequence[str], **_: Any) -> str:
    names = _names(methods)
    return variants()["sgd" if "sgd" in names else names[0]].title


@recipe(
    "Digits with 40 % wrong training labels: which methods memorise them",
    scales={
        "demo": {
            "methods": DEFAULT,
            "model": "digits_net",
            "data": "digits",
            **DEMO,
            "curvature": True,
            "surface": LANDSCAPE_POINTS,
        }
    },
    seeds=5,
    baseline=_baseline,
    notes=DEMO_NOTES,
    threads={"demo": 1},
    workers={"demo": 2},
)
def demo(methods: Sequence[str], epochs: int, warmup: float, **settings: Any) -> list[Plan]:
    """Return each method and, if SGD is one of them, also SGD whose weight decay is tuned."""
    names = _names(methods)
    schedule: dict[str, Any] = {"epochs": epochs, "warmup": max(0, min(warmup, epochs))}
    runs = [method_run(name, **schedule, **settings) for name in names]
    rows = [(run, variant_of(run).title, candidates(run)) for run in runs]
    if "sgd" in names:
        sgd = replace(runs[names.index("sgd")], weight_decay=WEIGHT_DECAYS[0])
        rows.append((sgd, TUNED_SGD, tuple({"weight_decay": decay} for decay in WEIGHT_DECAYS)))
    task = task_of(runs[0])
    noise = task.data_words(runs[0])
    title = f"Demo: {', '.join([*task.titles(runs[0]), noise, count_text(runs[0].epochs, 'epoch')])}"
    known: dict[str, Any] = {"experiment": title, "section": noise, "column": "test accuracy, %"}
    return [Plan(run, row=row, candidates=tried, **known) for run, row, tried in rows]
