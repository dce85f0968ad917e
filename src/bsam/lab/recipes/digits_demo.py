"""The demo: with 40 % wrong training labels, which methods memorise the wrong labels?

All methods share learning rate, schedule, weight decay, batch size and epochs. Only radii (for SAF and MESA the weight
of their loss) are chosen, from three candidates per method, and for one more row the weight decay of SGD: by the
accuracy after the last epoch on the validation set, which has clean labels, with a separate seed. Only the final runs
see the test set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import BsamValueError
from ..common.names import find_name
from ..data.digits import TEST, TRAIN, VALIDATION
from ..training.config import BASE, Run, arguments_of
from .candidates import Tuning, chosen_text
from .columns import MEMORISED, TOP_EIGENVALUE, TOP_EIGENVALUE_NOTE, CellSummary, SeedStatistics, TableCell
from .experiments import Recipe
from .scales import SCALES, Scale
from .variants import CANDIDATES, DEFAULT_CANDIDATES, arguments, variant_of, variants

LANDSCAPE_POINTS = 13  # along each axis
DEFAULT = ("sgd", "sam", "bsam")
SGD = variants()["sgd"].title
TUNED_SGD = "SGD, tuned weight decay"
WEIGHT_DECAYS = (0.03, 0.1, 0.3)  # the candidates for that row
_SHARED = SCALES["demo"].settings
NOTES = (
    "Memorised: the share of the wrong training labels that the network predicts after the last epoch, in %.",
    TOP_EIGENVALUE_NOTE,
    f"All rows share learning rate {_SHARED['lr']:g} (cosine, {_SHARED['warmup']} epochs of warm-up), weight decay "
    f"{_SHARED['weight_decay']:g} (unless tuned), batch size {_SHARED['batch']} and the number of epochs.",
)


def is_tuned_sgd(run: Run) -> bool:
    """Return whether a run belongs to the row whose weight decay is chosen."""
    return run.method == BASE and run.weight_decay != _SHARED["weight_decay"]


def candidates(run: Run) -> list[dict[str, Any]]:
    """Return the candidates of a row: three settings of its method, three weight decays, or none for SGD.

    Example:
        >>> candidates(Run("sam"))
        [{'arguments': {'rho': 0.1}}, {'arguments': {'rho': 0.2}}, {'arguments': {'rho': 0.4}}]
        >>> candidates(Run("sgd", weight_decay=5e-4))
        []
    """
    if is_tuned_sgd(run):
        return [{"weight_decay": decay} for decay in WEIGHT_DECAYS]
    if run.method == BASE:
        return []
    default = DEFAULT_CANDIDATES if "rho" in arguments_of(run.method) else ({},)
    variant = variant_of(run)
    settings = CANDIDATES.get(run.method, default)
    if variant.radii:  # SAM at BSAM's total radius
        share = variant.radii["rho_floor"] / variant.radii["rho"]
        return [{"arguments": {**candidate, "rho_floor": share * candidate["rho"]}} for candidate in settings]
    return [{"arguments": {**candidate, **variant.arguments}} for candidate in settings]


def by_method(run: Run) -> TableCell:
    """Place a run: a row per method, and one for SGD whose weight decay is chosen."""
    row = TUNED_SGD if is_tuned_sgd(run) else variant_of(run).title
    return TableCell(run.noise_text(), row, "test accuracy, %")


def demo_recipe(methods: Iterable[str] = DEFAULT) -> Recipe:
    """Return the demo with these methods; if SGD is one of them, also with SGD whose weight decay is tuned."""
    names = list(dict.fromkeys(find_name("method", name, variants()) for name in methods))
    if not names:
        raise BsamValueError("methods must name at least one method, got none")

    def grid(scale: Scale) -> list[Run]:
        settings = {**scale.settings, "curvature": True, "surface": LANDSCAPE_POINTS}
        chosen = [variants()[name] for name in names]
        runs = [Run(variant.method, arguments(variant, "digits"), **settings) for variant in chosen]
        return [*runs, Run("sgd", **{**settings, "weight_decay": WEIGHT_DECAYS[0]})] if "sgd" in names else runs

    return Recipe(
        "demo",
        "Digits with 40 % wrong training labels: which methods memorise them",
        grid,
        by_method,
        figures=("demo",),
        scales=("demo",),
        tuning=Tuning(candidates),
        details=(MEMORISED, TOP_EIGENVALUE),
        notes=lambda run: NOTES,
        findings=lambda summaries, states: demo_findings(summaries, states[0].run),
        seeds=5,
        method_title=lambda run: by_method(run).row,
    )


@dataclass(frozen=True)
class _Row:
    """A row of the demo's table with finished runs."""

    title: str
    accuracy: SeedStatistics
    summary: CellSummary

    @property
    def memorised(self) -> SeedStatistics | None:
        return self.summary.details[MEMORISED.name]

    @property
    def share(self) -> str:
        return "an unknown part" if self.memorised is None else f"{self.memorised.mean:.0f} %"

    def gap(self, other: _Row) -> tuple[float, float]:
        """Return the difference of the two accuracies, and the larger of their standard deviations."""
        return self.accuracy.mean - other.accuracy.mean, max(self.accuracy.std or 0.0, other.accuracy.std or 0.0)


def demo_findings(summaries: Sequence[CellSummary], run: Run) -> list[str]:
    """Return sentences on what the numbers show.

    A difference counts if it exceeds the spread: the larger of the two standard deviations over the seeds.

    Args:
        summaries: the cells of the demo's table.
        run: one of its runs, for the shared settings.
    """
    known = [_Row(summary.cell.row, summary.ours, summary) for summary in summaries if summary.ours is not None]
    rows = {row.title: row for row in known}
    sgd, tuned = rows.pop(SGD, None), rows.pop(TUNED_SGD, None)
    if sgd is None:
        lines = ["Without SGD there is nothing to compare with."]
    elif sgd.accuracy.std is None:
        lines = ["With one seed there is no spread to compare with, so the differences mean little."]
    else:
        others = list(rows.values())
        comparable = sorted((row for row in others if row.accuracy.std is not None), key=lambda row: -row.accuracy.mean)
        lines = [_against_sgd(row, sgd) for row in others]
        if len(comparable) > 1:
            best, second = comparable[:2]
            gap, spread = best.gap(second)
            size = "within" if gap <= spread else "more than"
            lines.append(f"{best.title} is {gap:.1f} points above {second.title}, {size} the spread ({spread:.1f}).")
        lines += _total_radii(others)
        lines += [] if tuned is None else [_tuned_sgd(tuned, comparable, run)]
        lines += _eigenvalues([sgd, *others, *([] if tuned is None else [tuned])])
    diverged = [summary.cell.row for summary in summaries if summary.diverged and summary.ours is None]
    return [
        *lines,
        *(f"{title} diverged with every seed." for title in diverged),
        f"The data set is small: {TRAIN} training images of 8 x 8 pixels, {round(run.label_noise * TRAIN)} of them "
        f"with a wrong label, and {TEST} test images. On other data the methods may compare differently.",
        f'Nothing is chosen on the test set: the column "chosen" shows the best of {len(WEIGHT_DECAYS)} candidates, '
        f"by accuracy after the last epoch on {VALIDATION} validation images with clean labels, with a seed that no "
        "other run uses.",
        "Results on CIFAR: see the folder results/ in the repository and the documentation.",
    ]


def _against_sgd(row: _Row, sgd: _Row) -> str:
    gap, spread = row.gap(sgd)
    numbers = f"{row.accuracy:.1f} against {sgd.accuracy:.1f} %. It memorises {row.share} of the wrong labels, SGD "
    numbers += f"{sgd.share}."
    if diverged := row.summary.diverged:
        numbers += f" With {diverged} more {'seeds' if diverged > 1 else 'seed'} it diverged."
    if row.accuracy.std is None:
        return f"Only one seed of {row.title} is finished, which is too few to compare: {numbers}"
    if gap > spread and row.memorised and sgd.memorised and row.memorised.mean >= sgd.memorised.mean:
        return f"{row.title} is {gap:.1f} points above SGD, but does not memorise less: {numbers}"
    if gap > spread:
        return f"{row.title} is {gap:.1f} points above SGD, more than the spread ({spread:.1f}): {numbers}"
    below = f"{-gap:.1f} points below SGD" if gap < -spread else f"within the spread ({spread:.1f} points) of SGD"
    return f"{row.title} shows no gain here. It is {below}: {numbers}"


def _total_radii(rows: Sequence[_Row]) -> list[str]:
    """Return the chosen total radii, if both SAM and BSAM were run."""
    chosen = {row.title: row.summary.chosen or {} for row in rows}
    sam = [f"{title} {radii['rho']:g}" for title, radii in chosen.items() if title.startswith("SAM") and "rho" in radii]
    bsam = [
        f"{title} {radii['rho_max']:g} + {radii['rho_min']:g}" for title, radii in chosen.items() if "rho_min" in radii
    ]
    if not sam or not bsam:
        return []
    return [
        f"Chosen total radii: {', '.join([*sam, *bsam])}. To first order in the radii, both methods correct the "
        'gradient in proportion to this total, so compare them at equal totals: see "What BSAM does" in the '
        "documentation."
    ]


def _tuned_sgd(tuned: _Row, others: Sequence[_Row], run: Run) -> str:
    start = (
        f"SGD with tuned {chosen_text(tuned.summary.chosen)} instead of {run.weight_decay:g} reaches "
        f"{tuned.accuracy:.1f} % and memorises {tuned.share} of the wrong labels"
    )
    if not others:
        return f"{start}."
    best = others[0]
    gap, spread = tuned.gap(best)
    if abs(gap) <= spread:
        where = f"within a standard deviation ({spread:.1f} points) of"
    else:
        side = "above" if gap > 0 else "below"
        where = f"{abs(gap):.1f} points, more than the spread ({spread:.1f}), {side}"
    return f"{start}: {where} {best.title}, the best of the others ({best.accuracy:.1f} %)."


def _eigenvalues(rows: Sequence[_Row]) -> list[str]:
    """Say whether the most accurate row also has the smallest largest eigenvalue."""
    tops = [(row, value.mean) for row in rows if (value := row.summary.details[TOP_EIGENVALUE.name]) is not None]
    if len(tops) < 2:
        return []
    best, top = max(tops, key=lambda pair: (pair[0].accuracy.mean, pair[1], pair[0].title))
    flattest, smallest = min(tops, key=lambda pair: pair[1])
    if best is flattest:
        return [f"{best.title} has the best accuracy and the smallest λmax ({top:.1f})."]
    return [
        f"A small λmax does not imply high accuracy: {best.title} is the most accurate, with λmax {top:.1f}, but "
        f"{flattest.title} has the smallest λmax, {smallest:.1f}."
    ]
