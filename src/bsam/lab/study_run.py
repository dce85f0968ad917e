"""Train the runs of a study, tune them if the recipe says so, and write its tables, figures and page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..common.errors import BsamValueError
from ..common.extras import require_packages
from .data import download_all
from .recipes.study import Decision, Snapshot, Stage, Study
from .running.executors import Executor, default_slots, local_processes, ray_tasks
from .running.runner import RunsFailed, StudyCallbacks, run_all
from .tasks import data_of
from .training.machine import Machine, devices_of, pick_device

if TYPE_CHECKING:  # `bsam list` works without pandas
    from .report.recipe_results import StudyResult

STUDY_NEEDS = dict.fromkeys(("safetensors", "pandas", "scipy", "jinja2"), "demo")  # the extra that installs them all


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
    study: Study,
    out: Path,
    machine: Machine = Machine(),
    callbacks: StudyCallbacks = StudyCallbacks(),
    train: bool = True,
) -> StudyResult:
    """Train the selected runs that are not finished, and write the results of all runs.

    Args:
        study: the runs.
        out: the folder of the study.
        machine: where and how to train them.
        callbacks: called with what happens.
        train: whether to train; False only writes the results of the finished runs.

    Example:
        >>> import tempfile
        >>> from bsam.lab.recipes.compare import plan_comparison
        >>> with tempfile.TemporaryDirectory() as out:
        ...     runs = plan_comparison(
        ...         ["sgd", "sam"], {"epochs": 1, "limit_train": 128}, seeds=1
        ...     )
        ...     result = run_study(runs, Path(out))
        >>> [str(state) for state in result.states]
        ['done', 'done']
    """
    require_packages(STUDY_NEEDS)
    from .report.recipe_results import write_results

    decision = plan_study(study, out)
    failed: Mapping[str, str] = {}
    states = decision.selected_states
    if train:
        callbacks.on_begin(states)
        decision, failed = _train(study, decision, out, machine, callbacks)
    result = write_results(study, decision)
    failed = {**result.unreadable, **failed}
    return replace(result, failure=RunsFailed(failed, len(states)) if failed else None)


def _train(
    study: Study, decision: Decision, out: Path, machine: Machine, callbacks: StudyCallbacks
) -> tuple[Decision, Mapping[str, str]]:
    """Train the selected runs, stage by stage: tuning runs up to the next halving, and in the end the final runs.

    Return what is decided then, and why runs failed or diverged, by the name of the run directory.
    """
    from .report.recipe_results import claim_folder

    plans = study.selected_plans
    entries = {plan.run.data: data_of(plan.run) for plan in plans}
    unfinished = sum(not state.ended for state in decision.selected_states)
    data_dir = machine.folders.get("data_dir")
    if machine.download:
        download_all([name for name, entry in entries.items() if entry.sources], data_dir, sys.stderr.isatty())
    if study.threads is not None:
        torch.set_num_threads(study.threads)
    executor_of_runs = _executor(machine, study, unfinished, callbacks)
    for name in sorted(entries):
        entries[name].check(data_dir)
    failed: dict[str, str] = {}
    locked: set[str] = set()  # by other processes, which go on with them
    with executor_of_runs as executor:
        if unfinished:
            claim_folder(out, study)
        while (stage := decision.stage) is not None:
            now, errors = _train_stage(stage, decision.now, machine, callbacks, executor)
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
    stage: Stage, now: Snapshot, machine: Machine, callbacks: StudyCallbacks, executor: Executor | None
) -> tuple[Snapshot, Mapping[str, str]]:
    """Train the runs of a stage; return another look at those that had not ended, and why runs failed, by name."""
    shared = _is_shared(machine, executor)
    abouts = {plan.name: {**plan.about, "shared": shared} for plan in stage.plans}
    begun = now.states(stage.plans)
    errors: Mapping[str, str] = {}
    try:
        run_all(begun, now.out, replace(machine, download=False), callbacks, executor, stage.title, abouts)
    except KeyboardInterrupt:
        callbacks.on_message("Stopping.")
        raise
    except RunsFailed as error:
        errors = error.failed
    return now.again([state.path.name for state in begun if not state.ended]), errors


def _is_shared(machine: Machine, executor: Executor | None) -> bool:
    """Return whether several runs may train on one device at the same time."""
    if machine.ray is not None:
        return machine.gpus_per_run is None or machine.gpus_per_run < 1
    return executor is not None and executor.slots() > len(devices_of(machine.device))


def _executor(
    machine: Machine, study: Study, unfinished: int, callbacks: StudyCallbacks
) -> contextlib.AbstractContextManager[Executor | None]:
    if machine.ray is not None:
        return ray_tasks(machine)
    is_default = machine.jobs is None
    jobs = machine.jobs
    if jobs is None and study.timed:  # runs that share a device cannot be timed
        jobs = min(len(devices_of(machine.device)), max(unfinished, 1))
    elif jobs is None:
        jobs = default_slots(machine.device, unfinished, study.workers)
    if jobs == 1:
        pick_device(machine.device)  # raises before the first run, as the other executors do
        return contextlib.nullcontext()
    return local_processes(jobs, machine.device, study.threads, callbacks.on_message, is_default)
