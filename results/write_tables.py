"""Write the tables of the paper's protocol from the runs in this folder: python results/write_tables.py

Each table has the rows of its recipe, with their scores. Runs with other settings are in the folders, but not in their
tables.
"""

from __future__ import annotations

import json
from pathlib import Path

from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.paper import join
from bsam.lab.recipes import RECIPES
from bsam.lab.report.recipe_results import origin_info
from bsam.lab.report.recipe_table import EXTRAS, caption, cells_of, markdown, tables_of
from bsam.lab.tasks import task_of
from bsam.lab.training.run_dir import stored_run

HERE = Path(__file__).parent
FOLDERS = ("cifar10-resnet18", "cifar10-resnet18-label-noise", "cifar10-resnet18-noise40", "cifar100-resnet18")


def table(folder: Path) -> str:
    """Return the table of a folder with the results of a recipe."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    entries = {entry["folder"]: entry for entry in results["runs"]}
    study = RECIPES[results["recipe"]](results["scale"])
    columns = [plan.about["column"] for plan in study.plans]
    runs = join(read_runs(folder)).drop(columns=list(EXTRAS), errors="ignore").assign(settings_chosen=None)
    runs = runs[runs["row"].isin({plan.about["row"] for plan in study.plans})]
    runs = runs.sort_values("column", key=lambda names: names.map(columns.index), kind="stable")
    cells = cells_of(runs, study.published)
    shown = [entries[name] for name in runs["name"]]
    shares = [(stored_run(entry["settings"]), entry["wrong_labels"]) for entry in shown]
    notes = task_of(shares[0][0]).table_notes(shares)
    lines = [*caption(runs, cells, study.published), *notes, *origin_info(shown)]
    return markdown(results["title"], tables_of(cells, study.published), lines)


if __name__ == "__main__":
    for name in FOLDERS:
        (HERE / name / "table.md").write_text(table(HERE / name), encoding="utf-8")
