"""Add finished runs to a folder of results.

    python results/add_runs.py FOLDER RUN_DIR... [--commit COMMIT]
    python results/add_runs.py FOLDER --metrics FILE [--name NAME] [--commit COMMIT] -- FLAGS

Copies the metrics of each run to FOLDER/NAME.jsonl, and adds an entry with its settings, what it is, the metrics of its
last epoch, and its machines to FOLDER/results.json. It replaces an entry of the same name, or one that says that this
run is missing. If only the metrics of a run are left, FLAGS are those of `bsam train` that it was trained with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bsam.lab.cli import parser_of
from bsam.lab.cli.run_flags import run_of
from bsam.lab.common.files import write_json
from bsam.lab.config import Run
from bsam.lab.recipes.plan import describe, experiment_title
from bsam.lab.tasks import task_of
from bsam.lab.training.run_dir import METRICS, RunDir, stored_run

SHARED = ("experiment", "section", "column")  # by the runs of an experiment


def entry_of_run_dir(path: Path) -> dict[str, Any]:
    """Return the entry of a run directory, whose weights may be gone."""
    files = RunDir(path)
    run = files.run()
    entry = new_entry(path.name, run, files.metrics(), path)
    return {
        **entry,
        "flatness": files.flatness(),
        "wrong_labels": files.note("labels").get("wrong"),
        "about": files.about() or describe(run, shared=True),
        "machines": files.machines(),
    }


def entry_of_metrics(file: Path, name: str, run: Run, stored: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a run of which only the metrics are left.

    Args:
        file: the metrics.
        name: the name of the run.
        run: its settings.
        stored: the entries of the folder.
    """
    epochs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    entry = new_entry(name, run, epochs, file)
    return {**entry, "wrong_labels": task_of(run).wrong_labels(run), "about": about_of(run, stored)}


def about_of(run: Run, stored: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Say what a run is, as the entries of its experiment and of its row do: older versions used other words."""
    ours = describe(run, shared=True)
    of_experiment = of_row = ours
    for entry in stored:
        about = entry["about"]
        if experiment_title(stored_run(entry["settings"])) == experiment_title(run):
            of_experiment = about
        if about["row"] == ours["row"]:
            of_row = about
    return {**ours, **{name: of_experiment[name] for name in SHARED}, "place": of_row["place"]}


def new_entry(name: str, run: Run, epochs: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Return what every entry has, or exit if the run is not finished."""
    if len(epochs) != run.epochs:
        raise SystemExit(f"{path} has {len(epochs)} of {run.epochs} epochs: add finished runs")
    return {
        "folder": name,
        "state": "done",
        "reason": None,
        "last": epochs[-1],
        "metrics": f"{name}.jsonl",
        "flatness": [],
        "wrong_labels": None,
        "settings": run.settings(),
        "about": {},
        "machines": [],
    }


def main() -> None:
    """Add the runs of the command line."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="*", metavar="run_dir")
    parser.add_argument("--metrics", type=Path)
    parser.add_argument("--name", help="name of the run of --metrics (default: that of the file)")
    parser.add_argument("--commit")
    arguments = parser.parse_args(words[:end])
    if bool(arguments.runs) == bool(arguments.metrics):
        parser.error("give either run directories, or --metrics")

    file = arguments.folder / "results.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": [], "tuning": []}
    entries = {known["folder"]: known for known in results["runs"]}
    if arguments.metrics:
        flags = ["train", *words[end + 1 :]]
        run = run_of(parser_of(flags).parse_args(flags))
        name = arguments.name or arguments.metrics.stem
        added = {arguments.metrics: entry_of_metrics(arguments.metrics, name, run, results["runs"])}
    else:
        added = {path / METRICS: entry_of_run_dir(path) for path in arguments.runs}
    done = [stored_run(entry["settings"]) for entry in added.values()]
    for known in results["runs"]:
        if known["state"] == "missing" and stored_run(known["settings"]) in done:
            del entries[known["folder"]]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for metrics, entry in added.items():
        if arguments.commit is not None:
            entry["commit"] = arguments.commit
        entries[entry["folder"]] = entry
        (arguments.folder / entry["metrics"]).write_bytes(metrics.read_bytes())
    write_json(file, {**results, "runs": list(entries.values())})
    print(f"{file}: {len(added)} added, {len(entries)} in all")


if __name__ == "__main__":
    main()
