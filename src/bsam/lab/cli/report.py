"""``bsam report``: write one page with the tables, figures and verdicts of any runs."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from ...common.checks import check_count
from ...common.errors import BsamRuntimeError, BsamValueError
from ..analysis.read_runs import check_paths
from ..common.grouping import count_text
from ..report.page.html_page import STATES, check_page_file, page_html, read_page, state_of, write_page
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
    if arguments.out is not None:
        check_page_file(arguments.out)
    check_paths(arguments.runs)
    if arguments.watch:
        _watch(arguments)
    else:
        _write(arguments)


def _write(arguments: argparse.Namespace) -> None:
    out = arguments.out or OUT
    data, records = read_page(arguments.runs, arguments.baseline, arguments.title)
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
        return page_html(read_page(arguments.runs, arguments.baseline, arguments.title, version)[0])

    page = page_server.WatchedPage(arguments.runs, render, page_server.SECONDS)
    port = PORT if arguments.port is None else check_count("--port", arguments.port, 0, 65535)
    with page_server.PageServer(page, port) as server:
        server.page.html()  # errors appear here rather than in the browser
        print(f"The page is at {server.url} on this machine. Press Ctrl-C to stop.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nStopped serving the page.")
