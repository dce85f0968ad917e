"""The demo's numbers, as plain values and as JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..recipes.demo import SHARPNESS_RADIUS, Cell, Plan
from ..training.environment import environment_info
from ..training.files import write_json
from ..training.loop import CURVATURE_SAMPLES
from ..training.result import Result

Row: TypeAlias = dict[str, Any]


def rows_info(cells: Sequence[Cell]) -> list[Row]:
    """One row per method, noise rate and seed, after the last epoch. Accuracies are shares, 0 to 1; sharpness is of the
    labels as trained on.
    """
    return [_row(cell, result) for cell in cells for result in cell.results]


def _row(cell: Cell, result: Result) -> Row:
    run, found = result.run, result.last.sharpness
    assert found is not None  # final runs measure it
    return {
        "method": cell.candidate.name,
        "title": cell.candidate.title,
        "label_noise": run.label_noise,
        "seed": run.seed,
        "test_accuracy": result.score,
        "train_loss": found.loss,
        "max_sharpness": found.max_sharpness,
        "min_sharpness": found.min_sharpness,
        "bilateral": found.bilateral,
        "cosine": found.cosine,
        "top_eigenvalue": result.top_eigenvalue,
        "seconds_per_step": result.seconds_per_step,
        "lr": run.lr,
        "weight_decay": run.weight_decay,
        "arguments": dict(run.arguments),
        "epochs": run.epochs,
    }


def tuning_info(cells: Sequence[Cell]) -> dict[str, Any]:
    """The budget, what was tried and what was chosen."""
    return {
        "runs_per_method_and_noise_rate": len(cells[0].tuning),
        "seed": cells[0].tuning[0].run.seed,
        "chosen_by": "accuracy on the validation set (clean labels) after the last epoch; of equals the first tried",
        "choices": [
            {
                "method": cell.candidate.name,
                "label_noise": cell.label_noise,
                **_candidate(cell.choice),
                "tried": [_candidate(result) for result in cell.tuning],
            }
            for cell in cells
        ],
    }


def _candidate(result: Result) -> Row:
    run = result.run
    return {
        "lr": run.lr,
        "weight_decay": run.weight_decay,
        "arguments": dict(run.arguments),
        "validation_accuracy": result.score,
    }


def write_results(folder: Path, plan: Plan, cells: Sequence[Cell]) -> list[Path]:
    """Write ``results.json``, the rows, and ``about.json``, how they came about."""
    about = {
        "environment": environment_info(),
        "settings": {
            **plan.settings(),
            "methods": [candidate.name for candidate in plan.candidates_of],
            "sharpness_radius": SHARPNESS_RADIUS,
            "curvature_samples": CURVATURE_SAMPLES,
            "workers": 2,
            "threads_per_worker": 1,
        },
        "tuning": tuning_info(cells),
    }
    paths = [folder / "results.json", folder / "about.json"]
    for path, content in zip(paths, (rows_info(cells), about), strict=True):
        write_json(path, content)
    return paths
