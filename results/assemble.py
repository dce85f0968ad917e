"""Write the tables, figures and results.json of a folder from its metrics: python results/assemble.py FOLDER

`runs.json` in the folder lists the settings that all runs share, and for each file `NAME.jsonl` its other settings
(method, arguments, seed, ...), its commit and machine, and the largest eigenvalue if it was measured. It also lists
recipes, each with the folder for its results ("." is this one). A run of a recipe without metrics is shown as missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bsam.lab.analysis.paper_numbers import all_arguments
from bsam.lab.analysis.run_sources import SETTINGS
from bsam.lab.recipes import recipe_of
from bsam.lab.recipes.experiments import Recipe
from bsam.lab.report.recipe_results import FIGURES, write_results
from bsam.lab.training.config import Run, stored_run
from bsam.lab.training.run_dir import RunState, run_dir_name


def finished_runs(folder: Path, listed: Mapping[str, Any], scratch: Path) -> Iterator[RunState]:
    """Return the state of each run whose metrics are in the folder."""
    for name, about in listed["runs"].items():
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        own = {name: about[name] for name in about if name in SETTINGS}
        run = stored_run({**listed["settings"], **own})
        if len(lines) != run.epochs:
            raise SystemExit(f"{name}.jsonl must have {run.epochs} epochs, as runs.json says; got {len(lines)}")
        path = scratch / run_dir_name(run)
        path.mkdir()
        (path / "environment.json").write_text(json.dumps(listed["machines"].get(about.get("machine"), [])))
        if "top_eigenvalue" in about:
            curvature = {"top_eigenvalue": about["top_eigenvalue"], "surface": None}
            (path / "curvature.json").write_text(json.dumps(curvature))
        yield RunState(run, path, tuple(map(json.loads, lines)), finished=True)


def states_of(recipe: Recipe, finished: list[RunState], scale: str, seeds: int) -> list[RunState]:
    """Return the states of a recipe's runs on the data of the finished runs; a run without metrics is not finished.

    SAM at the sum of both radii is trained as SAM with a fixed radius, which is the same to the last bit.
    """
    problems = {(state.run.model, state.run.data, state.run.label_noise): state.run for state in finished}
    by_settings = {_key(state.run): state for state in finished}
    states = []
    for planned in recipe.runs(scale, seeds):
        if (problem := problems.get((planned.model, planned.data, planned.label_noise))) is not None:
            run = replace(planned, noise_labels=problem.noise_labels)
            state = by_settings.get(_key(run))
            states.append(RunState(run, Path(run_dir_name(run))) if state is None else replace(state, run=run))
    return states


def _key(run: Run) -> str:
    """Return the settings of a run with all arguments of its method, without a floor that equals the radius."""
    arguments = all_arguments(run.method, run.arguments)
    return json.dumps({**run.settings(), "arguments": arguments, "curvature": None}, sort_keys=True)


def main() -> None:
    """Write the results that `runs.json` of a folder lists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    listed = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    for name, about in listed["recipes"].items():
        with tempfile.TemporaryDirectory() as scratch:
            finished = list(finished_runs(folder, listed, Path(scratch)))
            recipe, out = recipe_of(name), (folder / about["out"]).resolve()
            states = states_of(recipe, finished, about["scale"], about["seeds"])
            out.mkdir(exist_ok=True)
            for path in write_results(out, replace(recipe, figures=()), about["scale"], states):
                print(path)
            for figure, file in about["figures"].items():
                FIGURES[figure](recipe, states, out / file)
                print(out / file)


if __name__ == "__main__":
    main()
