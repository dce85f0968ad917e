"""The report as one HTML file that works offline: its numbers as JSON, and the page that shows them."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....common.errors import BsamValueError
from ...analysis.paired_tests import paired
from ...analysis.read_runs import read_records
from ...analysis.row_comparison import Row, Verdict
from ...analysis.run_record import Record, Records
from ...analysis.verdicts import baseline_row, baseline_verdicts, check_baseline, paper_verdicts
from ...common.grouping import group_by
from ...recipes.columns import measured_on, seed_statistics
from ...training.config import BASE
from ...training.files import write
from .flatness_plots import FLATNESS_PLOTS
from .plot_parts import Experiment, draw_all
from .prediction_plots import prediction_plots
from .score_plots import SCORE_PLOTS

TITLE = "Runs of bsam"
STATES = ("finished", "diverged", "unfinished", "not started")


def check_page_file(out: Path) -> None:
    """Raise unless a page can be written to this path."""
    if out.is_dir():
        raise BsamValueError(f"out must be a file, got the folder {out}: use {out / 'report.html'}")


def read_page(
    paths: Sequence[Path], baseline: str | None = None, title: str | None = None, version: str | None = None
) -> tuple[dict[str, Any], Records]:
    """Read runs; return the content of their page, and the runs.

    Raise if there are no runs or if none has the baseline; a served page, which has a version, says so and waits. The
    arguments are those of :func:`page_data`.
    """
    records = read_records(paths)
    served = version is not None
    if not records.runs and not served:
        if records.problems:
            raise BsamValueError(records.problems[0].removesuffix("."))
        names = ", ".join(map(str, paths))
        raise BsamValueError(f"{names}: all runs there are tuning runs, which the page does not show; add other runs")
    if baseline is not None and records.runs:
        try:
            check_baseline(records, baseline)
        except BsamValueError as error:
            if not served:
                raise
            waits = f"{error}. Until a run of this method appears, the baseline is the base optimizer."
            records = replace(records, problems=(*records.problems, waits))
    return page_data(records, baseline=baseline, version=version, title=TITLE if title is None else title), records


def page_data(
    records: Records, *, baseline: str | None = None, title: str = TITLE, version: str | None = None
) -> dict[str, Any]:
    """Return the numbers, sentences and figures of a page as plain JSON values.

    Args:
        records: the runs.
        baseline: the method that others are compared with: a row of a table, or a name such as ``"sam"``. If None, and
            in experiments without this method, it is the base optimizer, or the first method if there is none.
        title: the title of the page.
        version: a served page reloads itself when the server's version is no longer this one; None for a file.
    """
    groups = group_by(records.runs, lambda record: record.experiment)
    styles = _styles(_in_order(records.runs))
    figures: dict[str, Any] = {}
    experiments, problems = [], list(records.problems)
    for number, (name, runs) in enumerate(groups.items()):
        methods = _in_order(runs)
        against = (baseline and baseline_row(methods, baseline)) or methods[0]
        experiment = Experiment(name, tuple(methods), tuple(runs), styles)
        of_numbers, damaged = draw_all(experiment, SCORE_PLOTS | FLATNESS_PLOTS)
        of_predictions, unreadable = prediction_plots(experiment)
        plots = {f"figure-{number}-{key}": plot for key, plot in (of_numbers | of_predictions).items()}
        problems += damaged + unreadable
        figures |= plots
        experiments.append(_experiment_info(name, runs, against) | {"figures": list(plots)})
    baselines = {experiment["title"]: experiment["baseline"] for experiment in experiments}
    verdicts = [
        info
        for name in dict.fromkeys(baselines.values())
        for info in (_verdict_info(verdict, "baseline", groups) for verdict in baseline_verdicts(records, name))
        if baselines.get(info["experiment"]) == name
    ]
    of_paper = [_verdict_info(verdict, "paper", groups) for verdict in paper_verdicts(records)]
    return {
        "title": title,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version,
        "problems": list(dict.fromkeys(problems)),
        "verdicts": verdicts + of_paper if baseline is not None else of_paper + verdicts,
        "experiments": experiments,
        "figures": figures,
    }


def _in_order(runs: Sequence[Record]) -> list[str]:
    """Return the methods in order of first appearance, base optimizers first."""
    bases = [run.method for run in runs if run.settings.get("method") == BASE]
    return list(dict.fromkeys([*bases, *(run.method for run in runs)]))


def _styles(methods: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the style of each method on the whole page: the number of its colour, and that of its dashes and marker.

    Rows that differ only in settings (the part after the comma) share a colour.
    """
    groups = group_by(methods, lambda method: method.partition(", ")[0]).values()
    colours = [(colour, method) for colour, group in enumerate(groups) for method in group]
    return {method: (colour, number) for number, (colour, method) in enumerate(colours)}


def _verdict_info(verdict: Verdict, group: str, experiments: Iterable[str]) -> dict[str, Any]:
    """Return a verdict with the experiment that its claim ends with; empty if there is none."""
    experiment = max((name for name in experiments if verdict.claim.endswith(f": {name}")), key=len, default="")
    return {**asdict(verdict), "group": group, "experiment": experiment}


def _experiment_info(name: str, runs: Sequence[Record], baseline: str) -> dict[str, Any]:
    by_method = group_by(runs, lambda run: run.method)
    return {
        "title": name,
        "unit": runs[0].unit,
        "higher_is_better": runs[0].higher_is_better,
        "baseline": baseline,
        "rows": [_row_info(method, by_method[method], by_method[baseline]) for method in _in_order(runs)],
        "runs": [_run_info(run) for run in runs],
        "top_eigenvalue": f"λmax, {measured_on(runs[0].settings)}",
    }


def _row_info(method: str, runs: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Any]:
    scores, theirs = Row(method, runs).values(), Row("", baseline).values()
    learned = not any(run.failure for run in (*runs, *baseline))
    difference = paired(scores, theirs) if method != baseline[0].method and learned else None
    seconds = [run.seconds for run in runs if run.seconds is not None]
    states = [state_of(run) for run in runs]
    finished = [run for run in runs if run.state == "finished" and run.epochs]
    memorised = [100 * share for run in finished if (share := run.epochs[-1].get("memorised")) is not None]
    return {
        "method": method,
        **_statistics(list(scores.values())),
        "not_learned": sum(run.failure is not None for run in runs),
        "diverged": states.count("diverged"),
        "unfinished": states.count("unfinished"),
        "not_started": states.count("not started"),
        "difference": None if difference is None else asdict(difference),
        "published": _first(runs, "published"),
        "passes": _first(runs, "passes"),
        "seconds": sum(seconds) / len(seconds) if seconds else None,
        "radius": _first(runs, "radius"),
        "chosen": _first(runs, "chosen") or "",
        "memorised": _statistics(memorised),
        "top_eigenvalue": _statistics([run.top_eigenvalue for run in runs if run.top_eigenvalue is not None]),
    }


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    return asdict(seed_statistics(values)) if values else {"mean": None, "std": None, "n": 0}


def _first(runs: Sequence[Record], name: str) -> Any:
    """Return the first value that is not missing; the runs of a row share it."""
    return next((value for run in runs if (value := getattr(run, name)) not in (None, "")), None)


def state_of(run: Record) -> str:
    """Return the state that is shown: one of :data:`STATES`."""
    return "not started" if run.state == "unfinished" and not run.epochs else run.state


def _run_info(run: Record) -> dict[str, Any]:
    about = {name: getattr(run, name) for name in ("name", "method", "seed", "score")}
    state = state_of(run)
    reason = None if state == "not started" else run.reason or run.failure
    epochs = {"epochs_done": len(run.epochs), "epochs": run.settings.get("epochs")}
    return {**about, "state": state, "reason": reason, **epochs}


def page_html(data: Mapping[str, Any]) -> bytes:
    """Return the page that shows ``data``. Without plotly, it has no plots and says so."""
    folder = files(__package__) / "files"
    page = (folder / "page.html").read_text("utf-8")
    parts = {
        "title": html.escape(data["title"]),
        "style": (folder / "page.css").read_text("utf-8"),
        "script": (folder / "page.js").read_text("utf-8"),
        "plotly": _plotly(),
        "data": script_json(data),
    }
    page = re.sub(r"{{(\w+)}}", lambda placeholder: parts[placeholder[1]], page)  # one pass: a title may have braces
    return page.encode("utf-8", "replace")


def script_json(data: Any) -> str:
    r"""Return strict JSON for a script element: non-finite numbers become null, and no ``<`` can end the element.

    Example:
        >>> script_json({"name": "</script>", "loss": math.nan})
        '{"name":"\\u003c/script>","loss":null}'
    """
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _plotly() -> str:
    """Return plotly.js, gzipped and in base64: 2 MB. The page decompresses it after its first paint."""
    if find_spec("plotly") is None:
        return ""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Write the page that shows ``data``; create its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, page_html(data))
