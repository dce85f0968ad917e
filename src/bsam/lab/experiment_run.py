"""Train the runs of an experiment, tune them if the recipe says so, and write its tables, figures and page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..common.checks import check_number
from ..common.errors import BsamValueError
from ..common.extras import require_packages
from .data import check_data, download_all
from .recipes.experiments import Experiment
from .recipes.planning import Planned, states_of
from .recipes.scales import Scale
from .recipes.tuning import Tuned, tune
from .running.executors import Executor, default_slots, local_processes, ray_tasks
from .running.runner import Callbacks, RunsFailed, run_all
from .training.environment import devices_of, pick_device
from .training.run_dir import RunState
from .training.run_writer import CHECKPOINT_EVERY

if TYPE_CHECKING:  # `bsam list` works without pandas
    from .report.recipe_results import ExperimentResult

NEEDS = dict.fromkeys(("safetensors", "pandas", "scipy", "jinja2"), "demo")  # the extra that installs them all


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


def refuse_torchrun(command: str) -> None:
    """Raise if torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BsamValueError(
            f"`bsam {command}` trains each run on one device and does not work with torchrun: use --jobs, or start it "
            "several times with the same --out and different --device"
        )


def planned_states(experiment: Experiment, out: Path) -> list[RunState]:
    """Return the states of all runs to train, in order: those that tune the base, those that tune radii, the others.

    Raise if the folder holds the results of another experiment.
    """
    from .report.recipe_results import check_folder

    check_folder(out, experiment)
    tuned = tune(experiment.selected, experiment.tuning, out)
    return states_of([*tuned.base_trials, *tuned.trials, *tuned.finals], out)


def run_experiment(
    experiment: Experiment, options: ExperimentOptions, callbacks: Callbacks | None = None, train: bool = True
) -> ExperimentResult:
    """Train the selected runs that are not finished, and write the results of all runs.

    Args:
        experiment: the runs.
        options: where and how to train them.
        callbacks: called with what happens.
        train: whether to train; False only writes the results of the finished runs.

    Example:
        >>> import tempfile
        >>> from bsam.lab.recipes.comparison import plan_comparison
        >>> with tempfile.TemporaryDirectory() as out:
        ...     runs = plan_comparison(
        ...         ["sgd", "sam"], {"epochs": 1, "limit_train": 128}, seeds=1
        ...     )
        ...     result = run_experiment(runs, ExperimentOptions(Path(out)))
        >>> [str(state) for state in result.states]
        ['done', 'done']
    """
    require_packages(NEEDS)
    from .report.recipe_results import write_results

    callbacks = callbacks or Callbacks()
    states = planned_states(experiment, options.out)
    failed: Mapping[str, str] = {}
    if train:
        failed = _train(experiment, options, sum(not state.ended for state in states), callbacks)
    result = write_results(experiment, options.out)
    failed = {**result.unreadable, **failed}
    return replace(result, failure=RunsFailed(failed, len(states)) if failed else None)


def _train(
    experiment: Experiment, options: ExperimentOptions, unfinished: int, callbacks: Callbacks
) -> Mapping[str, str]:
    """Train the selected runs. Return why runs failed or diverged, by the name of the run directory."""
    from .report.recipe_results import claim_folder

    out, scale = options.out, experiment.scale
    selected = experiment.selected
    names = {plan.run.data: None for plan in selected if not plan.run.task.is_own}
    if options.download:
        download_all(names, options.data_dir, sys.stderr.isatty())
    if scale.threads is not None:
        torch.set_num_threads(scale.threads)
    check_number("checkpoint_every", options.checkpoint_every, low=0)
    fit_options = {name: getattr(options, name) for name in ("data_dir", "cache_dir", "device", "checkpoint_every")}
    make_executor = _executor(options, scale, unfinished, callbacks, experiment.recipe.timed)
    check_data(names, options.data_dir)
    failed: dict[str, str] = {}

    def train(planned: Sequence[Planned], stage: str) -> None:
        shared = _is_shared(options, executor)
        abouts = {plan.name: {**plan.about, "shared": shared} for plan in planned}
        until = {plan.name: plan.until for plan in planned}
        try:
            run_all([plan.run for plan in planned], out, callbacks, executor, stage, abouts, until, **fit_options)
        except KeyboardInterrupt:
            callbacks.on_message("Stopping.")
            raise
        except RunsFailed as error:
            failed.update(error.failed)

    def train_trials(stage: str, trials_of: Callable[[Tuned], Sequence[Planned]]) -> Tuned:
        """Train tuning runs, and go on with those that halving selects, until nothing new is to be trained."""
        trained: Sequence[Planned] = []
        while (trials := trials_of(tuned := tune(selected, experiment.tuning, out))) != trained:
            train([plan for plan in trials if plan.name not in failed], stage)
            trained = trials
        return tuned

    with make_executor as executor:
        if unfinished:
            claim_folder(out, experiment)
        tuned = train_trials("tuning the base optimizer", lambda tuned: tuned.base_trials)
        if tuned.base is None or tuned.base.best() is not None:
            tuned = train_trials("tuning", lambda tuned: tuned.trials)
        failed |= {name: "its tuning failed" for name, names in tuned.waiting.items() if failed.keys() & set(names)}
        train([plan for plan in tuned.finals if plan.name not in tuned.waiting], "runs")
    states = states_of(tuned.finals, out)
    if not all(state.ended or state.path.name in failed for state in states):
        callbacks.on_message(
            "Some runs are not finished: another process is training them, or the runs that they start from."
        )
    return {**failed, **{state.path.name: state.diverged for state in states if state.diverged is not None}}


def _is_shared(options: ExperimentOptions, executor: Executor | None) -> bool:
    """Return whether several runs may train on one device at the same time."""
    if options.ray is not None:
        return options.gpus_per_run is None or options.gpus_per_run < 1
    return executor is not None and executor.slots() > len(devices_of(options.device))


def _executor(
    options: ExperimentOptions, scale: Scale, unfinished: int, callbacks: Callbacks, timed: bool = False
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
    is_default, jobs = options.jobs is None, options.jobs
    if jobs is None and timed:  # runs that share a device cannot be timed
        jobs = min(len(devices_of(options.device)), max(unfinished, 1))
    elif jobs is None:
        jobs = default_slots(options.device, unfinished, scale.workers)
    if jobs == 1:
        pick_device(options.device)  # raises before the first run, as the other executors do
        return contextlib.nullcontext()
    return local_processes(jobs, options.device, scale.threads, callbacks.on_message, is_default)
