"""``bsam report``: write one page with the tables, figures and verdicts of any runs."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from ...common.errors import BsamRuntimeError, BsamValueError
from ..common.printing import count_text, say
from ..common.termination import Terminated

OUT = Path("report.html")
WATCH_SECONDS = 5.0  # between two looks at the files of watched runs
READ = {".json", ".jsonl", ".csv", ".npz", ".safetensors"}  # the files that change a report; checkpoints do not
REPORT_NEEDS = dict.fromkeys(("pandas", "scipy", "jinja2", "plotly"), "plot")
DESCRIPTION = """\
Write one HTML file with the tables, interactive figures and verdicts of runs; it works offline. RUNS are run
directories of `bsam train`, folders with run directories at any depth (such as --out of `bsam run`), folders with
results.json, and CSV files with other results, with the columns experiment, method, seed and score. A
higher score must be better: write an error as a negative number. Runs that diverged or are not finished are
shown as such, and files that cannot be read are listed on the page."""


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flag = command.add_argument
    flag("runs", nargs="+", type=Path, help="run directories, folders of them, or CSV files", metavar="RUNS")
    flag("--out", type=Path, default=OUT, help=f"file to write (default: {OUT})", metavar="FILE")
    baseline = "method that the others are compared with, such as SGD, or 'SAM (sum)' (default: the base optimizer)"
    flag("--baseline", help=baseline, metavar="METHOD")
    flag("--title", help="title of the page", metavar="TEXT")
    strict = "exit with status 2 if a file could not be read; the page is written all the same"
    flag("--strict", action="store_true", help=strict)
    watch = "write the file again whenever the runs change; the page reloads itself in the browser. Ctrl-C ends it"
    flag("--watch", action="store_true", help=watch)
    command.set_defaults(run=_report, needs=REPORT_NEEDS)


def check_paths(runs: Iterable[Path], out: Path) -> None:
    """Raise if there is nothing to read, or if the page cannot be written."""
    from ..report.page.page import check_page_file

    check_page_file(out)
    for path in runs:
        if not path.exists():
            raise BsamValueError(f"{path} does not exist: pass run directories, folders of them, or CSV files")


def _report(arguments: argparse.Namespace) -> None:
    if arguments.watch and arguments.strict:
        raise BsamValueError("--strict does not work with --watch, which waits for files: use one of them")
    check_paths(arguments.runs, arguments.out)
    if not arguments.watch:
        _write(arguments)
        return
    try:
        _watch(arguments)
    except KeyboardInterrupt as end:
        _write_page(arguments, watched=False)
        say("\nStopped watching; the page no longer reloads.")
        if isinstance(end, Terminated):
            raise


def _write_page(arguments: argparse.Namespace, watched: bool) -> tuple[str, list[str]]:
    """Write the page; return a sentence on its runs, and what could not be read."""
    from ..report.page.experiment_tables import tally
    from ..report.page.page import write_report

    runs, problems = write_report(arguments.runs, arguments.out, arguments.baseline, arguments.title, watched)
    counts = f"{count_text(len(runs), 'run')} in {count_text(runs['experiment'].nunique(), 'experiment')}"
    return f"{counts}: {tally(runs['state']) or 'none yet'}.", problems


def _write(arguments: argparse.Namespace) -> None:
    sentence, problems = _write_page(arguments, watched=False)
    for problem in problems:
        say(f"Warning: {problem}")
    say(sentence)
    say(f"Written: {arguments.out}")
    if arguments.strict and problems:
        raise BsamRuntimeError(f"{count_text(len(problems), 'problem')}, listed above and in {arguments.out}")


def _watch(arguments: argparse.Namespace) -> None:
    version = None
    while True:
        now = version_of(arguments.runs)
        if now != version:
            sentence, _ = _write_page(arguments, watched=True)
            if version is None:
                say(f"Open {arguments.out} in a browser. Press Ctrl-C to stop.")
            say(sentence)
            version = now
        time.sleep(WATCH_SECONDS)


def version_of(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the names, sizes and times of the files that a report reads."""
    found = []
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a run was removed meanwhile
                if file.suffix in READ and file.is_file():
                    status = file.stat()
                    found.append((str(file), status.st_size, status.st_mtime_ns))
    return found
