"""The demo: with 40 % wrong training labels, which methods memorise the wrong labels?

All methods share learning rate, schedule, weight decay, batch size and epochs. Only radii (for SAF and MESA the weight
of their loss) are chosen, from three candidates per method, and for one more row the weight decay of SGD: by the
accuracy after the last epoch on the validation set, which has clean labels, with a separate seed. Only the final runs
see the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...common.errors import BsamValueError
from ..data.digits import TEST, TRAIN, VALIDATION
from ..training.config import BASE, Run, arguments_of
from ..training.names import find_name
from .candidates import Tuning, chosen_text
from .columns import MEMORISED, TOP_EIGENVALUE, TOP_EIGENVALUE_NOTE, CellSummary, SeedStatistics, TableCell
from .experiments import Recipe
from .scales import SCALES, Scale, scale_of
from .variants import CANDIDATES, DEFAULT_CANDIDATES, arguments, variant_of, variants

LANDSCAPE_POINTS = 13  # along each axis
DEFAULT = ("sgd", "sam", "bsam")
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
    variant, tried = variant_of(run), CANDIDATES.get(run.method, default)
    if variant.radii:  # SAM at BSAM's total radius
        share = variant.radii["rho_floor"] / variant.radii["rho"]
        return [{"arguments": {**candidate, "rho_floor": share * candidate["rho"]}} for candidate in tried]
    return [{"arguments": {**candidate, **variant.arguments}} for candidate in tried]


def grid(methods: Iterable[str] = DEFAULT) -> Callable[[Scale | str], list[Run]]:
    """Return the grid of these methods before tuning; if SGD is one of them, also SGD with tuned weight decay."""
    names = list(dict.fromkeys(find_name("method", name, variants()) for name in methods))
    if not names:
        raise BsamValueError("methods must name at least one method, got none")

    def runs(scale: Scale | str) -> list[Run]:
        settings = {**scale_of(scale).settings, "curvature": True, "surface": LANDSCAPE_POINTS}
        chosen = [variants()[name] for name in names]
        tuned = [Run("sgd", **{**settings, "weight_decay": WEIGHT_DECAYS[0]})] if "sgd" in names else []
        return [Run(variant.method, arguments(variant, "digits"), **settings) for variant in chosen] + tuned

    return runs


def by_method(run: Run) -> TableCell:
    """Place a run: a row per method, and one for SGD whose weight decay is chosen."""
    row = TUNED_SGD if is_tuned_sgd(run) else variant_of(run).title
    return TableCell(run.noise_text(), row, "test accuracy, %")


def demo_recipe(methods: Iterable[str] = DEFAULT) -> Recipe:
    """Return the demo with these methods."""
    return Recipe(
        "demo",
        "Digits with 40 % wrong training labels: which methods memorise them",
        grid(methods),
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


SGD = variants()["sgd"].title
TUNED_SGD = "SGD, tuned weight decay"
WEIGHT_DECAYS = (0.03, 0.1, 0.3)  # the candidates for that row


def demo_findings(summaries: Sequence[CellSummary], run: Run) -> list[str]:
    """Return sentences on what the numbers show.

    A difference counts if it exceeds the spread: the larger of the two standard deviations over the seeds.

    Args:
        summaries: the cells of the demo's table.
        run: one of its runs, for the shared settings.
    """
    rows = {summary.cell.row: summary for summary in summaries if summary.ours is not None}
    sgd, tuned = rows.pop(SGD, None), rows.pop(TUNED_SGD, None)
    without_result = [summary.cell.row for summary in summaries if summary.diverged and summary.ours is None]
    if sgd is None:
        lines = ["Without SGD there is nothing to compare with."]
    elif _accuracy(sgd).std is None:
        lines = ["With one seed there is no spread to compare with, so the differences mean little."]
    else:
        lines = [_against_sgd(row, sgd) for row in rows.values()]
        comparable = [row for row in rows.values() if _accuracy(row).std is not None]
        lines += _between_methods(comparable)
        lines += _total_radii(list(rows.values()))
        lines += [] if tuned is None else [_tuned_sgd(tuned, comparable, run)]
        lines += _eigenvalues([sgd, *rows.values(), *([] if tuned is None else [tuned])])
    return [
        *lines,
        *(f"{row} diverged with every seed." for row in without_result),
        f"The data set is small: {TRAIN} training images of 8 x 8 pixels, {round(run.label_noise * TRAIN)} of them "
        f"with a wrong label, and {TEST} test images. On other data the methods may compare differently.",
        f'Nothing is chosen on the test set: the column "chosen" shows the best of {len(WEIGHT_DECAYS)} candidates, '
        f"by accuracy after the last epoch on {VALIDATION} validation images with clean labels, with a seed that no "
        "other run uses.",
        "Results on CIFAR: see the folder results/ in the repository and the documentation.",
    ]


def _accuracy(row: CellSummary) -> SeedStatistics:
    assert row.ours is not None  # rows without finished runs are left out
    return row.ours


def _score(row: CellSummary) -> str:
    return " ± ".join(f"{value:.1f}" for value in (_accuracy(row).mean, _accuracy(row).std) if value is not None)


def _share(row: CellSummary) -> str:
    share = row.details[MEMORISED.name]
    return "an unknown part" if share is None else f"{share.mean:.0f} %"


def _gap(row: CellSummary, other: CellSummary) -> tuple[float, float]:
    """Return the difference of two accuracies, and the larger of their standard deviations."""
    ours, theirs = _accuracy(row), _accuracy(other)
    return ours.mean - theirs.mean, max(ours.std or 0.0, theirs.std or 0.0)


def _against_sgd(row: CellSummary, sgd: CellSummary) -> str:
    gap, spread = _gap(row, sgd)
    numbers = (
        f"{_score(row)} against {_score(sgd)} %. It memorises {_share(row)} of the wrong labels, SGD {_share(sgd)}."
    )
    if row.diverged:
        numbers += f" With {row.diverged} more seed{'s' * (row.diverged > 1)} it diverged."
    if _accuracy(row).std is None:
        return f"Only one seed of {row.cell.row} is finished, which is too few to compare: {numbers}"
    ours, theirs = row.details[MEMORISED.name], sgd.details[MEMORISED.name]
    if gap > spread and ours and theirs and ours.mean >= theirs.mean:
        return f"{row.cell.row} is {gap:.1f} points above SGD, but does not memorise less: {numbers}"
    if gap > spread:
        return f"{row.cell.row} is {gap:.1f} points above SGD, more than the spread ({spread:.1f}): {numbers}"
    below = f"{-gap:.1f} points below SGD" if gap < -spread else f"within the spread ({spread:.1f} points) of SGD"
    return f"{row.cell.row} shows no gain here. It is {below}: {numbers}"


def _between_methods(rows: Sequence[CellSummary]) -> list[str]:
    """Compare the best method with the second best."""
    if len(rows) < 2:
        return []
    best, second = sorted(rows, key=lambda row: -_accuracy(row).mean)[:2]
    gap, spread = _gap(best, second)
    size = f"within the spread ({spread:.1f})" if gap <= spread else f"more than the spread ({spread:.1f})"
    return [f"{best.cell.row} is {gap:.1f} points above {second.cell.row}, {size}."]


def _total_radii(rows: Sequence[CellSummary]) -> list[str]:
    """Return the chosen total radii, if both SAM and BSAM were run."""
    sam = [(row.cell.row, f"{row.chosen['rho']:g}") for row in rows if row.chosen and "rho" in row.chosen]
    sam = [(title, radius) for title, radius in sam if title.startswith("SAM")]
    pairs = [(row.cell.row, row.chosen) for row in rows if row.chosen and "rho_min" in row.chosen]
    bsam = [(title, f"{radii['rho_max']:g} + {radii['rho_min']:g}") for title, radii in pairs]
    if not sam or not bsam:
        return []
    radii = ", ".join(f"{title} {radius}" for title, radius in (*sam, *bsam))
    return [
        f"Chosen total radii: {radii}. To first order in the radii, both methods correct the gradient in proportion to "
        'this total, so compare them at equal totals: see "What BSAM does" in the documentation.'
    ]


def _eigenvalues(rows: Sequence[CellSummary]) -> list[str]:
    """Say whether the most accurate row also has the smallest largest eigenvalue."""
    known = [
        (_accuracy(row).mean, top.mean, row.cell.row)
        for row in rows
        if (top := row.details[TOP_EIGENVALUE.name]) is not None
    ]
    if len(known) < 2:
        return []
    best, flattest = max(known), min(known, key=lambda row: row[1])
    if best[2] == flattest[2]:
        return [f"{best[2]} has the best accuracy and the smallest λmax ({best[1]:.1f})."]
    return [
        f"A small λmax does not imply high accuracy: {best[2]} is the most accurate, with λmax {best[1]:.1f}, but "
        f"{flattest[2]} has the smallest λmax, {flattest[1]:.1f}."
    ]


def _tuned_sgd(tuned: CellSummary, others: Sequence[CellSummary], run: Run) -> str:
    start = (
        f"SGD with tuned {chosen_text(tuned.chosen)} instead of {run.weight_decay:g} reaches {_score(tuned)} % and "
        f"memorises {_share(tuned)} of the wrong labels"
    )
    if not others:
        return f"{start}."
    best = max(others, key=lambda row: _accuracy(row).mean)
    gap, spread = _gap(tuned, best)
    if abs(gap) <= spread:
        where = f"within a standard deviation ({spread:.1f} points) of"
    else:
        side = "above" if gap > 0 else "below"
        where = f"{abs(gap):.1f} points, more than the spread ({spread:.1f}), {side}"
    return f"{start}: {where} {best.cell.row}, the best of the others ({_score(best)} %)."
