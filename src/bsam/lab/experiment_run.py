"""Train the runs of an experiment, tune them if the recipe says so, and write its tables, figures and page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common.checks import check_number
from ..common.errors import BsamValueError
from ..common.extras import require_packages
from .analysis.choice_texts import how_chosen
from .analysis.method_comparison import ComparisonResult, compare_states
from .data import check_data, download_all
from .recipes.choices import TunedRuns
from .recipes.columns import states_of
from .recipes.experiments import PlannedRuns, table_info
from .recipes.scales import Scale
from .report.recipe_table import TableSection, sections_info
from .report.tuning_section import tuning_sections
from .running.executors import Executor, default_slots, local_processes, ray_tasks
from .running.runner import Callbacks, RunsFailed, run_all
from .training.config import Run
from .training.environment import pick_device
from .training.run_dir import RunState, run_dir_name
from .training.run_writer import CHECKPOINT_EVERY

NEEDS = dict.fromkeys(("rich", "safetensors", "matplotlib"), "demo")  # the extra that installs all three


@dataclass(frozen=True)
class ExperimentOptions:
    """Where the data and the results of an experiment are, and how its runs are trained.

    Args:
        out: the folder of the experiment.
        data_dir, cache_dir, device, checkpoint_every: arguments of :func:`bsam.lab.training.loop.fit` for all runs.
        download: whether to download the data sets into ``data_dir`` first, if they are not there yet.
        jobs: the number of runs to train at a time on this machine; None chooses it from the device.
        ray: trains the runs as Ray tasks, with the address as for :func:`bsam.lab.running.executors.ray_tasks`.
        gpus_per_run: with ``ray``, the number of GPUs per run.
    """

    out: Path
    data_dir: Path | None = None
    cache_dir: Path | None = None
    download: bool = False
    device: str | None = None
    jobs: int | None = None
    ray: str | None = None
    gpus_per_run: float | None = None
    checkpoint_every: float = CHECKPOINT_EVERY


@dataclass(frozen=True)
class ExperimentResult:
    """The results of an experiment.

    Args:
        states: the states of the final runs.
        sections: the tables.
        notes: the lines below the tables.
        files: the files written.
        page: the page; None if no run has started.
        comparison: the methods compared with the baseline; None without a baseline.
        failure: the error that says which runs failed or diverged; None if there are none.
    """

    states: Sequence[RunState]
    sections: Sequence[TableSection]
    notes: Sequence[str]
    files: Sequence[Path]
    page: Path | None
    comparison: ComparisonResult | None
    failure: RunsFailed | None


def refuse_torchrun(command: str) -> None:
    """Raise if torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BsamValueError(
            f"`bsam {command}` trains each run on one device and does not work with torchrun: use --jobs, or start it "
            "several times with the same --out and different --device"
        )


def planned_states(runs: PlannedRuns, out: Path) -> list[RunState]:
    """Return the states of all runs to train, in order: those that tune the base, those that tune radii, the others.

    Raise if the folder holds the results of another experiment.
    """
    from .report.recipe_results import check_folder

    check_folder(out, runs.recipe)
    tuned = TunedRuns(runs.recipe, runs.selected, out)
    return states_of([*tuned.base_trials, *tuned.trials, *tuned.finals], out)


def run_experiment(
    runs: PlannedRuns, options: ExperimentOptions, callbacks: Callbacks | None = None, train: bool = True
) -> ExperimentResult:
    """Train the selected runs that are not finished, and write the results of all runs.

    Args:
        runs: the runs of the experiment.
        options: where and how to train them.
        callbacks: called with what happens.
        train: whether to train; False only writes the results of the finished runs.

    Example:
        >>> import tempfile
        >>> from bsam.lab.recipes.compare_recipe import plan_comparison
        >>> with tempfile.TemporaryDirectory() as out:
        ...     runs = plan_comparison(
        ...         ["sgd", "sam"], {"epochs": 1, "limit_train": 128}, seeds=1
        ...     )
        ...     result = run_experiment(runs, ExperimentOptions(Path(out)))
        >>> [str(state) for state in result.states]
        ['done', 'done']
    """
    require_packages(NEEDS)
    callbacks = callbacks or Callbacks()
    states = planned_states(runs, options.out)
    failed: Mapping[str, str] = {}
    if train:
        callbacks.on_plan(runs.recipe, states)
        failed = _train(runs, options, sum(not state.ended for state in states), callbacks)
    return _write(runs, options.out, RunsFailed(failed, len(states)) if failed else None)


def _train(runs: PlannedRuns, options: ExperimentOptions, unfinished: int, callbacks: Callbacks) -> Mapping[str, str]:
    """Train the selected runs. Return why runs failed or diverged, by the name of the run directory."""
    recipe = runs.recipe
    out = options.out
    scale = recipe.scale(runs.scale)
    if options.download:
        download_all((run.data for run in runs.selected), options.data_dir, sys.stderr.isatty())
    if scale.threads is not None:
        torch.set_num_threads(scale.threads)
    check_number("checkpoint_every", options.checkpoint_every, low=0)
    fit_options = {name: getattr(options, name) for name in ("data_dir", "cache_dir", "device", "checkpoint_every")}
    make_executor = _executor(options, scale, unfinished, callbacks)
    check_data({run.data for run in runs.selected}, options.data_dir)
    failed: dict[str, str] = {}

    def train(stage_runs: Sequence[Run], stage: str) -> None:
        try:
            on_stage = callbacks.on_stage or (lambda *_: contextlib.nullcontext(callbacks))
            with on_stage(recipe, len(stage_runs), stage) as stage_callbacks:
                run_all(stage_runs, out, stage_callbacks, executor, **fit_options)
        except RunsFailed as error:
            failed.update(error.failed)

    with make_executor as executor:
        tuned = TunedRuns(recipe, runs.selected, out)
        if tuned.base_trials:
            train(tuned.base_trials, "tuning the base optimizer")
            tuned = TunedRuns(recipe, runs.selected, out)
        if tuned.trials and (tuned.base is None or tuned.base.settings is not None):
            train(tuned.trials, "tuning")
            tuned = TunedRuns(recipe, runs.selected, out)
        waiting = tuned.waiting
        failed |= {name: "its tuning failed" for name, (_, names) in waiting.items() if failed.keys() & set(names)}
        ready = [run for run in tuned.finals if run_dir_name(run) not in waiting]
        train(ready, "runs")
    states = states_of([*(run for run, _ in waiting.values()), *ready], out)
    if not all(state.ended or state.path.name in failed for state in states):
        callbacks.on_message(
            "Some runs are not finished: another process is training them, or the runs that they start from."
        )
    return {**failed, **{state.path.name: state.diverged for state in states if state.diverged is not None}}


def _executor(
    options: ExperimentOptions, scale: Scale, unfinished: int, callbacks: Callbacks
) -> contextlib.AbstractContextManager[Executor | None]:
    if options.ray is not None:
        if options.jobs is not None:
            raise BsamValueError("jobs (--jobs) starts processes here, ray (--ray) Ray tasks: use one of them")
        return ray_tasks(options.ray, options.gpus_per_run, options.device)
    if options.gpus_per_run is not None:
        raise BsamValueError(
            "gpus_per_run (--gpus-per-run) needs ray (--ray). Without Ray, runs share GPUs if jobs (--jobs) exceeds "
            "the number of GPUs"
        )
    is_default = options.jobs is None
    jobs = default_slots(options.device, unfinished, scale.workers) if options.jobs is None else options.jobs
    if jobs == 1:
        pick_device(options.device)  # raises before the first run, as the other executors do
        return contextlib.nullcontext()
    return local_processes(jobs, options.device, scale.threads, callbacks.on_message, is_default)


def _write(runs: PlannedRuns, out: Path, failure: RunsFailed | None) -> ExperimentResult:
    """Write the results of all runs."""
    from .report.recipe_results import text_below, write_recipe_page, write_results

    recipe = runs.recipe
    tuned = TunedRuns(recipe, runs.runs, out)
    states = states_of(tuned.finals, out)
    tuning_states = states_of([*tuned.base_trials, *tuned.trials], out)
    how = how_chosen(states, tuned.choice_by_name, tuned.base)
    selected = {run_dir_name(run) for run in TunedRuns(recipe, runs.selected, out).finals}
    comparison = None
    if runs.baseline is not None:
        comparison = compare_states(states, runs.baseline, tuned.choice_by_name, tuned.base)
        answer = [str(comparison)]
        recipe = replace(recipe, findings=lambda *_: answer)
    files = write_results(out, recipe, runs.scale, states, tuning_states, tuned.choices, selected, tuned.base, how)
    pages = write_recipe_page(out, recipe, [*states, *tuning_states], runs.baseline, how)
    page = pages[0] if pages else None
    summaries = table_info(recipe, states)
    return ExperimentResult(
        states,
        [*sections_info(recipe, summaries), *tuning_sections(recipe, tuned.choices, tuned.base)],
        text_below(recipe, summaries, states, tuned.choices, selected, tuned.base),
        [*files, *pages],
        page,
        None if comparison is None else replace(comparison, page=page),
        failure,
    )
