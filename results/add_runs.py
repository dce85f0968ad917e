"""Add finished runs to a folder of results: python results/add_runs.py FOLDER RUN_DIR... [--commit COMMIT]

Copies the metrics of each run directory to FOLDER/NAME.jsonl, and adds an entry with its settings, what it is, the
metrics of its last epoch, and its machines to FOLDER/results.json. A run of the same name is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bsam.lab.common.files import write_json
from bsam.lab.recipes.plan import describe
from bsam.lab.training.run_dir import METRICS, RunDir


def entry(path: Path, commit: str | None) -> dict[str, object]:
    """Return the entry of a run directory, whose weights may be gone."""
    files = RunDir(path)
    run, epochs = files.run(), files.metrics()
    if len(epochs) != run.epochs:
        raise SystemExit(f"{path} has {len(epochs)} of {run.epochs} epochs: add finished runs")
    return {
        "folder": path.name,
        "state": "done",
        "reason": None,
        "last": epochs[-1],
        "metrics": f"{path.name}.jsonl",
        "flatness": files.flatness(),
        "wrong_labels": files.note("labels").get("wrong"),
        "settings": run.settings(),
        "about": files.about() or describe(run, shared=True),
        "machines": files.machines(),
        **({} if commit is None else {"commit": commit}),
    }


def main() -> None:
    """Add the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    file = arguments.folder / "results.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": [], "tuning": []}
    entries = {known["folder"]: known for known in results["runs"]}
    entries |= {path.name: entry(path, arguments.commit) for path in arguments.runs}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for path in arguments.runs:
        (arguments.folder / f"{path.name}.jsonl").write_bytes((path / METRICS).read_bytes())
    write_json(file, {**results, "runs": list(entries.values())})
    print(f"{file}: {len(arguments.runs)} added, {len(entries)} in all")


if __name__ == "__main__":
    main()
