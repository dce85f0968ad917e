"""``bsam report``: write one page with the tables, figures and verdicts of any runs."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.checks import check_count
from ...common.errors import BsamRuntimeError, BsamValueError
from ..common.grouping import count_text, group_by
from ..report.page.html_page import STATES, page_data, page_html, state_of, write_page
from ..report.read_runs import read_records
from ..report.run_record import Records
from ..report.verdicts import baseline_row
from . import page_server

OUT, PORT = Path("report.html"), 8000
HELP = "write one HTML page with the tables, figures and verdicts of any runs"
DESCRIPTION = """\
Write one HTML file with the tables, interactive figures and verdicts of runs; it works offline. RUNS are run
directories of `bsam train`, folders with run directories at any depth (such as --out of `bsam run`), folders with
runs.json or results.json, and CSV files with other results, with the columns experiment, method, seed and score. A
higher score must be better: write an error as a negative number. Runs that diverged or are not finished are
shown as such, and files that cannot be read are listed on the page."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("runs", nargs="+", type=Path, help="run directories, folders of them, or CSV files", metavar="RUNS")
    flag("--out", type=Path, help=f"file to write (default: {OUT})", metavar="FILE")
    baseline = "method that the others are compared with, such as SGD, or 'SAM (sum)' (default: the base optimizer)"
    flag("--baseline", help=baseline, metavar="METHOD")
    flag("--title", help="title of the page", metavar="TEXT")
    strict = "exit with status 2 if a file could not be read; the page is written all the same"
    flag("--strict", action="store_true", help=strict)
    watch = (
        "instead of writing a file, serve the page to browsers on this machine, and refresh it while the runs go on; "
        "Ctrl-C ends it"
    )
    flag("--watch", action="store_true", help=watch)
    flag("--port", type=int, help=f"with --watch: port of the page; 0 takes a free one (default: {PORT})", metavar="N")
    command.set_defaults(run=_report, needs={"plotly": "plot"})


def _report(arguments: argparse.Namespace) -> None:
    if arguments.watch:
        for name in ("out", "strict"):
            if getattr(arguments, name):
                raise BsamValueError(f"--{name} does not work with --watch, which writes no file: use one of them")
    elif arguments.port is not None:
        raise BsamValueError("--port needs --watch")
    if arguments.out is not None and arguments.out.is_dir():
        raise BsamValueError(f"--out must be a file, got the folder {arguments.out}: use {arguments.out / OUT}")
    for path in arguments.runs:
        if not path.exists():
            raise BsamValueError(f"{path} does not exist: pass run directories, folders of them, or CSV files")
    if arguments.watch:
        _watch(arguments)
    else:
        _write(arguments)


def _write(arguments: argparse.Namespace) -> None:
    data, records = _data(arguments)
    out = arguments.out or OUT
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, data)
    problems = data["problems"]  # also those of files that only the page reads, such as predictions
    for problem in problems:
        print(f"Warning: {problem}")
    experiments = len({run.experiment for run in records.runs})
    states = Counter(map(state_of, records.runs))
    listed = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    print(f"{count_text(len(records.runs), 'run')} in {count_text(experiments, 'experiment')}: {listed}.")
    print(f"Written: {out}")
    if arguments.strict and problems:
        raise BsamRuntimeError(f"{count_text(len(problems), 'problem')}, listed above and in {out}")


def _watch(arguments: argparse.Namespace) -> None:
    def render(version: str) -> bytes:
        return page_html(_data(arguments, version)[0])

    page = page_server.WatchedPage(arguments.runs, render, page_server.SECONDS)
    port = PORT if arguments.port is None else check_count("--port", arguments.port, 0, 65535)
    with page_server.PageServer(page, port) as server:
        server.page.html()  # errors appear here rather than in the browser
        print(f"The page is at {server.url} on this machine. Press Ctrl-C to stop.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nStopped serving the page.")


def _data(arguments: argparse.Namespace, version: str | None = None) -> tuple[dict[str, Any], Records]:
    """Return the content of the page, and the runs.

    Raise if there are no runs or if none has the baseline; a served page, which has a version, says so and waits.
    """
    records = read_records(arguments.runs)
    served = version is not None
    if not records.runs and not served:
        if records.problems:
            raise BsamValueError(records.problems[0].removesuffix("."))
        paths = ", ".join(map(str, arguments.runs))
        raise BsamValueError(f"{paths}: all runs there are tuning runs, which the page does not show; add other runs")
    title = {} if arguments.title is None else {"title": arguments.title}
    if arguments.baseline is not None and records.runs:
        try:
            _check_baseline(records, arguments.baseline)
        except BsamValueError as error:
            if not served:
                raise
            waits = f"{error}. Until a run of this method appears, the baseline is the base optimizer."
            records = replace(records, problems=(*records.problems, waits))
    return page_data(records, baseline=arguments.baseline, version=version, **title), records


def _check_baseline(records: Records, baseline: str) -> None:
    """Raise unless the name matches a single row in at least one experiment."""
    groups = group_by(records.runs, lambda run: run.experiment)
    rows = [dict.fromkeys(run.method for run in group) for group in groups.values()]
    if all(baseline_row(names, baseline) is None for names in rows):
        known = "; ".join(dict.fromkeys(run.method for run in records.runs))
        raise BsamValueError(f"--baseline must be one of the methods of the runs ({known}), got {baseline!r}")
