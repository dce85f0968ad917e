"""Print what the full grid and successive halving choose from the curves: python results/tuning/replay.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from bsam.lab.recipes import Plan
from bsam.lab.recipes.tuning import Choice, Tuning
from bsam.lab.training import Run
from bsam.lab.training.run_dir import RunState

# the first seeds, on which the epochs of the halvings were chosen: they are left out
STUDIES = {"digits-mlp": 5, "digits-conv": 1, "fashion-mnist": 1, "digits-base": 0}
TUNED = ("factor", "lr", "weight_decay")  # what tells candidates apart
GRID = (0.5, 1, 2, 4)  # the factors of --tune


def choices(study: str, grid: tuple[float, ...] = GRID) -> pd.DataFrame:
    """Return a row for each further tuning seed, with the test accuracies of both choices and the cost of halving.

    The test accuracy of a candidate is its mean over the tuning seeds, since final runs have other seeds. The cost is
    that of halving divided by that of the full grid.
    """
    content = json.loads((Path(__file__).parent / f"{study}.json").read_text(encoding="utf-8"))
    runs = pd.DataFrame(content["runs"])
    runs = runs[runs["seed"] >= STUDIES[study]]
    names = [name for name in TUNED if name in runs]
    runs = runs[runs["factor"].isin(grid)] if "factor" in runs else runs
    runs = runs.assign(mean=runs.groupby(["label_noise", "method", *names])["test"].transform("mean"))
    rows = []
    for (noise, method, seed), group in runs.groupby(["label_noise", "method", "seed"], sort=False):
        full, half = (choice(group, names, halving) for halving in (False, True))
        cost = sum(half.aims) / sum(full.aims)
        means = [group["mean"].iloc[of.best() or 0] for of in (full, half)]
        rows.append((noise, method, seed, *means, cost))
    return pd.DataFrame(rows, columns=["noise", "method", "seed", "full", "half", "cost"])


def choice(group: pd.DataFrame, names: list[str], halving: bool) -> Choice:
    """Return the choice between candidates with all epochs on disk; a full grid also has the trained networks."""
    run = Run("sgd", epochs=len(group["scores"].iloc[0]), eval_split="holdout")
    plan = Plan(run, candidates=group[names].to_dict("records"))

    def state(scores: list[float]) -> RunState:
        epochs: tuple[dict[str, Any], ...] = tuple({"holdout_accuracy": score / 100} for score in scores)
        return RunState(run, Path(), epochs, finished=not halving)

    return Choice(plan, Tuning("holdout", halving=halving), [state(scores) for scores in group["scores"]])


def main() -> None:
    """Print the means over the tuning seeds."""
    for study in STUDIES:
        table = choices(study).groupby(["noise", "method"], sort=False)[["full", "half", "cost"]].mean()
        print(study, table.assign(difference=table["half"] - table["full"]).round(2), sep="\n")


if __name__ == "__main__":
    main()
