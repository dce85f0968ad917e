"""Train the runs of a study, tune them if the recipe says so, and write its tables, figures and page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..common.checks import check_number
from ..common.errors import BsamValueError
from ..common.extras import require_packages
from .data import download_all
from .recipes.study import Decision, Snapshot, Stage, Study
from .running.executors import Executor, default_slots, local_processes, ray_tasks
from .running.runner import Callbacks, RunsFailed, run_all
from .tasks import data_of
from .training.environment import devices_of, pick_device
from .training.run_writer import CHECKPOINT_EVERY

if TYPE_CHECKING:  # `bsam list` works without pandas
    from .report.recipe_results import StudyResult

NEEDS = dict.fromkeys(("safetensors", "pandas", "scipy", "jinja2"), "demo")  # the extra that installs them all


@dataclass(frozen=True)
class StudyOptions:
    """Where the data and the results of a study are, and how its runs are trained.

    Args:
        out: the folder of the study.
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


def plan_study(study: Study, out: Path) -> Decision:
    """Return the plan of a study, as far as the runs in a folder decide it.

    Raise if the folder holds the results of another study.
    """
    from .report.recipe_results import check_folder

    check_folder(out, study)
    return study.decide(Snapshot(out))


def run_study(
    study: Study, options: StudyOptions, callbacks: Callbacks | None = None, train: bool = True
) -> StudyResult:
    """Train the selected runs that are not finished, and write the results of all runs.

    Args:
        study: the runs.
        options: where and how to train them.
        callbacks: called with what happens.
        train: whether to train; False only writes the results of the finished runs.

    Example:
        >>> import tempfile
        >>> from bsam.lab.recipes.compare import plan_comparison
        >>> with tempfile.TemporaryDirectory() as out:
        ...     runs = plan_comparison(
        ...         ["sgd", "sam"], {"epochs": 1, "limit_train": 128}, seeds=1
        ...     )
        ...     result = run_study(runs, StudyOptions(Path(out)))
        >>> [str(state) for state in result.states]
        ['done', 'done']
    """
    require_packages(NEEDS)
    from .report.recipe_results import write_results

    callbacks = callbacks or Callbacks()
    decision = plan_study(study, options.out)
    failed: Mapping[str, str] = {}
    states = decision.selected_states
    if train:
        callbacks.on_begin(states)
        decision, failed = _train(study, decision, options, callbacks)
    result = write_results(study, decision)
    failed = {**result.unreadable, **failed}
    return replace(result, failure=RunsFailed(failed, len(states)) if failed else None)


def _train(
    study: Study, decision: Decision, options: StudyOptions, callbacks: Callbacks
) -> tuple[Decision, Mapping[str, str]]:
    """Train the selected runs, stage by stage: tuning runs up to the next halving, and in the end the final runs.

    Return what is decided then, and why runs failed or diverged, by the name of the run directory.
    """
    from .report.recipe_results import claim_folder

    plans = study.selected_plans
    entries = {plan.run.data: data_of(plan.run) for plan in plans}
    unfinished = sum(not state.ended for state in decision.selected_states)
    if options.download:
        download_all([name for name, entry in entries.items() if entry.sources], options.data_dir, sys.stderr.isatty())
    if study.threads is not None:
        torch.set_num_threads(study.threads)
    check_number("checkpoint_every", options.checkpoint_every, low=0)
    executor_of_runs = _executor(options, study, unfinished, callbacks)
    for name in sorted(entries):
        entries[name].check(options.data_dir)
    failed: dict[str, str] = {}
    locked: set[str] = set()  # by other processes, which go on with them
    with executor_of_runs as executor:
        if unfinished:
            claim_folder(options.out, study)
        while (stage := decision.stage) is not None:
            now, errors = _train_stage(stage, decision.now, options, callbacks, executor)
            failed |= errors
            locked |= {state.path.name for state in now.states(stage.plans) if not state.ended}
            decision = study.decide(now, {*failed, *locked})
            tuning_failed = [name for name, tried in decision.waiting.items() if failed.keys() & set(tried)]
            failed |= dict.fromkeys(tuning_failed, "its tuning failed")
    states = decision.now.states(decision.selected_finals)
    if not all(state.ended or state.path.name in failed for state in states):
        callbacks.on_message(
            "Some runs are not finished: another process is training them, or the runs that they start from."
        )
    return decision, {**failed, **{state.path.name: state.diverged for state in states if state.diverged is not None}}


def _train_stage(
    stage: Stage, now: Snapshot, options: StudyOptions, callbacks: Callbacks, executor: Executor | None
) -> tuple[Snapshot, Mapping[str, str]]:
    """Train the runs of a stage; return another look at those that had not ended, and why runs failed, by name."""
    shared = _is_shared(options, executor)
    abouts = {plan.name: {**plan.about, "shared": shared} for plan in stage.plans}
    fit_options = {name: getattr(options, name) for name in ("data_dir", "cache_dir", "device", "checkpoint_every")}
    begun = now.states(stage.plans)
    errors: Mapping[str, str] = {}
    try:
        run_all(begun, options.out, callbacks, executor, stage.title, abouts, **fit_options)
    except KeyboardInterrupt:
        callbacks.on_message("Stopping.")
        raise
    except RunsFailed as error:
        errors = error.failed
    return now.again([state.path.name for state in begun if not state.ended]), errors


def _is_shared(options: StudyOptions, executor: Executor | None) -> bool:
    """Return whether several runs may train on one device at the same time."""
    if options.ray is not None:
        return options.gpus_per_run is None or options.gpus_per_run < 1
    return executor is not None and executor.slots() > len(devices_of(options.device))


def _executor(
    options: StudyOptions, study: Study, unfinished: int, callbacks: Callbacks
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
    if jobs is None and study.timed:  # runs that share a device cannot be timed
        jobs = min(len(devices_of(options.device)), max(unfinished, 1))
    elif jobs is None:
        jobs = default_slots(options.device, unfinished, study.workers)
    if jobs == 1:
        pick_device(options.device)  # raises before the first run, as the other executors do
        return contextlib.nullcontext()
    return local_processes(jobs, options.device, study.threads, callbacks.on_message, is_default)
