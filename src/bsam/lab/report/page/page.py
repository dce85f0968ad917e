"""The report as one HTML file that works offline: tables, verdicts and figures of the table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from ....common.errors import BsamError, BsamValueError
from ...analysis.runs_table import read_epochs, read_runs
from ...analysis.sentences import answer
from ...analysis.significance import check_baseline, compare_rows
from ...common.files import write
from ...common.printing import count_text, group_by
from ...paper import join
from ...training.run_dir import ABOUT, CONFIG
from .claims_grid import claims_grid
from .experiment_tables import (
    UNDECIDED_VERDICTS,
    VERDICT_SIGNS,
    baseline_verdicts,
    digits_of,
    experiment_table,
    pairs_table,
    runs_table,
    tally,
)
from .figures import EXPERIMENT_FIGURES, RECIPE_FIGURES
from .notes import duplicates_of, evaluated_on
from .render import render

PAGE_TITLE = "Runs of bsam"
MANY = 8  # with more verdicts, the undecided ones are folded; with more rows, no sentence answers for all
DAMAGE = (ArithmeticError, AttributeError, BsamError, LookupError, TypeError, ValueError)  # of the numbers of a run


def check_page_file(out: Path) -> None:
    """Raise unless a page can be written to this path."""
    if out.is_dir():
        raise BsamValueError(f"out must be a file, got the folder {out}: use {out / 'report.html'}")


def page_html(
    runs: pd.DataFrame,
    epochs: pd.DataFrame,
    baseline: str | None = None,
    title: str = PAGE_TITLE,
    *,
    problems: list[str] | None = None,
    context: Mapping[str, Sequence[Any]] | None = None,
    watched: bool = False,
    plots: bool | None = None,
) -> str:
    """Return the page of runs. Without plots, it says so.

    Args:
        runs: a table of ``paper.join``.
        epochs: their epochs, from ``read_epochs``.
        baseline: the method that others are compared with: a row, or a name such as ``"sam"``. If None, and in
            experiments without this method, it is the base optimizer, or the first row if there is none. If no
            experiment has it, that is a problem.
        title: the title of the page.
        problems: sentences about what could not be read; gets those about damaged figures.
        context: what a recipe says about its runs: ``findings`` (sentences), ``tables`` and ``notes``.
        watched: the page reloads itself.
        plots: whether it has plots; None if plotly is installed.
    """
    problems = [] if problems is None else problems
    plots = find_spec("plotly") is not None if plots is None else plots
    try:
        compared = compare_rows(runs, baseline)
    except BsamValueError as error:
        problems.append(f"{error}. Until a run of this method appears, the baseline is the base optimizer.")
        compared = compare_rows(runs)
    experiments = []
    for number, (name, group) in enumerate(runs.groupby("experiment", sort=False)):
        table = compared[compared["experiment"] == name]
        of_experiment = epochs[epochs["experiment"] == name]
        figures = draw_all(EXPERIMENT_FIGURES, group, of_experiment, problems) if plots else []
        problems += [f"{name}: {sentence}" for sentence in duplicates_of(group)]
        experiments.append(
            {
                "id": f"experiment-{number}",
                "title": name,
                "answer": answer(table) if 1 < len(table) <= MANY else "",
                "table": experiment_table(group, table),
                "pairs": pairs_table(group, table["against"].iloc[0]),
                "runs": runs_table(group, digits_of(table)),
                "counts": f"{count_text(len(group), 'run')}: {tally(group['state'])}{evaluated_on(group)}",
                "figures": figures,
            }
        )
    summary: dict[str, Any] = {}
    if context is not None:
        summary = {**context, "figures": draw_all(RECIPE_FIGURES, runs, epochs, problems) if plots else []}
    if not plots:
        problems.append("This page has no plots, because plotly was not installed when it was written.")
    claims = claims_grid(runs, {experiment["title"]: experiment["id"] for experiment in experiments})
    verdicts = baseline_verdicts(compared, runs)
    return render(
        title=title,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        counts=f"{count_text(len(experiments), 'experiment')}, {count_text(len(runs), 'run')}: {tally(runs['state'])}.",
        unplanned=sum((path / CONFIG).exists() and not (path / ABOUT).exists() for path in runs["path"].dropna()),
        has_runs=len(runs) > 0,
        problems=list(dict.fromkeys(problems)),
        context=summary,
        claims=claims,
        verdicts=_verdicts_by_experiment(verdicts, experiments) if verdicts else None,
        verdicts_open=claims is None or baseline is not None,  # those that the user asked for
        experiments=experiments,
        signs=VERDICT_SIGNS,
        watched=watched,
        plots=plots,
    )


def _verdicts_by_experiment(
    verdicts: Sequence[Mapping[str, Any]], experiments: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the verdicts by experiment; with many of them, the undecided ones apart."""
    ids = {experiment["title"]: experiment["id"] for experiment in experiments}
    parts = []
    for title, these in group_by(verdicts, lambda verdict: verdict["experiment"]).items():
        folded = [verdict for verdict in these if verdict["outcome"] in UNDECIDED_VERDICTS and len(verdicts) > MANY]
        names = list(dict.fromkeys(verdict["title"] for verdict in folded))
        listed = "; ".join(names[:3]) + ("; …" if len(names) > 3 else "")
        shown = [verdict for verdict in these if verdict not in folded]
        summary = f"{tally((verdict['outcome'] for verdict in folded), VERDICT_SIGNS)}: {listed}"
        parts.append({"title": title, "id": ids[title], "shown": shown, "folded": folded, "summary": summary})
    return {"tally": tally((verdict["outcome"] for verdict in verdicts), VERDICT_SIGNS), "parts": parts}


def draw_all(
    figures: Mapping[str, Any], runs: pd.DataFrame, epochs: pd.DataFrame, problems: list[str]
) -> list[dict[str, Any]]:
    """Return the figures of runs.

    Runs with damaged numbers are left out, and each is a problem.
    """
    drawn: list[dict[str, Any]] = []
    for name, draw in figures.items():
        figure, error = _try_to_draw(draw, runs, epochs)
        if error:
            damaged = []
            for place in runs.index:
                _, error = _try_to_draw(draw, runs.loc[[place]], epochs[epochs["run"] == place])
                if error:
                    damaged.append(place)
                    problems.append(f"{runs.at[place, 'path']} is left out of the figure {name!r} ({error}).")
            figure, error = _try_to_draw(draw, runs.drop(damaged), epochs[~epochs["run"].isin(damaged)])
            if error:
                problems.append(f"{runs['experiment'].iloc[0]}: the figure {name!r} is left out ({error}).")
        if figure is not None:
            drawn.append(figure)
    return drawn


def _try_to_draw(draw: Any, runs: pd.DataFrame, epochs: pd.DataFrame) -> tuple[dict[str, Any] | None, str]:
    """Return what a function draws, and the error if there is one."""
    try:
        return (draw(runs, epochs) if len(runs) else None), ""
    except DAMAGE as error:
        return None, str(error) if isinstance(error, BsamError) else f"{type(error).__name__}: {error}"


def write_page(
    path: Path,
    runs: pd.DataFrame,
    epochs: pd.DataFrame,
    baseline: str | None = None,
    title: str = PAGE_TITLE,
    **options: Any,
) -> None:
    """Write the page of runs; create its folder if there is none. The arguments are those of :func:`page_html`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, page_html(runs, epochs, baseline, title, **options).encode("utf-8", "replace"))


def write_report(
    paths: Sequence[Path], out: Path, baseline: str | None = None, title: str | None = None, watched: bool = False
) -> tuple[pd.DataFrame, list[str]]:
    """Read runs and write their page; return the runs, and a sentence about everything that could not be read.

    The page of CSV files is titled by their names. Raise if there are no runs or if none has the baseline; a watched
    page says so and waits.
    """
    problems: list[str] = []
    if title is None and all(path.suffix == ".csv" for path in paths):
        title = f"Results in {', '.join(path.name for path in paths)}"
    runs = join(read_runs(paths, problems))
    if runs.empty and not watched:
        raise BsamValueError(problems[0].removesuffix("."))
    if baseline is not None and not watched:
        check_baseline(runs, baseline)
    write_page(out, runs, read_epochs(runs), baseline, title or PAGE_TITLE, problems=problems, watched=watched)
    return runs, problems
